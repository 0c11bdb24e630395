"""Nodes that come, go and drain while real Envoy serves: a router tells it (EDS)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai

from kvreturn.config import Settings
from kvreturn.server.app import running
from kvreturn.sim import NO_TIMING, NodeConfig, SimNode, Timing
from kvreturn.sim.config import Role
from support.envoy import Json, Node, serving
from support.gateway import CHAT, Front, client, configuration, envoy_before, front, product, serving_sims
from support.harness import until
from support.nodes import chat

TOLD = {"endpoints": "router"}
ROLES: tuple[Role, ...] = ("prefill", "decode", "decode")


def quickly(bootstrap: Json) -> None:
    """Envoy gives up waiting for its first endpoints after a moment."""
    for cluster in bootstrap["static_resources"]["clusters"]:
        if cluster["type"] == "EDS":
            cluster["eds_cluster_config"]["eds_config"]["initial_fetch_timeout"] = "0.3s"


async def hosts(front: Front, cluster: str) -> dict[str, str]:
    """EDS health by address, as Envoy has it."""
    async with aiohttp.ClientSession() as http, http.get(f"http://{front.settings.envoy.admin}/clusters") as answer:
        lines = (line.split("::") for line in (await answer.text()).splitlines())
    return {line[1]: line[3] for line in lines if line[0] == cluster and line[2:3] == ["health_flags"]}


async def until_hosts(front: Front, cluster: str, expected: dict[str, str]) -> None:
    for _ in range(200):
        if (found := await hosts(front, cluster)) == expected:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{cluster} is {found}, not {expected}")


async def talk(ours: openai.AsyncOpenAI, oracle: openai.AsyncOpenAI, name: str, stop: asyncio.Event) -> int:
    """A conversation that goes on until told; every streamed answer is the oracle's. Returns its number of turns."""
    messages: Any = [{"role": "user", "content": f"{name}: tell me a story"}]
    turns = 0
    while not stop.is_set():
        texts = []
        for side in (ours, oracle):
            stream: Any = await side.chat.completions.create(
                model="sim",
                messages=messages,
                max_tokens=24,
                stream=True,
            )
            texts.append("".join([c.choices[0].delta.content or "" async for c in stream if c.choices]))
        assert texts[0] == texts[1]
        assert texts[0]
        messages += [{"role": "assistant", "content": texts[0]}, {"role": "user", "content": "go on"}]
        turns += 1
    return turns


async def test_nodes_come_drain_and_go_under_running_streams() -> None:
    timing = Timing(prefill_rate=0.0, decode_rate=400.0, transfer_rate=0.0, overhead=0.0)
    async with product("kvreturn", decodes=3, prefills=2, timing=timing, envoy=TOLD) as there:
        front, world = there.front, there.front.world
        assert world
        pools = {"decode": list(world.decode.addresses()), "prefill": list(world.prefill.addresses())}
        for kind, pool in (("decode", world.decode), ("prefill", world.prefill)):
            pool.update(pools[kind][:-1])
            await until_hosts(front, kind, dict.fromkeys(pools[kind][:-1], "healthy"))
        stop = asyncio.Event()
        async with client(front.url) as ours, client(there.oracle) as oracle, asyncio.TaskGroup() as group:
            talks = [group.create_task(talk(ours, oracle, f"talk {i}", stop)) for i in range(6)]
            await until(lambda: asked(there.d[0]) > 3)
            # All come.
            for kind, pool in (("decode", world.decode), ("prefill", world.prefill)):
                pool.update(pools[kind])
                await until_hosts(front, kind, dict.fromkeys(pools[kind], "healthy"))
            # The first of each drains: what it holds is still read, but it gets nothing new.
            world.decode.drain(pools["decode"][0])
            world.prefill.drain(pools["prefill"][0])
            await until_hosts(
                front, "decode", {**dict.fromkeys(pools["decode"], "healthy"), pools["decode"][0]: DRAINS}
            )
            await asyncio.sleep(0.1)
            before = asked(there.d[0]), asked(there.p[0])
            seen = asked(there.d[2])
            await until(lambda: asked(there.d[2]) > seen + 6 and asked(there.p[1]) > 6)
            assert (asked(there.d[0]), asked(there.p[0])) == before
            # It leaves, and later another one does, in the middle of its streams.
            world.decode.update(pools["decode"][1:])
            world.prefill.update(pools["prefill"][1:])
            await until_hosts(front, "decode", dict.fromkeys(pools["decode"][1:], "healthy"))
            world.decode.update(pools["decode"][2:])
            await until_hosts(front, "decode", {pools["decode"][2]: "healthy"})
            seen = asked(there.d[2])
            await until(lambda: asked(there.d[2]) > seen + 6)
            stop.set()
        counted = await front.outcomes(sum(t.result() for t in talks))
        assert set(counted) <= {"first_turn", "below_threshold", "hit", "partial_hit", "local_hit", "node_gone"}, (
            counted
        )
        assert counted["hit"] > counted.get("node_gone", 0)
        assert front.metric("nodes", pool="decode", state="up") == 1


