from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import aiohttp
import pytest

from kvreturn.sim import INSTANT, LocalFabric, ManualClock, NodeConfig, SimNode
from unit.sim.cluster import Cluster, Json, Make


@pytest.fixture
async def cluster() -> AsyncIterator[Make]:
    """Makes a cluster: `p` and `d` change the settings of one node, keywords those of all three."""
    nodes: list[SimNode] = []
    sessions: list[aiohttp.ClientSession] = []

    async def make(p: Json | None = None, d: Json | None = None, **both: object) -> Cluster:
        clock, fabric = ManualClock(), LocalFabric()
        base = replace(NodeConfig(timing=INSTANT), **cast("Json", both))
        configs = (
            replace(base, role="prefill", **(p or {})),
            replace(base, role="decode", **(d or {})),
            replace(base, role="single", prefix_caching=False),
        )
        session = aiohttp.ClientSession()
        sessions.append(session)
        p_node, d_node, oracle = (SimNode(config, clock, fabric) for config in configs)
        out = Cluster(p_node, d_node, oracle, clock, session)
        for node in (p_node, d_node, oracle):
            nodes.append(node)
            out.urls[id(node)] = await node.start()
        return out

    yield make
    for session in sessions:
        await session.close()
    for node in nodes:
        await node.stop()
