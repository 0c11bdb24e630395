"""Virtual time: processes are generators that yield the seconds they sleep, or None to be woken by another one."""

from collections.abc import Generator
from heapq import heappop, heappush
from itertools import count
from typing import Any

Steps = Generator[float | None, Any, Any]
"""A process, or a part of one (`yield from`). What `wake` gave comes out of the `yield`."""


class Process:
    """One running generator. `epoch` counts its resumptions: what was meant for an earlier wait is stale."""

    __slots__ = ("epoch", "steps")

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.epoch = 0


class Loop:
    """Runs processes in the order of time, then of scheduling: the same every time.

    Attributes:
        now: seconds since the start.
        current: the process that runs.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Process, int, Any]] = []
        self._order = count()
        self.current = Process(_nothing())

    def spawn(self, steps: Steps, delay: float = 0.0) -> None:
        """Begin a process, after so many seconds."""
        self._schedule(Process(steps), delay, None)

    def wake(self, process: Process, value: object = None) -> None:
        """Resume a process that waits, at once, with a value."""
        self._schedule(process, 0.0, value)

    def wait(self, seconds: float) -> Steps:
        """Wait to be woken, at most so long; gives what `wake` gave, None after the time."""
        self._schedule(self.current, seconds, None)
        return (yield None)

    def run(self, until: float) -> None:
        """Let time pass, until nothing is to be done or the time is over."""
        heap = self._heap
        while heap:
            when, _, process, epoch, value = heappop(heap)
            if when > until:
                break
            if epoch != process.epoch:
                continue
            self.now = when
            process.epoch += 1
            self.current = process
            try:
                delay = process.steps.send(value)
            except StopIteration:
                continue
            if delay is not None:
                self._schedule(process, delay, None)

    def _schedule(self, process: Process, delay: float, value: object) -> None:
        heappush(self._heap, (self.now + delay, next(self._order), process, process.epoch, value))


def _nothing() -> Steps:
    yield from ()
