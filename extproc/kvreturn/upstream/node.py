"""What is known of one node: whether it may be chosen, and the load of each of its engines."""

from dataclasses import dataclass, field
from typing import Literal

from kvreturn.core.address import seat

State = Literal["up", "out", "probing", "draining"]
STATES: tuple[State, ...] = ("up", "out", "probing", "draining")
Reason = Literal["connect", "errors", "health", "probe"]
REASONS: tuple[Reason, ...] = ("connect", "errors", "health", "probe")
BACKOFF = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds out of the pool after the 1st, 2nd, ... failure in a row
UNSEEN = 3
"""Health checks that fail, before anything has gone well, until somebody should look."""
_MISSES = 2  # health checks in a row that fail before a node is out: one may meet a node that is just very busy


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as it is now, for people.

    Attributes:
        address: `host:port`.
        state: `out` for a time, then `probing` until a health check has said yes; `draining`: no new requests.
        load: what is outstanding: tokens of prompts on prefill nodes, requests on decode nodes.
        failures: ejections in a row, without a good answer between them.
        engines: ids of the engines behind the address, as far as answers have told.
        loads: `load` by data-parallel rank.
        unseen: whether nothing has ever gone well there, and checks have been tried: it may not exist.
    """

    address: str
    state: State
    load: int
    failures: int
    engines: tuple[str, ...] = ()
    loads: tuple[int, ...] = ()
    unseen: bool = False


@dataclass(slots=True)
class Engine:
    """One engine behind a node's address: a data-parallel rank, or all there is."""

    load: int = 0
    chosen: int = 0  # when it was chosen last, as a number that grows


@dataclass(slots=True)
class Node:
    """One node.

    Attributes:
        address: `host:port`.
        engines: by data-parallel rank; most nodes have one.
        terminating: whether whoever runs the nodes takes it away.
        drained: whether the operator does.
        failures: ejections in a row.
        out_until: when its time out is over.
        out: whether it is out, or has been and nothing has shown yet that it is back.
        checked: whether a health check ever went well. Until then those that fail tell nothing: perhaps the router
            just cannot reach the node the way that health checks go.
    """

    address: str
    engines: list[Engine] = field(default_factory=lambda: [Engine()])
    terminating: bool = False
    drained: bool = False
    failures: int = 0
    out_until: float = 0.0
    out: bool = False
    checked: bool = False
    _errors: int = 0
    _misses: int = 0
    _served: bool = False  # whether it ever answered a request well
    _unseen: int = 0  # health checks that failed, as long as none went well

    def seats(self) -> list[str]:
        """The names of its engines, by rank."""
        many = len(self.engines) > 1
        return [seat(self.address, rank if many else None) for rank in range(len(self.engines))]

    @property
    def draining(self) -> bool:
        """Whether it gets no new requests."""
        return self.terminating or self.drained

    def state(self, now: float) -> State:
        """In one word."""
        if self.draining:
            return "draining"
        if not self.out:
            return "up"
        if self.out_until > now:
            return "out"
        # Where no health check can tell, the next request must.
        return "probing" if self.checked else "up"

    def usable(self, now: float) -> bool:
        """Whether nothing speaks against its answering."""
        return not self.out or (self.out_until <= now and not self.checked)

    @property
    def unseen(self) -> bool:
        """Whether nothing has ever gone well there, and checks have been tried."""
        return self._unseen >= UNSEEN and not (self.checked or self._served)

    def eject(self, now: float) -> bool:
        """Take it out for a while, longer each time in a row. Returns whether it was in."""
        if self.out_until > now:
            return False  # requests that were under way together count once
        self.out_until = now + BACKOFF[min(self.failures, len(BACKOFF) - 1)]
        self.failures += 1
        self._errors = self._misses = 0
        self.out = True
        return True

    def erred(self, limit: int) -> bool:
        """It answered a request with a 5xx. Returns whether those are too many in a row."""
        self._errors += 1
        return self._errors >= limit

    def answered(self) -> bool:
        """It answered a request well. Returns whether it was out."""
        was, self.out, self._served = self.out, False, True
        self.out_until, self.failures, self._errors = 0.0, 0, 0
        return was

    def passed_check(self, now: float) -> bool:
        """A health check went well. Returns whether that brings it back.

        Its count of failures stays until it has answered a request: a server may be well whose engine is not.
        """
        self.checked, self._misses = True, 0
        if not self.out or self.out_until > now:
            return False
        self.out = False
        return True

    def failed_check(self, now: float) -> Reason | None:
        """A health check failed. Returns why the node is to be ejected, if it is."""
        self._unseen += not self.checked
        if not self.checked or self.out_until > now:
            return None
        if self.out:
            return "probe"
        self._misses += 1
        return "health" if self._misses >= _MISSES else None
