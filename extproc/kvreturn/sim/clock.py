"""Clocks of the simulation: a real one that may run faster, and one that tests move by hand."""

import asyncio
import heapq
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """What a node needs to know about time."""

    def now(self) -> float:
        """Monotonic seconds; the zero point means nothing."""
        ...

    def wall(self) -> datetime:
        """Date and time of day, for chat templates that put them into the prompt."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; at least one turn of the event loop, even for 0."""
        ...


class RealClock:
    """The machine's clock, `speed` times faster."""

    def __init__(self, speed: float = 1.0) -> None:
        if speed <= 0:
            raise ValueError(f"a clock's speed must be positive, not {speed}")
        self._speed = speed

    def now(self) -> float:
        """Seconds since boot, scaled."""
        return time.monotonic() * self._speed

    def wall(self) -> datetime:
        """The real date and time: the speed does not change the day."""
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` of this clock."""
        await asyncio.sleep(max(0.0, seconds) / self._speed)


class ManualClock:
    """Stands still until a test calls `advance`."""

    def __init__(self, start: datetime = datetime(2026, 1, 5, 9, 0, tzinfo=UTC)) -> None:
        self._start = start
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = 0

    def now(self) -> float:
        """Seconds that were advanced so far."""
        return self._now

    def wall(self) -> datetime:
        """The start date plus what was advanced."""
        return self._start + timedelta(seconds=self._now)

    @property
    def sleeping(self) -> int:
        """How many tasks wait for this clock."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Wait until the test has advanced the clock by `seconds`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._order += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._order, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move the clock, waking sleepers in order; who sleeps again within that time is woken again."""
        target = self._now + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= target:
            when, _, future = heapq.heappop(self._sleepers)
            if future.done():  # its task was cancelled
                continue
            self._now = when
            future.set_result(None)
            await _settle()
        self._now = target
        await _settle()


async def _settle() -> None:
    # A woken task needs a few turns of the loop before it sleeps again: tasks wake tasks through queues and locks.
    for _ in range(20):
        await asyncio.sleep(0)
