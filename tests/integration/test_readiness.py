"""What a load balancer asks Envoy: can turns be served here?"""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from support.envoy import Json
from support.gateway import Front, product


def _soon(bootstrap: Json) -> None:
    """Envoy looks at nodes more often, so that the test takes less time."""
    for cluster in bootstrap["static_resources"]["clusters"]:
        for check in cluster.get("health_checks", ()):
            check |= {"interval": "0.1s", "no_traffic_interval": "0.1s"}


async def _ready(there: Front) -> int:
    return (await there.request("GET", "/kvreturn/ready")).status


async def _once(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(5):
        while not await holds():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


async def test_it_can_while_a_router_and_one_decode_node_are_up_and_envoy_does_not_drain() -> None:
    async with product("kvreturn", decodes=2, change=_soon) as there, aiohttp.ClientSession() as session:
        admin = f"http://{there.front.settings.envoy.admin}"

        async def healthy(cluster: str, number: int) -> bool:
            async with session.get(f"{admin}/stats?filter=^cluster.{cluster}.membership_healthy$") as response:
                return (await response.text()).strip().endswith(f": {number}")

        async def drain(how: str) -> None:
            async with session.post(f"{admin}/healthcheck/{how}") as response:
                assert response.ok

        await _once(lambda: healthy("decode", 2))
        await there.p[0].stop()
        await there.d[0].stop()
        await _once(lambda: healthy("prefill", 0))
        await _once(lambda: healthy("decode", 1))
        assert await _ready(there.front) == 200
        await drain("fail")
        assert await _ready(there.front) == 503
        await drain("ok")
        assert await _ready(there.front) == 200
        await there.d[1].stop()
        await _once(lambda: healthy("decode", 0))
        assert await _ready(there.front) == 503
        await there.front.envoy.stop()
        assert "/kvreturn/ready" not in "".join(there.front.log)  # it would fill the log
