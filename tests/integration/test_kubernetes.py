"""Commands, settings, probes of the Kubernetes manifests, as processes; redis-server may stand in for Valkey."""

import asyncio
import contextlib
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


async def converse(there: Cluster, mesh: str) -> None:
    """Two turns through an Envoy of a mesh, before the same pods."""
    bootstrap = MESHES[mesh](build(f"overlays/{mesh}"))
    pods = {8000: there.pods["vllm-decode"], 9090: there.pods["kvreturn-router"]}
    for upstream in bootstrap["static_resources"]["clusters"]:
        for host, pod in zip(upstream["load_assignment"]["endpoints"][0]["lb_endpoints"], (0, 1), strict=True):
            address = host["endpoint"]["address"]["socket_address"]
            address["address"] = pods[address["port_value"]][pod].own
    listen, admin = unused_address(), unused_address()
    bootstrap["static_resources"]["listeners"][0]["address"] = socket_address(listen)
    bootstrap["admin"] = {"address": socket_address(admin)}
    talk = Talk(mesh, CHAT, stream=True, more=LONG)
    async with EnvoyProcess(bootstrap, sink=lambda *_: None, concurrency=1), client(f"http://{listen}/v1") as sdk:
        for _ in range(2):
            await talk.turn(sdk)


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
        for _ in range(2):
            await talk.turn(sdk)
        await asyncio.gather(*(converse(there, mesh) for mesh in MESHES))
        await until(lambda: len(outcomes(*routers)) == 6)
        assert outcomes(*routers) == [*["first_turn"] * 3, *["hit"] * 3]

        spec = there.of("Deployment", "kvreturn-router")["spec"]["template"]["spec"]
        assert await routers[0].stop(float(spec["terminationGracePeriodSeconds"])) == 0
        await talk.turn(sdk)
        await until(lambda: len(outcomes(*routers)) == 7)
        assert outcomes(*routers) == [*["first_turn"] * 3, *["hit"] * 4]

        # preStop: a turn that is under way ends, and only then does Envoy go.
        (container,) = there.of("Deployment", "kvreturn-envoy")["spec"]["template"]["spec"]["containers"]
        envoy.environ["DRAIN_NOTICE"] = "0.1"
        last = asyncio.create_task(talk.turn(sdk))
        await asyncio.sleep(0.2)
        assert not last.done()
        code, output = await envoy.run(container["lifecycle"]["preStop"]["exec"]["command"])
        assert code == 0, output
        assert last.done()
        assert await last
