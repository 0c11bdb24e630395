"""Real nodes tell how pressed they are: vLLM 0.32.0's names and labels, and our connector's."""

import asyncio
import time

import pytest

from engine.conftest import BUDGET, Engine
from engine.test_load import ask
from engine.test_misuse import ids
from kvreturn.upstream.pressure import PressureWatch

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


async def test_a_turn_shows_in_what_real_nodes_tell(engine: Engine) -> None:
    settings = engine.router.world.settings
    (p,), (d,) = (settings.pools.sources[kind].static for kind in ("prefill", "decode"))
    through = settings.envoy.prefill_listen
    async with PressureWatch([p], [d], through, clock=time.monotonic, interval=0.5) as watch, asyncio.timeout(60):
        await ask(engine, engine.gateway, ids(77, 300))  # pins 10 blocks of 32
        while not ((at_d := watch.of(d)) and at_d.pinned and watch.of(p)):  # noqa: ASYNC110 - they are polled
            await asyncio.sleep(0.1)
        print(f"D {at_d}, P {watch.of(p)}")
    assert 0 < at_d.pinned <= BUDGET
    assert at_d.kv_usage >= at_d.pinned - 0.01
    at_p = watch.of(p)
    assert at_p
    assert at_p.pinned == 0
