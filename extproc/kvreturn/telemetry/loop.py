"""How late the event loop is: what all streams wait for together."""

import asyncio

from prometheus_client import Histogram

_INTERVAL = 0.25  # seconds


async def watch_loop(lag: Histogram) -> None:
    """Look for ever.

    Args:
        lag: takes by how much each look was late, in seconds.
    """
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + _INTERVAL
        await asyncio.sleep(_INTERVAL)
        lag.observe(max(clock() - due, 0.0))
