"""Prefill nodes are asked for their metrics through real Envoy, each one itself."""

import asyncio
import time
from collections.abc import Callable

from kvreturn.core.choice import Pressure
from kvreturn.upstream.pressure import PressureWatch
from support.gateway import product

IDLE = Pressure(0.0, 0, 0, pinned=0.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the watch has no events for tests
            await asyncio.sleep(0.01)


async def test_each_prefill_node_is_asked_itself_through_envoy() -> None:
    async with product("kvreturn", prefills=2) as there:
        settings = there.front.settings
        prefill, decode = (settings.pools.sources[kind].static for kind in ("prefill", "decode"))
        through = settings.envoy.prefill_listen
        async with PressureWatch(prefill, decode, through, clock=time.monotonic, interval=0.1) as watch:
            await until(lambda: all(watch.of(node) for node in (*prefill, *decode)))
            assert [watch.of(node) for node in prefill] == [IDLE, IDLE]
            await there.p[0].stop()
            # Envoy may ask the other node instead, which must not count for this one.
            await until(lambda: watch.of(prefill[0]) is None)
            assert watch.of(prefill[1]) == IDLE
