"""What must hold: after every step, and at the end of a history."""

from property.cluster import Cluster
from property.verdict import PoisonedCacheError, Tally
from support.harness import counts, outcomes

_FOR_GOOD = 1_000.0  # seconds after which no TTL and no lease is left


def check_engines(cluster: Cluster) -> None:
    """No engine has died, hangs, leaks, or keeps what nobody will fetch; notes what the caches hold."""
    cluster.check_caches()
    for name, node in cluster.nodes.items():
        stats = node.stats
        assert stats.engine_alive, f"{name}'s engine died"
        assert stats.hung_requests == 0, f"a request hangs on {name}"
        assert stats.leaked_blocks == 0, f"{name} leaks blocks"
        if name != "D":
            assert stats.pins <= cluster.watch.probes[node.address], f"{name} pins blocks for nobody"


async def check_end(cluster: Cluster, tally: Tally) -> None:
    """Nothing is left of anything, once its time is over, and every turn has been counted once."""
    await cluster.until(lambda: all(router.returns.idle for router in cluster.routers), "a return at the end")
    await cluster.clock.advance(_FOR_GOOD)
    await cluster.until(lambda: not any(n.engine._live for n in cluster.nodes.values()), "a node at the end")
    check_engines(cluster)
    if cluster.poisoned:
        raise PoisonedCacheError(f"the prefix cache of {cluster.poisoned} is poisoned")
    for name, node in cluster.nodes.items():
        stats = node.stats
        left = (stats.blocks_used, stats.pins, stats.leases, stats.running, stats.waiting)
        assert left == (0, 0, 0, 0, 0), f"{name} is left with {stats}"
    counted = 0
    for router in cluster.routers:
        assert not router.returns.errors, f"a return failed in the router: {router.returns.errors}"
        assert not router.service.running, "the router is left with streams"
        for pool in (router.world.prefill, router.world.decode):
            assert all(node.load == 0 for node in pool.snapshot()), "the router is left with load"
        ended = outcomes(router.world.metrics)
        tally.outcomes.update(ended)
        counted += sum(ended.values())
        tally.returns.update(counts(router.world.metrics.returns, "result"))
    assert counted == cluster.watch.exchanges
    tally.read_tokens += cluster.read_tokens + sum(p.stats.read_tokens for p in cluster.prefill)
