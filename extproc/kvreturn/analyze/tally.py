"""Sums over all turns, in one pass and in memory that does not grow with them."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvreturn.analyze.model import Rates
from kvreturn.analyze.observation import Answered, Link, Measured, Turn
from kvreturn.core.outcome import FRESH, Outcome

TTLS = (30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 1800.0, 3600.0)
_STEP = math.log(1.02)
_TIME_BINS = 4096


class Distribution:
    """How often positive values came, exact to 1%."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Count a value; what is below a microsecond, or a millionth, counts as that."""
        self._bins[round(math.log(max(value, 1e-6)) / _STEP)] += 1

    def points(self) -> list[tuple[float, float]]:
        """(value, share of all at or below it), ascending."""
        total, below, out = self._bins.total(), 0, []
        for index, count in sorted(self._bins.items()):
            below += count
            out.append((math.exp(index * _STEP), below / total))
        return out

    def percentile(self, share: float) -> float | None:
        """The least value with this share at or below it; None of nothing."""
        return next((value for value, below in self.points() if below >= share), None)


@dataclass(slots=True)
class Waits:
    """Time that D holds, or would hold, blocks: by whether the next turn comes within each of some TTLs.

    Attributes:
        edges: TTLs in seconds, ascending.
        turns: follow-up turns per interval between edges.
        tokens: their repeated tokens.
        pinned: tokens that D holds of the turns before.
        pinned_seconds: these, times the seconds until the follow-up turn.
    """

    edges: Sequence[float]
    turns: list[int] = field(init=False)
    tokens: list[int] = field(init=False)
    pinned: list[int] = field(init=False)
    pinned_seconds: list[float] = field(init=False)

    def __post_init__(self) -> None:
        """One interval more than edges."""
        size = len(self.edges) + 1
        self.turns, self.tokens, self.pinned, self.pinned_seconds = [0] * size, [0] * size, [0] * size, [0.0] * size

    def followed(self, gap: float, tokens: int) -> None:
        """A turn came `gap` seconds after the one before, and repeats `tokens`."""
        i = bisect_left(self.edges, gap)
        self.turns[i] += 1
        self.tokens[i] += tokens

    def held(self, gap: float, tokens: int) -> None:
        """D holds `tokens` until a turn or the end of the log comes, `gap` seconds later."""
        i = bisect_left(self.edges, gap)
        self.pinned[i] += tokens
        self.pinned_seconds[i] += gap * tokens

    def within(self, edge: int) -> tuple[int, int, float]:
        """For the TTL `edges[edge]`: turns and repeated tokens within it, and token seconds that D holds."""
        seconds = sum(self.pinned_seconds[: edge + 1]) + self.edges[edge] * sum(self.pinned[edge + 1 :])
        return sum(self.turns[: edge + 1]), sum(self.tokens[: edge + 1]), seconds


@dataclass(slots=True)
class Sums:
    """Plain sums. Tokens are prompt tokens unless they say otherwise.

    Attributes:
        turns: all.
        conversations: all.
        prompt: of all turns.
        follow_ups: turns with a turn before them in their conversation.
        follow_up_prompt: of follow-up turns.
        repeated: min(previous prompt, this prompt), over follow-up turns.
        repeated_with_answers: as `repeated`, with the previous answer where the log knows it.
        answers_known: follow-up turns whose previous answer's tokens are known.
        late: follow-up turns after the TTL.
        reused: read back, by the model.
        reused_turns: turns that read.
        saved: seconds of prefill that reads save, less what they cost.
        computed: seconds of prefill of all turns without reads.
        estimated: turns whose prompt tokens were estimated from bytes.
        cached_known: turns whose prefix cache hits the log knows.
        all_cached: tokens of these hits, over all turns.
        repeats: turns with the time and the tokens of the one before: a log that was read twice, perhaps.
    """

    turns: int = 0
    conversations: int = 0
    prompt: int = 0
    follow_ups: int = 0
    follow_up_prompt: int = 0
    repeated: int = 0
    repeated_with_answers: int = 0
    answers_known: int = 0
    late: int = 0
    reused: int = 0
    reused_turns: int = 0
    saved: float = 0.0
    computed: float = 0.0
    estimated: int = 0
    cached_known: int = 0
    all_cached: int = 0
    repeats: int = 0


