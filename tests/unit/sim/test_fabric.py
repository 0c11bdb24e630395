"""Nodes in separate processes: the same over HTTP."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from kvreturn.sim import INSTANT, HttpFabric, NodeConfig, RealClock, SimNode, run_node
from kvreturn.sim.fabric import Address, RefusedError, UnreachableError
from unit.sim.cluster import COLD, COMPLETIONS, Json, generate, ids, tokens

FAST = RealClock(speed=200)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def post(session: aiohttp.ClientSession, url: str, body: Json) -> tuple[int, Json]:
    async with session.post(url + COMPLETIONS, json=body) as answer:
        return answer.status, await answer.json()


async def test_a_conversation_over_http_side_channels(session: aiohttp.ClientSession) -> None:
    nodes = [
        SimNode(NodeConfig(role=role, timing=INSTANT, prefix_caching=False), FAST)
        for role in ("prefill", "decode", "single")
    ]
    p, d, oracle = [await node.start() for node in nodes]
    prompt, handle = ids(1, 200), None
    try:
        for turn in range(3):
            params = {**(handle or COLD), "do_remote_decode": True, "do_remote_prefill": False}
            body = generate(prompt)
            status, at_p = await post(session, p, {**body, "max_tokens": 1, "kv_transfer_params": params})
            assert status == 200, at_p
            status, at_d = await post(session, d, {**body, "kv_transfer_params": at_p["kv_transfer_params"]})
            assert status == 200, at_d
            assert tokens(at_d) == tokens((await post(session, oracle, body))[1])
            assert nodes[0].stats.read_tokens == sum((200 + 44 * i + 23) for i in range(turn))
            prompt += tokens(at_d) + ids(turn + 2, 20)
            handle = at_d["kv_transfer_params"]
            assert handle["remote_port"] > 0
        assert (nodes[0].stats.leases, nodes[1].stats.pins) == (0, 1)
        nodes[1].restart()
        status, _ = await post(session, p, {**generate(prompt, 1), "kv_transfer_params": handle})
        assert status == 500
    finally:
        for node in nodes:
            await node.stop()


async def test_side_channel_answers() -> None:
    fabric = HttpFabric()
    node = SimNode(NodeConfig(role="decode", timing=INSTANT, side_host="127.0.0.1"), FAST, fabric)
    await node.start()
    try:
        address = node.engine.address
        identity = await fabric.identity(address)
        assert (identity.engine_id, identity.block_size) == (node.engine.id, 16)
        raw = await fabric.read(address, node.engine.id, [1, 2], "r", held_only=False)
        assert raw == bytes(2 * 16 * 8)
        for engine, blocks, held_only, reason in (
            ("other", [1], False, "engine_id"),
            (node.engine.id, [90_000], False, "blocks"),
            (node.engine.id, [1], True, "not_held"),
        ):
            with pytest.raises(RefusedError) as caught:
                await fabric.read(address, engine, blocks, "r", held_only=held_only)
            assert caught.value.reason == reason
        with pytest.raises(RefusedError):
            await fabric.notify(address, "other", "r")
        node.engine.holds.add("held", "pin", node.engine.pool.allocate((), 1) or [], 60)
        for request, heartbeat, held in (
            ("r", True, False),
            ("r", False, False),
            ("held", True, True),
            ("held", False, True),
        ):
            assert await fabric.notify(address, node.engine.id, request, heartbeat=heartbeat) is held
        assert node.stats.blocks_used == 0
        node.engine.die()
        with pytest.raises(RefusedError):
            await fabric.identity(address)
    finally:
        await node.stop()
        with pytest.raises(UnreachableError):
            await fabric.identity(address)
        await fabric.close()


async def test_who_is_no_side_channel_is_unreachable(unused_tcp_port: int) -> None:
    fabric = HttpFabric()
    node = SimNode(NodeConfig(), FAST)
    url = await node.start()
    try:
        for address in (
            Address("127.0.0.1", unused_tcp_port),
            Address("127.0.0.1", int(url.rpartition(":")[2])),  # an API server
            Address("no-such-host.invalid", 1),
            Address("a b", 1),
        ):
            with pytest.raises(UnreachableError):
                await fabric.identity(address)
    finally:
        await node.stop()
        await fabric.close()


async def test_run_node_serves_until_it_is_cancelled(session: aiohttp.ClientSession) -> None:
    urls: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(run_node(NodeConfig(role="decode"), ready=urls.put_nowait))
    url = await asyncio.wait_for(urls.get(), 5)
    async with session.get(f"{url}/health") as answer:
        assert answer.status == 200
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(aiohttp.ClientConnectorError):
        await session.get(f"{url}/health")


async def test_a_node_that_does_not_run_says_so() -> None:
    with pytest.raises(RuntimeError, match="await start"):
        _ = SimNode(NodeConfig()).stats
