"""A run: conversations, one event after the other, and what was seen before, during and after each."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp

from faults.counters import INTERVAL, Outcomes, reuse
from faults.deployment import PREFILL_RATE, Deployment
from faults.events import Event, Scene, Told
from faults.load import Load, Sent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that things are given.

    Attributes:
        warm_up: until conversations are in their middle.
        look: of an undisturbed time.
        settle: at most, after an event, until each agent has had two turns: one that may be cold, and leaves what the
            other one finds.
    """

    warm_up: float = 6.0
    look: float = 6.0
    settle: float = 12.0


@dataclass(slots=True)
class Phase:
    """A time, and what ended in it.

    Attributes:
        name: what was going on.
        begun: by `time.monotonic`.
        ended: likewise.
        sent: requests that ended in it.
        outcomes: turns that routers counted in it.
    """

    name: str
    begun: float
    ended: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def errors(self) -> list[Sent]:
        """Requests without an answer."""
        return [sent for sent in self.sent if sent.error]

    @property
    def wrong(self) -> int:
        """Answers that are not the oracle's."""
        return sum(sent.wrong for sent in self.sent)

    @property
    def reuse(self) -> float | None:
        """Percent of later turns whose prefix came back."""
        return reuse(self.outcomes)

    @property
    def p99(self) -> float | None:
        """Milliseconds to the first piece of an answer; None if there are too few."""
        return _p99([s.ttft for s in self.sent if s.ttft is not None])

    def p99_but_cold(self, window: tuple[float, float]) -> float | None:
        """The same for requests begun in a window in which all turns are cold, less what P computes for that."""
        since, until = window
        inside = [s for s in self.sent if since <= s.begun < until]
        return _p99([s.ttft - 1e3 * s.known / PREFILL_RATE for s in inside if s.ttft is not None])


def _p99(times: Sequence[float]) -> float | None:
    return statistics.quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else None


@dataclass(slots=True)
class Act:
    """An event with the times around it."""

    name: str
    told: Told
    before: Phase
    during: Phase
    after: Phase

    @property
    def added(self) -> float | None:
        """Milliseconds by which time to first token (p99) grew in the event's window beyond what being cold costs."""
        before, during = self.before.p99, self.told.window and self.during.p99_but_cold(self.told.window)
        return None if before is None or during is None else during - before

    @property
    def lost(self) -> list[Sent]:
        """Requests that were under way when a process was killed, and failed."""
        cut = self.told.cut
        return [sent for sent in self.during.errors if cut is not None and sent.begun < cut]

    @property
    def refused(self) -> list[Sent]:
        """Other requests that failed."""
        return [sent for sent in self.during.errors if sent not in self.lost]


class Run:
    """Plays events.

    Args:
        deployment: on this.
        load: with these conversations.
        times: how long to look.
        progress: takes the name of what is going on, again and again, and the load.
    """

    def __init__(self, deployment: Deployment, load: Load, times: Times, progress: Callable[[str, Load], None]) -> None:
        self._deployment = deployment
        self._load = load
        self._times = times
        self._progress = progress
        self._outcomes = Outcomes(deployment.admins)
        self.phases: list[Phase] = []
        self.acts: list[Act] = []

    async def play(self, events: Mapping[str, Event]) -> None:
        """One event after the other. What was seen is in `acts`, also when it is cut off.

        Raises:
            ProcessError: something did not come back.
            TimeoutError: likewise.
        """
        async with aiohttp.ClientSession() as session, self._outcomes.watched(session), self._load.running():
            scene = Scene(self._deployment, self._load, session)
            await self._phase("warm-up", asyncio.sleep(self._times.warm_up))
            before, _ = await self._phase("before", asyncio.sleep(self._times.look))
            for name, event in events.items():
                during, told = await self._phase(name, self._and_settle(event(scene)))
                after, _ = await self._phase(f"after {name}", asyncio.sleep(self._times.look))
                self.acts.append(Act(name, told, before, during, after))
                before = after

    async def _and_settle(self, event: Awaitable[T]) -> T:
        told = await event
        await self._load.went_on(2, self._times.settle)
        return told

    async def _phase(self, name: str, work: Awaitable[T]) -> tuple[Phase, T]:
        phase = Phase(name, time.monotonic())
        first, counted = len(self._load.sent), self._outcomes.total.copy()
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._progress(name, self._load)
                await asyncio.wait([task], timeout=1.0)
            await asyncio.sleep(INTERVAL)  # turns are counted a moment after they end
        finally:
            task.cancel()
        phase.ended = time.monotonic()
        phase.sent = self._load.sent[first:]
        phase.outcomes = self._outcomes.total - counted
        self.phases.append(phase)
        return phase, task.result()
