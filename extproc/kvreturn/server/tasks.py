"""Work that goes on behind the turns."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def is_cancelled() -> bool:
    """Whether a cancellation is this task's own. Any other that reaches it is an error like others."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Tasks:
    """Tasks that nobody waits for, until the process ends."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many are running."""
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start one."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drain(self, seconds: float) -> None:
        """Let them end for so long, and cancel what is left."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
