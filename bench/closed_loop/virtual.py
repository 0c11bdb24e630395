"""An event loop whose time is not the machine's: it jumps to the next timer as soon as there is nothing to do.

Minutes of simulated serving pass in seconds, and a loaded machine changes no figure: no work takes time but what sleeps
for it. It relies on loopback: what one socket of this process has sent, the other one has at once (on Linux). Nothing
else may come from outside, and work for threads is done in place.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")
_START = datetime(2026, 1, 5, 9, 0, tzinfo=UTC)
_DEADLOCK = 1.0  # seconds of real time in which nothing happens although nobody waits for a timer


class _Selector(selectors.DefaultSelector):
    """Never waits: tells the loop how far to jump instead.

    Attributes:
        now: seconds that were jumped over.
    """

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready, or nothing after a jump."""
        ready = super().select(0 if timeout is not None else _DEADLOCK)
        if not ready and timeout is None:
            raise RuntimeError("everybody waits for somebody else, and nobody for a timer")
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """See above. Timeouts, too, are over when the virtual time is."""

    def __init__(self) -> None:
        self._jumps = _Selector()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._jumps.now

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Run it here: a thread would take real time, in which the virtual time would run away."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as e:  # noqa: BLE001 - it is the caller's
            future.set_exception(e)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class LoopClock:
    """Implements `kvreturn.sim.Clock` by the running loop's time."""

    def now(self) -> float:
        """See `Clock`."""
        return asyncio.get_running_loop().time()

    def wall(self) -> datetime:
        """See `Clock`."""
        return _START + timedelta(seconds=self.now())

    async def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        await asyncio.sleep(max(0.0, seconds))
