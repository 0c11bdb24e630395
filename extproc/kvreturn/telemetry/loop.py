"""How late the event loop is: what all streams wait for together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prometheus_client import Histogram

_INTERVAL = 0.25  # seconds


@contextlib.asynccontextmanager
async def watching(lag: Histogram) -> AsyncIterator[None]:
    """Look at the running loop for as long as the context lasts.

    Args:
        lag: takes by how much each look was late, in seconds.
    """
    task = asyncio.create_task(_watch(lag))
    try:
        yield
    finally:
        task.cancel()


async def _watch(lag: Histogram) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + _INTERVAL
        await asyncio.sleep(_INTERVAL)
        lag.observe(max(clock() - due, 0.0))
