"""What the router reads of simulated nodes' metrics."""

import asyncio

from kvreturn.core.choice import Pressure
from kvreturn.sim import SimNode
from kvreturn.upstream.pressure import PressureWatch, read_pressure
from unit.sim.cluster import COLD, COMPLETIONS, Cluster, Make, generate, ids


async def told(c: Cluster, node: SimNode) -> Pressure:
    return read_pressure((await c.get(node, "/metrics"))[1].encode())


async def test_a_decode_node_tells_of_its_pins(cluster: Make) -> None:
    c = await cluster(connector="kvreturn", num_blocks=129, max_model_len=1_024)
    assert await told(c, c.d) == Pressure(0.0, 0, 0, pinned=0.0)
    await c.turn(COMPLETIONS, generate(ids(1, 200)))
    # 200 tokens and the 23 of 24 generated ones whose KV is computed: 14 blocks of 16, of 128 and the null block
    address = c.urls[id(c.d)].removeprefix("http://")
    async with PressureWatch([], [address], None, clock=c.clock.now) as watch:
        await c.until(lambda: watch.of(address) is not None)
        assert watch.of(address) == Pressure(14 / 128, 0, 0, pinned=14 / 129)


async def test_what_p_keeps_for_d_is_in_use_and_no_pin(cluster: Make) -> None:
    c = await cluster(connector="kvreturn", num_blocks=129, max_model_len=1_024)
    await c.post(c.p, COMPLETIONS, generate(ids(1, 200), 1, kv_transfer_params=COLD))
    assert await told(c, c.p) == Pressure(13 / 128, 0, 0, pinned=0.0)


async def test_requests_that_get_no_blocks_wait(cluster: Make) -> None:
    c = await cluster(connector="stock", num_blocks=65, max_model_len=1_024)
    await c.turn(COMPLETIONS, generate(ids(1, 700)))  # pins 46 of 64 blocks; 18 are left
    starved = asyncio.create_task(c.post(c.d, COMPLETIONS, generate(ids(2, 320))))  # 20 blocks
    await c.until(lambda: c.d.stats.waiting == 1)
    assert await told(c, c.d) == Pressure(46 / 64, 1, 0, pinned=None)
    starved.cancel()
    await asyncio.gather(starved, return_exceptions=True)


async def test_requests_that_wait_for_a_load_do_not_count_as_waiting(cluster: Make) -> None:
    """A stock P without the flag hangs on D's handle: it has blocks, and waits for a load for good."""
    c = await cluster(p={"bidirectional": False, "prefix_caching": False}, num_blocks=129, max_model_len=1_024)
    _, at_d = await c.turn(COMPLETIONS, generate(ids(1, 200)))
    hung = asyncio.create_task(c.prefill(COMPLETIONS, generate(ids(1, 320)), at_d["kv_transfer_params"]))
    await c.until(lambda: c.p.stats.hung_requests == 1)
    assert (await told(c, c.p)).waiting == 0
    assert c.p.stats.waiting == 1
    hung.cancel()
    await asyncio.gather(hung, return_exceptions=True)
