"""What the admin view knows of turns: those that run, the last ones that ended, and how reuse went lately."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from kvreturn.core.outcome import FRESH, REUSED, Outcome

RECENT = 200  # turns that are remembered
STEP, STEPS = 10.0, 60  # seconds of one step of the history, and how many there are
Phase = Literal["arriving", "prefill", "decode", "streaming", "ended"]


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as people may see it: no contents, no ids but digests. None for what is not known (yet).

    Attributes:
        phase: what it waits for.
        age: seconds since its headers came.
        quiet: seconds since something of it last happened.
        api: of its path.
        model: what the client wrote, which may be anything.
        tenant: digest of whose it is.
        session: digest of the client's own conversation, None if it named none.
        outcome: what becomes of reuse, as far as that is known.
        detail: a word more.
        status: HTTP status that the client got.
        error: a word if it failed.
        prefill_node: P's address.
        decode_node: D's address.
        request: `x-request-id` that the nodes get.
        request_bytes: bytes of its body.
        response_bytes: bytes of D's answer so far.
        prompt: tokens of its prompt.
        read: tokens that P read from D.
        local: tokens that P had itself.
        prefill_ms: milliseconds of the prefill leg, retries included.
        first_token_ms: milliseconds until the client got its first content.
        going: how its KV goes back, and by which rule.
        captured: whether it left a handle.
        trace: W3C trace id.
    """

    phase: Phase
    age: float
    quiet: float
    api: str
    model: str
    tenant: str
    session: str | None
    outcome: Outcome
    detail: str | None
    status: int | None
    error: str | None
    prefill_node: str | None
    decode_node: str | None
    request: str | None
    request_bytes: int
    response_bytes: int
    prompt: int | None
    read: int | None
    local: int | None
    prefill_ms: float
    first_token_ms: float | None
    going: str | None
    captured: bool
    trace: str | None


class Watched(Protocol):
    """A turn that runs."""

    def view(self) -> TurnView:
        """It, as it is now."""


@dataclass(slots=True)
class Step:
    """What ended within some seconds.

    Attributes:
        number: which ones, counted from the clock's zero.
        turns: all turns.
        continuations: those that might have reused something.
        reused: those that did.
    """

    number: int
    turns: int = 0
    continuations: int = 0
    reused: int = 0


class Board:
    """Follows turns.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[int, Watched] = {}
        self._recent: deque[tuple[float, TurnView]] = deque(maxlen=RECENT)
        self._steps: deque[Step] = deque(maxlen=STEPS)

    def began(self, turn: Watched) -> None:
        """A turn is here."""
        self._live[id(turn)] = turn

    def ended(self, turn: Watched) -> None:
        """It is over."""
        del self._live[id(turn)]
        now, view = self._clock(), turn.view()
        self._recent.append((now, view))
        number = int(now // STEP)
        if not self._steps or self._steps[-1].number != number:
            self._steps.append(Step(number))
        step = self._steps[-1]
        step.turns += 1
        step.continuations += view.outcome not in FRESH
        step.reused += view.outcome in REUSED

    def left(self, turn: Watched) -> None:
        """It is over, and its outcome is another one's to tell: the one of its P leg."""
        del self._live[id(turn)]

    def live(self) -> list[TurnView]:
        """Turns that run, the oldest first."""
        return [turn.view() for turn in self._live.values()]

    def recent(self) -> list[tuple[float, TurnView]]:
        """Turns that have ended, the last one first, and how many seconds ago."""
        now = self._clock()
        return [(now - at, view) for at, view in reversed(self._recent)]

    def history(self) -> list[Step]:
        """The last steps without a gap, the one that goes on now last."""
        there = {step.number: step for step in self._steps}
        last = int(self._clock() // STEP)
        return [there.get(n) or Step(n) for n in range(last - STEPS + 1, last + 1)]