class Tally:
    """Takes turns sorted by conversation and time.

    Args:
        ttl: seconds for which D holds blocks.
        rates: the model.
        span: time of the first and the last turn, seconds.
        use_cached: whether to believe the log's prefix cache hits.
    """

    def __init__(self, ttl: float, rates: Rates, span: tuple[float, float], *, use_cached: bool = True) -> None:
        self.ttl = ttl
        self.rates = rates
        self.span = span
        self.sums = Sums()
        self.links: Counter[Link] = Counter()
        self.gaps = Distribution()
        self.waits = Waits(sorted({*TTLS, ttl}))
        self.prefill_off = Distribution()
        self.prefill_on = Distribution()
        self._use_cached = use_cached
        self._pin_steps = [0] * (_TIME_BINS + 1)

    @property
    def seconds(self) -> float:
        """From the first turn to the last."""
        return self.span[1] - self.span[0]

    @property
    def peak_pinned(self) -> int:
        """The most tokens that D holds for turns to come at any time, to a 4096th of the time."""
        now = most = 0
        for step in self._pin_steps:
            now += step
            most = max(most, now)
        return most

    def take(self, turns: Iterable[Turn]) -> None:
        """Count all turns."""
        before: Turn | None = None
        for turn in turns:
            if before is not None and before.session != turn.session:
                self._pin(before, self.span[1])
                before = None
            self._count(turn)
            if before is None:
                self.sums.conversations += 1
                self.sums.computed += self.rates.prefill_seconds(turn.sizes.prompt - self._cached(turn))
            else:
                self._follow(before, turn)
                self._pin(before, turn.ts)
            before = turn
        if before is not None:
            self._pin(before, self.span[1])

    def _count(self, turn: Turn) -> None:
        sums, sizes = self.sums, turn.sizes
        sums.turns += 1
        sums.prompt += sizes.prompt
        sums.estimated += sizes.estimated
        self.links[turn.link] += 1
        if sizes.cached is not None:
            sums.cached_known += 1
            sums.all_cached += sizes.cached

    def _follow(self, before: Turn, turn: Turn) -> None:
        sums, prompt, gap = self.sums, turn.sizes.prompt, turn.ts - before.ts
        repeated = reusable = min(before.sizes.known, prompt)
        if before.sizes.completion is not None and turn.answered is not Answered.REFUTED:
            reusable = min(before.sizes.known + before.sizes.completion, prompt)
            sums.answers_known += 1
        sums.follow_ups += 1
        sums.follow_up_prompt += prompt
        sums.repeated += repeated
        sums.repeated_with_answers += reusable
        sums.repeats += gap == 0 and prompt == before.sizes.prompt
        self.gaps.add(gap)
        self.waits.followed(gap, repeated)
        cached = self._cached(turn)
        off = self.rates.prefill_seconds(prompt - cached)
        saved = 0.0
        if gap > self.ttl:
            sums.late += 1
        else:
            beyond = max(reusable - cached, 0)
            saved = self.rates.saving(beyond)
            if beyond >= self.rates.min_tokens:
                sums.reused += beyond
                sums.reused_turns += 1
        sums.saved += saved
        sums.computed += off
        self.prefill_off.add(off)
        self.prefill_on.add(off - saved)

    def _cached(self, turn: Turn) -> int:
        return min(turn.sizes.cached or 0, turn.sizes.prompt) if self._use_cached else 0

    def _pin(self, turn: Turn, until: float) -> None:
        """D holds a turn's blocks until the next one reads them, or the TTL is over."""
        tokens, gap = turn.sizes.prompt + (turn.sizes.completion or 0), until - turn.ts
        self.waits.held(gap, tokens)
        if self.seconds:
            begin, end = turn.ts - self.span[0], turn.ts - self.span[0] + min(gap, self.ttl)
            scale = (_TIME_BINS - 1) / self.seconds
            self._pin_steps[int(begin * scale)] += tokens
            self._pin_steps[int(end * scale) + 1] -= tokens


@dataclass(slots=True)
class MeasuredTally:
    """Sums over kvreturn's own turn log.

    Attributes:
        outcomes: turns by outcome.
        follow_up_prompt: prompt tokens of follow-up turns whose prompt P counted.
        read: tokens that P read back in these.
        ahead: tokens that eager returns had read from D before, as far as P still had as many.
        local: tokens that P had itself in the others.
    """

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    follow_up_prompt: int = 0
    read: int = 0
    ahead: int = 0
    local: int = 0

    def add(self, turn: Measured) -> None:
        """Count a turn."""
        self.outcomes[turn.outcome] += 1
        if turn.outcome not in FRESH and turn.prompt is not None:
            self.follow_up_prompt += turn.prompt
            ahead = min(turn.local or 0, turn.returned or 0)
            self.read += turn.read or 0
            self.ahead += ahead
            self.local += (turn.local or 0) - ahead

    @property
    def follow_ups(self) -> int:
        """Turns that could have reused an earlier one, in the sense of alerts, dashboard and admin page."""
        return self.outcomes.total() - sum(self.outcomes[o] for o in FRESH)
