"""A node's KV cache, by conversation: what requests hold, and behind it the prefix cache.

The simulator's `BlockPool` keeps blocks; here a conversation is one number, how many of its first tokens are there.
That is the same as long as conversations only grow and share nothing but one system prompt, which is taken to be there
since the first of them: vLLM evicts what was released least recently, and of one sequence its end first.
"""

from collections import OrderedDict, deque

from scale.loop import Loop, Process, Steps

BLOCK = 16  # tokens: vLLM's default


class Memory:
    """Room for so many tokens.

    Args:
        loop: time.
        capacity: tokens.
        block: tokens of a block.
        shared: first tokens that all conversations have in common.
        caching: vLLM's `--enable-prefix-caching`.

    Attributes:
        held: tokens of requests, leases and pins, without those in common.
    """

    def __init__(self, loop: Loop, capacity: int, block: int = BLOCK, shared: int = 0, *, caching: bool = True) -> None:
        self._loop = loop
        self._shared = shared if caching else 0
        self.capacity = capacity - self._shared
        self._block = block
        self._caching = caching
        self.held = 0
        self._warm = False
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._cached = 0
        self._line: deque[tuple[int, int, int, Process]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._line)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds: vLLM's `kv_cache_usage_perc`."""
        return self.held / self.capacity

    def own(self, tokens: int) -> int:
        """How many of a conversation's tokens are its own."""
        return max(tokens - self._shared, 0)

    def admit(self, conversation: int, prompt: int, tokens: int) -> Steps:
        """Wait for room, first come first served.

        Args:
            conversation: whose.
            prompt: tokens that may be found in the prefix cache, all but the last.
            tokens: to hold from now on, prompt included.

        Returns:
            How many tokens of the prompt are there already.

        Raises:
            ValueError: the node is too small for it.
        """
        own = self.own(tokens)
        if own > self.capacity:
            raise ValueError(f"{tokens} tokens never fit into {self.capacity}: shorten the conversations")
        if not self._line:
            local = self._take(conversation, prompt, own)
            if local is not None:
                return local
        self._line.append((conversation, prompt, own, self._loop.current))
        return (yield None)

    def release(self, conversation: int, tokens: int) -> None:
        """Give up what a conversation holds; its full blocks stay in the prefix cache as long as there is room."""
        own = self.own(tokens)
        self.held -= own
        if self._caching:
            self._warm = True
            full = own - own % self._block
            known = self._cache.pop(conversation, 0)
            self._cache[conversation] = max(full, known)
            self._cached += max(full - known, 0)
            self._evict()
        self._advance()

    def _take(self, conversation: int, prompt: int, own: int) -> int | None:
        if self.held + own > self.capacity:
            return None
        known = self._cache.pop(conversation, 0)
        self._cached -= known
        self.held += own
        self._evict()
        return min(known + self._shared * self._warm, (prompt - 1) // self._block * self._block)

    def _evict(self) -> None:
        over = self.held + self._cached - self.capacity
        while over > 0:
            conversation, known = self._cache.popitem(last=False)
            if known > over:
                self._cache[conversation] = known - over
                self._cache.move_to_end(conversation, last=False)
            self._cached -= min(known, over)
            over -= known

    def _advance(self) -> None:
        while self._line:
            conversation, prompt, own, process = self._line[0]
            local = self._take(conversation, prompt, own)
            if local is None:
                return
            self._line.popleft()
            self._loop.wake(process, local)
