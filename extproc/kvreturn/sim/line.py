"""Those that wait for KV blocks, in order."""

import asyncio
from bisect import insort
from collections.abc import Callable

from kvreturn.sim.sequence import Sequence


class WaitingLine:
    """Sequences by rank. As in vLLM, one that gets no blocks holds up all behind it, even those that would fit.

    Args:
        take: takes a sequence's blocks, or says that there are not enough.
    """

    def __init__(self, take: Callable[[Sequence], bool]) -> None:
        self._take = take
        self._line: list[Sequence] = []

    def join(self, seq: Sequence) -> None:
        """Let `seq` wait; its `place` is done as soon as it has its blocks, which may be at once."""
        seq.place = asyncio.get_running_loop().create_future()
        insort(self._line, seq, key=lambda waiting: waiting.rank)
        self.advance()

    def leave(self, seq: Sequence) -> None:
        """Forget `seq`, if it waits."""
        if seq in self._line:
            self._line.remove(seq)
            self.advance()

    def advance(self) -> None:
        """Hand out blocks that have become free."""
        while self._line:
            first = self._line[0]
            assert first.place is not None
            if not first.place.done():  # a cancelled one has yet to leave
                if not self._take(first):
                    return
                first.place.set_result(None)
            del self._line[0]
