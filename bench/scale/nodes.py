"""Prefill and decode nodes: memory, one prompt at a time, and what they keep for one another."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvreturn.core.choice import Pressure
from kvreturn.sim import Timing
from scale.loop import Loop, Process
from scale.memory import Memory


class Node:
    """What both kinds have.

    Args:
        loop: time.
        name: of it.
        timing: how fast it is.
        memory: its KV cache.

    Attributes:
        load: what it has not answered yet, as the router counts: tokens on P, requests on D.
        pressure: what its metrics said last; None before the first look.
        busy: seconds for which its engine worked on prompts.
        computed: tokens of prompts that it computed.
    """

    def __init__(self, loop: Loop, name: str, timing: Timing, memory: Memory) -> None:
        self._loop = loop
        self.name = name
        self.timing = timing
        self.memory = memory
        self.load = 0
        self.chosen = 0
        self.pressure: Pressure | None = None
        self.busy = 0.0
        self.computed = 0
        self._free_at = 0.0

    def compute(self, tokens: int) -> float:
        """Seconds until so many tokens are computed, behind all that was asked for before."""
        now, work = self._loop.now, self.timing.prefill(tokens)
        self.busy += work
        self.computed += tokens
        self._free_at = max(now, self._free_at) + work
        return self._free_at - now


class PrefillNode(Node):
    """P.

    Attributes:
        loading: requests that wait for KV to come: vLLM counts them as waiting.
        slots: returns that may begin.
        returns: returns that wait for a slot.
    """

    def __init__(self, loop: Loop, name: str, timing: Timing, memory: Memory, slots: int) -> None:
        super().__init__(loop, name, timing, memory)
        self.loading = 0
        self.slots = slots
        self.returns: deque[Process] = deque()

    def look(self) -> None:
        """The router reads its metrics."""
        self.pressure = Pressure(self.memory.usage, self.memory.waiting + self.loading, 0)


@dataclass(slots=True, eq=False)
class Talk:
    """A conversation, as far as the router knows it.

    Attributes:
        number: of it.
        length: tokens so far.
        prompt: tokens of the latest prompt.
        turns: how many there were.
        prefill: the P that had the latest turn.
        decode: the D that had it.
        pin: the handle, if D still keeps the blocks for it.
        keeper: the D of the pin.
        returned: tokens that went back to `prefill`.
        returning: whether they are on their way.
        waiter: the next turn, waiting for that.
        asking: whether a turn is under way that waits for nothing of the kind.
    """

    number: int
    length: int = 0
    prompt: int = 0
    turns: int = 0
    prefill: PrefillNode | None = None
    decode: "DecodeNode | None" = None
    pin: "Pin | None" = None
    keeper: "DecodeNode | None" = None
    returned: int = 0
    returning: bool = False
    waiter: Process | None = field(default=None, repr=False)
    asking: bool = False

    @property
    def ticket(self) -> bytes:
        """Of the latest turn's record."""
        return b"%d %d" % (self.number, self.turns)


@dataclass(slots=True, eq=False)
class Pin:
    """What D keeps of a turn.

    Attributes:
        talk: whose.
        tokens: of it.
        expires: seconds since the start, after which nobody may read it.
        gone: why it cannot be read any more.
        recallable: whether it may go back after all, once D is full.
        reading: whether P reads it: what is read is freed only then.
    """

    talk: Talk
    tokens: int
    expires: float
    gone: str = ""
    recallable: bool = False
    reading: bool = False


class DecodeNode(Node):
    """D.

    Args:
        loop: time.
        name: of it.
        timing: how fast it is.
        memory: its KV cache.
        retention: seconds for which it keeps a turn's blocks; share of the memory that pins may keep (our connector's
            `retention_budget`).

    Attributes:
        pinned: tokens in pins.
        pins: the oldest first, which is also the first to expire.
        dropped: pins that had to go before their time.
    """

    def __init__(self, loop: Loop, name: str, timing: Timing, memory: Memory, retention: tuple[float, float]) -> None:
        super().__init__(loop, name, timing, memory)
        self._ttl, share = retention
        self._budget = int(share * memory.capacity)
        self.pinned = 0
        self.pins: OrderedDict[int, Pin] = OrderedDict()
        self.dropped = 0

    def pin(self, talk: Talk, tokens: int) -> Pin | None:
        """Keep what a request holds. As in the connector, the oldest pins go if all are over the budget."""
        self.reap()
        own = self.memory.own(tokens)
        while self.pinned + own > self._budget:
            oldest = next((pin for pin in self.pins.values() if not pin.reading), None)
            if oldest is None or own > self._budget:
                self.memory.release(talk.number, tokens)
                return None
            self.dropped += 1
            self.unpin(oldest, "dropped")
        pin = Pin(talk, tokens, self._loop.now + self._ttl)
        self.pins[id(pin)] = pin
        self.pinned += own
        return pin

    def unpin(self, pin: Pin, why: str) -> None:
        """Free it, if it is still there."""
        if self.pins.pop(id(pin), None) is not None:
            pin.gone = why
            self.pinned -= self.memory.own(pin.tokens)
            self.memory.release(pin.talk.number, pin.tokens)

    def reap(self) -> None:
        """Free what is overdue."""
        now = self._loop.now
        while self.pins:
            oldest = next(iter(self.pins.values()))
            if oldest.expires > now or oldest.reading:
                break
            self.unpin(oldest, "expired")

    def look(self) -> None:
        """The router reads its metrics."""
        self.reap()
        memory = self.memory
        self.pressure = Pressure(memory.usage, memory.waiting, 0, self.pinned / memory.capacity)
