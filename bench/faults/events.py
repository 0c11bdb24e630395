"""What is done to a deployment while conversations run, and what may be lost by it."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from faults.deployment import CONCURRENCY, DRAIN, Deployment
from faults.load import Load
from faults.processes import Process, Stores
from kvreturn.envoy import names

_AWAY = 2.0  # seconds until a killed process is replaced
_PAUSE = 10.0
_TRANSIT = 0.05  # seconds from a client to the router, when this machine is busy


@dataclass
class Told:
    """What an event was.

    Attributes:
        note: what a reader should know of it.
        cut: when a process was killed, by `time.monotonic`; None where all was done in order.
        lost: requests begun before `cut` that may fail: so many had the killed process to do with.
        refused: requests begun after it that may.
        window: between which times its effect on latency is to be looked at; None for all of it.
    """

    note: str
    cut: float | None = None
    lost: int = 0
    refused: int = 0
    window: tuple[float, float] | None = None


@dataclass
class Scene:
    """What events work on."""

    deployment: Deployment
    load: Load
    session: aiohttp.ClientSession

    @property
    def stores(self) -> Stores:
        """Redis."""
        return self.deployment.stores


async def _cut(scene: Scene, process: Process, *at: tuple[str, str]) -> tuple[float, int]:
    """Kill a process in the middle of its work.

    It is held still first, so that Envoy's count of its streams is that of the moment in which it dies.

    Args:
        scene: where.
        process: the process.
        at: its clusters and addresses in Envoy.

    Returns:
        When, and how many requests it had to do with.
    """
    process.signal(signal.SIGSTOP)
    begun = time.monotonic()
    active = [await scene.deployment.active(scene.session, cluster, address) for cluster, address in at]
    await process.kill()
    cut = time.monotonic()
    on_the_way = sum(1 for since in scene.load.open.values() if since > begun - _TRANSIT)
    return cut, sum(active) + on_the_way


async def _usable(scene: Scene, router: str) -> None:
    for at in scene.deployment.router_at(router):
        await scene.deployment.usable(scene.session, *at)


async def router_killed(scene: Scene) -> Told:
    """Kill -9 of the first router, and another one in its place."""
    deployment = scene.deployment
    router, address = deployment.routers[0], deployment.settings.envoy.routers[0]
    cut, active = await _cut(scene, router, *deployment.router_at(address))
    await asyncio.sleep(_AWAY)
    await router.start()
    await _usable(scene, address)
    return Told(f"kill -9 with {active} streams on it", cut, lost=active)


async def rolling_restart(scene: Scene) -> Told:
    """Each router in turn: SIGTERM, drain, start."""
    deployment = scene.deployment
    seconds, codes = [], []
    for router, address in zip(deployment.routers, deployment.settings.envoy.routers, strict=True):
        begun = time.monotonic()
        codes.append(await router.stop(2 * DRAIN))
        seconds.append(time.monotonic() - begun)
        await router.start()
        await _usable(scene, address)
    drains = ", ".join(f"{s:.1f} s" for s in seconds)
    return Told(f"SIGTERM; drained in {drains}; exit codes {', '.join(map(str, codes))}")


async def redis_restarted(scene: Scene) -> Told:
    """SIGTERM to the primary, which saves, and start."""
    primary = scene.stores.servers[await scene.stores.primary()]
    begun = time.monotonic()
    await primary.stop()
    await primary.start()
    return Told(f"primary away for {time.monotonic() - begun:.1f} s")


async def redis_failed_over(scene: Scene) -> Told:
    """Kill -9 of the primary: sentinel makes the replica one, and the old one comes back as its replica."""
    old = await scene.stores.primary()
    await scene.stores.servers[old].kill()
    seconds = await scene.stores.promoted(old)
    await scene.stores.servers[old].start()
    await scene.stores.replicated()
    return Told(f"kill -9; replica is primary after {seconds:.1f} s")


async def redis_paused(scene: Scene) -> Told:
    """The primary answers nothing for ten seconds, and keeps its connections; sentinel stands still, too."""
    stores = scene.stores
    assert stores.sentinel
    held = [stores.sentinel, stores.servers[await stores.primary()]]
    begun = time.monotonic()
    for process in held:
        process.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(_PAUSE)
    finally:
        for process in reversed(held):
            process.signal(signal.SIGCONT)
    return Told(f"SIGSTOP for {_PAUSE:g} s", window=(begun, time.monotonic()))


async def decode_killed(scene: Scene) -> Told:
    """Kill -9 of a decode node, and a new one in its place."""
    deployment = scene.deployment
    address = deployment.settings.pools.sources["decode"].static[0]
    return await _node_killed(scene, deployment.decodes[0], names.DECODE_CLUSTER, address)


async def prefill_killed(scene: Scene) -> Told:
    """Kill -9 of a prefill node, and a new one in its place."""
    deployment = scene.deployment
    address = deployment.settings.pools.sources["prefill"].static[0]
    return await _node_killed(scene, deployment.prefills[0], names.PREFILL_CLUSTER, address)


async def _node_killed(scene: Scene, node: Process, cluster: str, address: str) -> Told:
    cut, active = await _cut(scene, node, (cluster, address))
    await asyncio.sleep(_AWAY)
    await node.start()
    await scene.deployment.usable(scene.session, cluster, address)
    # Each thread of Envoy finds out by a request of its own that the node refuses.
    return Told(f"kill -9 with {active} requests on it", cut, lost=active + CONCURRENCY, refused=CONCURRENCY)


Event = Callable[[Scene], Awaitable[Told]]
EVENTS: dict[str, Event] = {
    "router killed": router_killed,
    "rolling restart": rolling_restart,
    "redis restarted": redis_restarted,
    "redis failover": redis_failed_over,
    "redis paused": redis_paused,
    "decode node killed": decode_killed,
    "prefill node killed": prefill_killed,
}