DRAINS = "/eds_status_draining"


def asked(node: SimNode) -> int:
    return sum(request.path == CHAT for request in node.requests)


@contextlib.asynccontextmanager
async def settings_before(*nodes: Node, **envoy: str) -> AsyncIterator[Settings]:
    async with serving(*nodes):
        addresses = [node.address for node in nodes]
        yield Settings.model_validate(configuration("kvreturn", addresses, addresses, envoy=envoy))


async def models(front: Front) -> int:
    return (await front.request("GET", "/v1/models")).status


async def test_while_no_router_runs_only_the_bootstraps_nodes_are_known() -> None:
    node = Node("n")
    async with settings_before(node) as settings, envoy_before(settings) as front:
        assert await models(front) == 200
    async with settings_before(Node("n"), endpoints="router") as settings, envoy_before(settings, quickly) as front:
        assert await models(front) == 503
        async with running(settings):
            while await models(front) != 200:  # noqa: ASYNC110 - Envoy tells no events
                await asyncio.sleep(0.05)
        # It has gone again, but what it told stays.
        assert await models(front) == 200


async def test_a_node_that_envoy_does_not_know_is_no_error() -> None:
    async with product("kvreturn") as there:
        world, ghost = there.front.world, "127.0.0.9:9"
        assert world
        for pool in (world.decode, world.prefill):
            (known,) = pool.addresses()
            pool.update([known, ghost])
            pool.started(known, 1_000_000)
        for _ in range(3):
            assert (await there.front.post(CHAT, chat("Hi", model="sim"))).status == 200
        assert there.p[0].stats.computed_tokens > 0
        assert asked(there.d[0]) == asked(there.p[0]) == 3


async def test_names_are_resolved_by_the_router_so_that_its_choice_takes_effect() -> None:
    nodes = [SimNode(NodeConfig(role=role, connector="kvreturn", timing=NO_TIMING)) for role in ROLES]
    async with serving_sims(*nodes) as urls:
        named = [url.removeprefix("http://").replace("127.0.0.1", "localhost") for url in urls]
        async with front("kvreturn", named[:1], named[1:], envoy=TOLD) as there:
            assert there.world
            addresses = [name.replace("localhost", "127.0.0.1") for name in named]
            assert sorted(there.world.decode.addresses()) == sorted(addresses[1:])
            await until_hosts(there, "decode", dict.fromkeys(addresses[1:], "healthy"))
            for chosen in (1, 2):
                other = addresses[3 - chosen]
                there.world.decode.started(other, 1_000)
                before = asked(nodes[chosen])
                for i in range(4):
                    assert (await there.post(CHAT, chat(f"{chosen} {i}", model="sim"))).status == 200
                assert asked(nodes[chosen]) == before + 4
                there.world.decode.finished(other, 1_000)
