"""Commands, settings, probes of the Kubernetes manifests, as processes; redis-server may stand in for Valkey."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from kvreturn.core.address import split_address
from kvreturn.envoy.runner import EnvoyProcess
from support.deployed import LONG, Json, outcomes
from support.envoy import unused_address
from support.gateway import CHAT, client
from support.harness import until
from support.kubernetes import Cluster, build, cluster, needs_kustomize
from support.meshes import MESHES
from support.redis import needs_redis
from support.talk import Talk

pytestmark = [needs_kustomize, needs_redis]


@contextlib.asynccontextmanager
async def meshed(there: Cluster, bootstrap: Json) -> AsyncIterator[str]:
    """A mesh's Envoy before the pods; the URL for clients."""
    pods = {8000: there.pods["vllm-decode"], 9090: there.pods["kvreturn-router"]}
    for upstream in bootstrap["static_resources"]["clusters"]:
        for host, pod in zip(upstream["load_assignment"]["endpoints"][0]["lb_endpoints"], (0, 1), strict=True):
            address = host["endpoint"]["address"]["socket_address"]
            address["address"] = pods[address["port_value"]][pod].own
    listen, admin = unused_address(), unused_address()
    bootstrap["static_resources"]["listeners"][0]["address"] = socket_address(listen)
    bootstrap["admin"] = {"address": socket_address(admin)}
    async with EnvoyProcess(bootstrap, sink=lambda *_: None, concurrency=1):
        yield f"http://{listen}/v1"


def socket_address(address: str) -> Json:
    host, port = split_address(address)
    return {"socket_address": {"address": host, "port_value": port}}


async def test_the_demo_serves_conversations_while_routers_and_envoys_are_replaced(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        there = await stack.enter_async_context(cluster(build("overlays/demo"), tmp_path))
        await asyncio.gather(*map(there.start, ("vllm-prefill", "vllm-decode", "kvreturn-valkey")))
        await there.start("kvreturn-router")
        await there.start("kvreturn-envoy", replicas=1)
        routers, (envoy,) = there.pods["kvreturn-router"], there.pods["kvreturn-envoy"]
        sdk = await stack.enter_async_context(client(f"http://{envoy.own}:8000/v1"))
        talk = Talk("Ada", CHAT, stream=True, more=LONG)
        for _ in range(3):
            await talk.turn(sdk)
        await until(lambda: len(outcomes(*routers)) == 3)
        assert outcomes(*routers) == ["first_turn", *["hit"] * 2]

        for i, mesh in enumerate(MESHES, 1):
            async with meshed(there, MESHES[mesh](build(f"overlays/{mesh}"))) as url, client(url) as through:
                other = Talk(mesh, CHAT, stream=True, more=LONG)
                for _ in range(2):
                    await other.turn(through)
            await until(lambda: len(outcomes(*routers)) == 3 + 2 * i)  # noqa: B023 - not kept
        assert outcomes(*routers) == [*["first_turn"] * 3, *["hit"] * 4]

        spec = there.of("Deployment", "kvreturn-router")["spec"]["template"]["spec"]
        assert await routers[0].stop(float(spec["terminationGracePeriodSeconds"])) == 0
        await talk.turn(sdk)
        await until(lambda: len(outcomes(*routers)) == 8)
        assert outcomes(*routers) == [*["first_turn"] * 3, *["hit"] * 5]

        # preStop: a turn that is under way ends, and only then does Envoy go.
        (container,) = there.of("Deployment", "kvreturn-envoy")["spec"]["template"]["spec"]["containers"]
        envoy.environ["DRAIN_NOTICE"] = "0.1"
        last = asyncio.create_task(talk.turn(sdk))
        await asyncio.sleep(0.1)
        code, output = await envoy.run(container["lifecycle"]["preStop"]["exec"]["command"])
        assert code == 0, output
        assert last.done()
        assert await last
