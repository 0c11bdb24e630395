"""Conversations that are over: real Envoy and simulated nodes, measured in what D keeps pinned."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvreturn.config import Settings
from kvreturn.server.app import running
from kvreturn.sim import NO_TIMING, NodeConfig, SimNode
from support.envoy import unused_address
from support.gateway import Front, client, configuration, envoy_before, front, serving_sims
from support.redis import needs_redis, server

TTL = 480.0  # seconds for which D keeps pins: vLLM's own default
SOON = 5.0
DIRECT = {"via": "direct"}  # here Envoy stops before the router does, which then reaches P without it
KEY = {"authorization": "Bearer x"}  # what `support.gateway.client` sends


@contextlib.asynccontextmanager
async def nodes() -> AsyncIterator[tuple[SimNode, SimNode, list[str]]]:
    """A prefill and a decode node that outlive the router, and their addresses."""
    p, d = (
        SimNode(NodeConfig(role=role, connector="kvreturn", timing=NO_TIMING, model="sim", decoder_ttl=TTL))
        for role in ("prefill", "decode")
    )
    async with serving_sims(p, d) as urls:
        yield p, d, [url.removeprefix("http://") for url in urls]


async def turn(there: Front, name: str, session: str | None = None) -> None:
    """A first turn, of about 30 blocks."""
    text = " ".join(f"{name} says line {i}: the quick brown fox jumps." for i in range(24))
    headers = {"x-session-id": session} if session else {}
    async with client(there.url) as sdk:
        await sdk.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": text}], max_tokens=20, extra_headers=headers
        )


async def unpinned(d: SimNode, pins: int = 0) -> float:
    """Seconds until D keeps no more pins than that."""
    begun = time.monotonic()
    while d.stats.pins > pins:
        assert time.monotonic() - begun < SOON, d.stats
        await asyncio.sleep(0.01)
    return time.monotonic() - begun


async def end(admin: str, path: str, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.delete(f"http://{admin}/kvreturn/sessions{path}", headers={"x-kvreturn": "1", **KEY, **headers}) as answer,
    ):
        return answer.status, await answer.json()


async def test_what_an_ended_session_left_is_free_on_d_long_before_its_ttl() -> None:
    admin = unused_address()
    async with nodes() as (_, d, (p_at, d_at)), front("kvreturn", [p_at], [d_at], admin=admin) as there:
        for name in ("Ada", "Bob"):
            await turn(there, name, "of two agents")
        await turn(there, "Eve", "of another one")
        assert d.stats.pins == 3
        pinned = d.stats.blocks_pinned
        assert pinned > 60
        assert (await end(admin, "/of%20two%20agents", authorization="Bearer y"))[0] == 404
        assert await end(admin, "/of%20two%20agents") == (200, {"records": 2, "handles": 2, "freed": 2})
        await unpinned(d, 1)
        assert d.stats.blocks_pinned < pinned / 2
        assert (await end(admin, "?all=true"))[0] == 202
        await unpinned(d)
        assert d.stats.blocks_pinned == 0
        assert d.stats.expired_holds == 0


async def test_what_a_router_had_in_its_memory_is_free_once_it_has_stopped() -> None:
    async with nodes() as (_, d, (p_at, d_at)):
        async with front("kvreturn", [p_at], [d_at], drain_timeout=SOON, prefill=DIRECT) as there:
            for name in ("Ada", "Bob"):
                await turn(there, name)
            assert d.stats.pins == 2
        await unpinned(d)


async def test_eager_returns_that_a_stopping_router_gives_up_are_free_too() -> None:
    changes: Any = {"return": "eager", "prefill": DIRECT, "returns": {"concurrency": 1}}
    async with nodes() as (p, d, (p_at, d_at)):
        p.faults.add("/v1/completions", "delay", seconds=1.5)
        async with front("kvreturn", [p_at], [d_at], drain_timeout=0.3, **changes) as there:
            for name in ("Ada", "Bob"):
                await turn(there, name)
            async with asyncio.timeout(SOON):
                while not there.world or (there.world.returns.running, there.world.returns.waiting) != (1, 1):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert d.stats.pins == 2
        await unpinned(d)
        assert d.stats.expired_holds == 0


@needs_redis
@pytest.mark.parametrize("policy", ["keep", "free"])
async def test_the_last_of_two_routers_frees_what_is_in_redis_if_it_is_told_to(policy: str, tmp_path: Path) -> None:
    with server(tmp_path) as redis:
        async with nodes() as (_, d, (p_at, d_at)):
            store = {"url": redis.url, "on_last_exit": policy, "deadline": 1.0}
            plain = configuration(
                "kvreturn", [p_at], [d_at], store=store, secret="s", prefill=DIRECT, drain_timeout=SOON
            )
            one, two = (Settings.model_validate({**plain, "listen": at}) for at in (plain["listen"], unused_address()))
            async with running(two):
                async with running(one), envoy_before(one) as there:
                    for name in ("Ada", "Bob"):
                        await turn(there, name)
                    assert d.stats.pins == 2
                await asyncio.sleep(0.3)
                assert d.stats.pins == 2
            if policy == "free":
                await unpinned(d)
                assert d.stats.blocks_pinned == 0
            else:
                await asyncio.sleep(0.3)
                assert d.stats.pins == 2
            assert d.stats.expired_holds == 0
