"""What the router reads of a simulated node's metrics."""

from kvreturn.core.choice import Pressure
from kvreturn.upstream.pressure import PressureWatch, read_pressure
from unit.sim.cluster import COMPLETIONS, Make, generate, ids


async def test_a_simulated_decode_node_tells_of_its_pins(cluster: Make) -> None:
    c = await cluster(connector="kvreturn", num_blocks=129, max_model_len=1_024)
    assert read_pressure((await c.get(c.d, "/metrics"))[1].encode()) == Pressure(0.0, 0, 0, pinned=0.0)
    await c.turn(COMPLETIONS, generate(ids(1, 200)))
    # 200 tokens and the 23 of 24 generated ones whose KV is computed: 14 blocks of 16
    address = c.urls[id(c.d)].removeprefix("http://")
    async with PressureWatch([], [address], None, clock=c.clock.now) as watch:
        await c.until(lambda: watch.of(address) is not None)
        assert watch.of(address) == Pressure(14 / 128, 0, 0, pinned=14 / 129)
