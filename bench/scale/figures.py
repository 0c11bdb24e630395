"""What is counted while a model runs, and what a run gives."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Served:
    """One turn.

    Attributes:
        asked: seconds since the start.
        first: seconds to the first token.
        follows: whether it has a predecessor.
        prompt: tokens of it.
        held: of these, what D had after the turn before.
        local: tokens that P's prefix cache had.
        read: tokens that P read from D.
        moved: tokens that D read from P.
        outcome: of reuse, in one word.
    """

    asked: float
    first: float
    follows: bool
    prompt: int
    held: int
    local: int
    read: int
    moved: int
    outcome: str


def _numbers() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class Tally:
    """Counts turns that begin between two times.

    Attributes:
        begin: seconds since the start.
        end: likewise.
    """

    begin: float
    end: float
    turns: int = 0
    follows: int = 0
    hits: int = 0
    held: int = 0
    reused: int = 0
    computed: int = 0
    read: int = 0
    returned: int = 0
    moved: int = 0
    first: "array[float]" = field(default_factory=_numbers)
    later: "array[float]" = field(default_factory=_numbers)
    pinned: "array[float]" = field(default_factory=_numbers)
    work: list[tuple[float, float]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def worked(self, now: float, seconds: float) -> None:
        """All P together have worked for so many seconds by now."""
        if self.counts(now):
            self.work[1:] = [(now, seconds)]

    @property
    def busy(self) -> float:
        """How many P worked at a time, on average."""
        if len(self.work) < 2:  # noqa: PLR2004 - a first and a last look
            return 0.0
        (begun, before), (ended, after) = self.work
        return (after - before) / (ended - begun)

    def counts(self, now: float) -> bool:
        """Whether what happens now counts."""
        return self.begin <= now < self.end

    def served(self, turn: Served) -> None:
        """A turn has its first token."""
        if not self.counts(turn.asked):
            return
        had = turn.local + turn.read
        self.turns += 1
        self.computed += turn.prompt - had
        self.read += turn.read
        self.moved += turn.moved
        (self.later if turn.follows else self.first).append(turn.first)
        self.outcomes[turn.outcome] += 1
        if turn.follows:
            self.follows += 1
            self.held += turn.held
            self.reused += min(had, turn.held)
            self.hits += had + 16 >= turn.held


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run gave. All but the times and the outcomes are means.

    Attributes:
        way: its name.
        turns: that were counted.
        rate: turns per second and pair.
        hit: share of later turns for which P computed nothing (but for a partial block) that D already had.
        reuse: share of the tokens that D had, of later turns, that P did not compute.
        ttft: seconds to the first token of later turns: by percentile.
        ttft_first: the same of first turns.
        computed: prompt tokens that P computed per turn.
        returned: tokens from D to P per turn, for turns and for returns.
        moved: tokens from P to D per turn.
        pinned: share of D's memory in pins, on average and at most.
        busy: share of the time for which P computed.
        outcomes: of reuse, as shares of all turns.
        choices: of `auto` and why, as shares.
    """

    way: str
    turns: int
    rate: float
    hit: float
    reuse: float
    ttft: dict[int, float]
    ttft_first: dict[int, float]
    computed: float
    returned: float
    moved: float
    pinned: tuple[float, float]
    busy: float
    outcomes: dict[str, float]
    choices: dict[str, float]


PERCENTILES = (50, 90, 99)


def percentiles(values: "array[float]") -> dict[int, float]:
    """Of seconds; nearest rank. Empty if there are none."""
    order = sorted(values)
    return {p: order[min(len(order) * p // 100, len(order) - 1)] for p in PERCENTILES} if order else {}


def shares(counts: Counter[str]) -> dict[str, float]:
    """Of the whole, the largest first."""
    whole = max(counts.total(), 1)
    return {word: n / whole for word, n in counts.most_common()}


def figures(way: str, tally: Tally, pairs: int, choices: Counter[str]) -> Figures:
    """Sum up."""
    turns, pinned = max(tally.turns, 1), tally.pinned or array("d", [0.0])
    return Figures(
        way=way,
        turns=tally.turns,
        rate=tally.turns / (tally.end - tally.begin) / pairs,
        hit=tally.hits / max(tally.follows, 1),
        reuse=tally.reused / max(tally.held, 1),
        ttft=percentiles(tally.later),
        ttft_first=percentiles(tally.first),
        computed=tally.computed / turns,
        returned=(tally.read + tally.returned) / turns,
        moved=tally.moved / turns,
        pinned=(sum(pinned) / len(pinned), max(pinned)),
        busy=tally.busy / pairs,
        outcomes=shares(tally.outcomes),
        choices=shares(choices),
    )


def as_json(found: Figures) -> dict[str, Any]:
    """For others to read."""
    return {name: getattr(found, name) for name in Figures.__slots__}
