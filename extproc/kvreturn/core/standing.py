"""What `return: auto` knows of nodes and of clients' habits: from metrics, and from what became of earlier returns.

Where the figures come from:

- D starved: requests wait while 0.7 of the blocks are in use. They wait for blocks then, not for compute: one agent
  conversation takes 5 to 15 % of a node. If D tells that less than a tenth is pinned, pins are not to blame.
- D full: at 0.85 there is no room for the pins of a few more turns, and D preempts or starves soon.
- D crowded: 0.4 in pins is near our connector's `retention_budget` (0.5), beyond which it drops the oldest pins. Most
  are of conversations that are over, so this is a reason to return, but no shortage as long as D has room.
- P pressed: vLLM's `kv_cache_usage_perc` counts the blocks that requests and leases hold; the prefix cache lives in the
  rest. At 0.8 a fifth of P is left for it, and the next prompts push out what is returned. Four requests that wait are
  a queue that a return only lengthens: it is one more request to schedule, whatever its size.
- P evicts: a lost return costs its prefill anew, about five reads' time, so it must be rarer than one in five. Three of
  the last ten is clearly more; five in a row that were kept are rare while it still is so (1 in 6 at three in ten).
  Lazy turns tell it too: a P that still had the prompt of the turn before would have had what was returned then.
- Habits: of a return that is used, the next turn saves one read on the critical path; one that nobody uses costs one
  read off it. At one half unused the link carries twice what it is good for; at one quarter it pays clearly.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

from kvreturn.core.latch import Explorer, Latch

Fate = Literal["used", "evicted", "unused"]
Verdict = Literal["used", "wasted"]

_P_FULL, _P_CALM = 0.8, 0.6  # share of P's blocks in use
_P_QUEUE, _P_NO_QUEUE = 4, 1  # requests that wait
_D_FULL, _D_CALM = 0.85, 0.7  # share of D's blocks in use
_D_PINNED, _D_UNPINNED = 0.4, 0.25  # share of D's blocks in pins
_D_INNOCENT = 0.1  # share of D's blocks in pins below which they starve nobody
_EVICTED_OF, _EVICTED, _KEPT = 10, 3, 5  # returns
_EVICTED_LIFE = 600.0  # seconds: caches fill and empty in minutes
_HABIT_OF, _HABIT_MIN = 20, 6  # returns that are looked at: at most, at least
_HABIT_LIFE = 3600.0  # seconds: habits of clients change slower
_WASTED, _USED = 0.5, 0.25  # unused share


@dataclass(frozen=True, slots=True)
class Pressure:
    """How pressed one vLLM node is, by its own metrics.

    Attributes:
        kv_usage: share of its KV blocks that requests, pins and leases hold, 0 to 1. Cached blocks that nobody holds do
            not count.
        waiting: requests that wait to be scheduled.
        running: requests that run.
        pinned: share of its KV blocks that finished turns keep pinned; None on nodes without our connector.
    """

    kv_usage: float
    waiting: int
    running: int
    pinned: float | None = None


_CALM = Pressure(0.0, 0, 0)  # what a node that tells nothing is taken for


class Fates:
    """The latest fates of returns.

    Args:
        most: how many.
        life: seconds for which one counts.
    """

    def __init__(self, most: int, life: float) -> None:
        self._seen: deque[tuple[float, Fate]] = deque(maxlen=most)
        self._life = life

    def add(self, fate: Fate, now: float) -> None:
        """One more."""
        self._seen.append((now, fate))

    def clear(self) -> None:
        """Forget them."""
        self._seen.clear()

    def recent(self, now: float) -> list[Fate]:
        """Those that count, in order."""
        while self._seen and now - self._seen[0][0] > self._life:
            self._seen.popleft()
        return [fate for _, fate in self._seen]

    def tally(self) -> dict[Fate, int]:
        """How many there are of each."""
        return dict(Counter(fate for _, fate in self._seen))


class DecodeStanding:
    """Whether D's blocks are what is scarce.

    Attributes:
        starved: requests wait for blocks.
        full: soon they will.
        crowded: pins leave little room for other pins.
    """

    def __init__(self) -> None:
        self.starved = Latch()
        self.full = Latch()
        self.crowded = Latch()

    def feel(self, pressure: Pressure | None, now: float) -> None:
        """Judge by the node's metrics."""
        d = pressure or _CALM
        waits = d.waiting > 0 and d.kv_usage >= _D_CALM
        self.starved.update(now, enter=waits and (d.pinned is None or d.pinned >= _D_INNOCENT), leave=not waits)
        pinned = d.pinned or 0.0
        self.full.update(now, enter=d.kv_usage >= _D_FULL, leave=d.kv_usage < _D_CALM)
        self.crowded.update(now, enter=pinned >= _D_PINNED, leave=pinned < _D_UNPINNED)

    @property
    def word(self) -> Literal["starved", "full", "crowded", "calm"]:
        """The node in one word."""
        return "starved" if self.starved.on else "full" if self.full.on else "crowded" if self.crowded.on else "calm"


class PrefillStanding:
    """Whether P's blocks are what is scarce.

    Attributes:
        pressed: its metrics say so.
        evicts: it lately lost what was returned to it, or would have lost it.
        fates: of the latest returns, unless nobody came for them, and of the latest lazy turns.
        explorer: for trials while it evicts.
    """

    def __init__(self) -> None:
        self.pressed = Latch()
        self.evicts = Latch()
        self.fates = Fates(_EVICTED_OF, _EVICTED_LIFE)
        self.explorer = Explorer()

    def feel(self, pressure: Pressure | None, now: float) -> None:
        """Judge by the node's metrics, and by fates that have become too old."""
        p = pressure or _CALM
        full = p.kv_usage >= _P_FULL or p.waiting >= _P_QUEUE
        self.pressed.update(now, enter=full, leave=p.kv_usage < _P_CALM and p.waiting <= _P_NO_QUEUE)
        self._judge(now)

    def learn(self, fate: Fate, now: float) -> None:
        """Judge by what became of a return."""
        self.fates.add(fate, now)
        self._judge(now)

    def _judge(self, now: float) -> None:
        seen = self.fates.recent(now)
        kept = seen[-_KEPT:] == ["used"] * _KEPT
        if self.evicts.update(now, enter=seen.count("evicted") >= _EVICTED, leave=kept or not seen):
            # What was seen before tells nothing about after. A verdict lives as long as its last evidence.
            self.fates.clear()
            if self.evicts.on:
                self.fates.add("evicted", now)


class Habit:
    """Do turns that end in one way have a next one?

    Attributes:
        fates: of the latest returns of such turns.
        explorer: for trials while they are not returned.
    """

    def __init__(self) -> None:
        self.fates = Fates(_HABIT_OF, _HABIT_LIFE)
        self.explorer = Explorer()
        self._wasted = Latch()
        self._used = Latch()

    def learn(self, fate: Fate, now: float) -> None:
        """Judge by what became of a return."""
        self.fates.add(fate, now)
        seen = self.fates.recent(now)
        unused = seen.count("unused") / len(seen)
        enough = len(seen) >= _HABIT_MIN
        self._wasted.update(now, enter=enough and unused >= _WASTED, leave=enough and unused <= _USED)
        self._used.update(now, enter=enough and unused <= _USED, leave=enough and unused >= _WASTED)

    @property
    def verdict(self) -> Verdict | None:
        """What was learned, None if nothing was."""
        return "wasted" if self._wasted.on else "used" if self._used.on else None
