"""A router on a real redis-server that dies, stands still, fills up, fails over, or is written to by others."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvreturn.cli.main import main
from kvreturn.server.app import running
from kvreturn.server.world import ForeignError
from support.envoy import unused_address
from support.extproc import Request, Response
from support.harness import DECODE, Harness, settings
from support.nodes import carried_handle, chat, decode_events, handle
from support.redis import Server, conversation, needs_redis, outcome, recovered, server, sharing

pytestmark = needs_redis
DEADLINE = 0.02
FIRST, SECOND = ("Hi",), ("Hi", "Good morning", "And?")
Router = Callable[..., Awaitable[Harness]]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    with server(tmp_path) as one:
        yield one


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    """Makes started routers."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(url: str, **store: Any) -> Harness:  # noqa: ANN401 - settings as YAML has them
            return await stack.enter_async_context(sharing(url, **store))

        yield make


async def slowest(router: Harness, turns: int) -> float:
    """Seconds of the slowest of some turns, all of them cold for want of a store."""
    times = []
    for i in range(turns):
        begun = time.monotonic()
        assert await outcome(router, f"cold {i}") == "store_unavailable"
        times.append(time.monotonic() - begun)
    return max(times)


async def test_a_conversation_goes_on_at_another_router_and_after_a_restart(redis: Server, router: Router) -> None:
    one, other = await router(redis.url), await router(redis.url)
    assert await outcome(one, *FIRST) == "first_turn"
    assert await outcome(other, *SECOND) == "hit"
    again = await router(redis.url)  # a router that has just started
    assert await outcome(again, *SECOND, "Good morning", "So?") == "hit"
    assert one.metric("store_duration_seconds_count", operation="put") == 1
    assert one.metric("store_breaker_open") == 0


async def test_every_router_knows_which_node_keeps_a_response(redis: Server, router: Router) -> None:
    one, other = (await router(redis.url)).world, (await router(redis.url)).world
    mine, foreign = one.scope({"authorization": "Bearer a"}), one.scope({"authorization": "Bearer b"})
    await one.set_owner(mine, "resp_1", DECODE)
    assert [await other.owner(mine, "resp_1") for _ in range(2)] == [DECODE, DECODE]
    with pytest.raises(ForeignError):
        await other.owner(foreign, "resp_1")
    assert await other.owner(foreign, "resp_2") is None


async def test_of_200_concurrent_turns_at_two_routers_one_gets_the_handle(redis: Server, router: Router) -> None:
    """Their answers come later: what these leave would be a predecessor for the next try."""
    routers = [await router(redis.url, deadline=30.0, connect_timeout=30.0) for _ in range(2)]
    await outcome(routers[0], *FIRST)
    envoys = [routers[i % 2].envoy() for i in range(200)]
    await asyncio.gather(*(envoy.request(Request(pieces=[chat(*SECOND)])) for envoy in envoys))
    attached = [ask for one in routers for ask in one.asks if carried_handle(ask.body)]
    assert len(attached) == 1
    end = Response(decode_events(params=handle()), node=DECODE)
    for envoy in envoys:
        await envoy.respond(end)
        await envoy.finish()
    told = [one.outcomes() for one in routers]
    assert sum(t.get("hit", 0) for t in told) == 1
    assert sum(t.get("already_taken", 0) for t in told) == 199


async def test_a_served_router_connects_when_it_starts_and_closes_when_it_ends(redis: Server) -> None:
    plain = {"listen": unused_address(), "store": {"url": redis.url}, "drain_timeout": 0.1}
    async with running(settings(**plain)) as router:
        assert not router.world.guard.is_open
        assert connections(redis) == 1
    await asyncio.sleep(0.05)
    assert connections(redis) == 0


def connections(redis: Server) -> int:
    """Connections to the server, besides the one that asks."""
    return int(redis.ask("INFO", "clients").decode().partition("connected_clients:")[2].split()[0]) - 1


@pytest.mark.parametrize("workers", ["1", "2"])
def test_without_the_extra_the_command_says_what_to_install(
    workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "kvreturn.yaml"
    config.write_text("pools: {prefill: ['a:1'], decode: ['b:1']}\nsecret: s\nstore: {url: 'redis://127.0.0.1:1'}\n")
    for name in [n for n in sys.modules if n.split(".")[0] == "redis" or n == "kvreturn.store.client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    result = CliRunner().invoke(main, ["serve", "--config", str(config), "--workers", workers])
    assert result.exit_code == 1
    assert "pip install '.[redis]'" in result.output


async def test_a_server_that_dies_makes_turns_cold_until_it_is_back(redis: Server, router: Router) -> None:
    one = await router(redis.url)
    assert await conversation(one, "before") == ["first_turn", "hit"]
    redis.kill()
    await asyncio.sleep(0.01)
    assert await slowest(one, 10) < 0.2
    assert one.world.guard.is_open
    redis.start()
    await recovered(one, 2.0)
    assert one.metric("store_breaker_open") == 0


async def test_a_router_starts_without_a_server_and_finds_it_later(redis: Server, router: Router) -> None:
    redis.kill()
    one = await router(redis.url)
    assert await conversation(one, "early") == ["store_unavailable", "store_unavailable"]
    redis.start()
    await recovered(one, 2.0)


async def test_fr109_a_server_that_stands_still_costs_a_turn_its_deadline(redis: Server, router: Router) -> None:
    """Once for the look-up, once before the terminal event; once the breaker is open, nothing."""
    one = await router(redis.url, breaker_failures=6, deadline=DEADLINE)
    usual = await slowest_usual(one)
    redis.pause()
    try:
        envoy = one.envoy()
        begun = time.monotonic()
        await envoy.request(Request(pieces=[chat("Hello")]))
        looked_up = time.monotonic() - begun
        begun = time.monotonic()
        await envoy.respond(Response(decode_events(params=handle()), node=DECODE))
        put = time.monotonic() - begun
        await envoy.finish()
        assert DEADLINE <= looked_up < DEADLINE + usual + 0.1
        assert DEADLINE <= put < DEADLINE + usual + 0.1
        await slowest(one, 6)
        assert one.world.guard.is_open
        assert await slowest(one, 10) < usual + 0.1
    finally:
        redis.resume()
    await recovered(one, 2.0)


async def slowest_usual(router: Harness) -> float:
    times = []
    for i in range(10):
        begun = time.monotonic()
        await router.turn(f"usual {i}")
        times.append(time.monotonic() - begun)
    return max(times)


async def test_a_full_server_takes_no_records_and_still_gives_those_it_has(redis: Server, router: Router) -> None:
    one = await router(redis.url)
    for i in range(10):
        assert await outcome(one, f"kept {i}") == "first_turn"
    redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    redis.ask("CONFIG", "SET", "maxmemory", "1")
    for i in range(10):
        assert await outcome(one, f"kept {i}", "Good morning", "And?") == "hit"
        assert await outcome(one, f"lost {i}") == "first_turn"
    assert one.metric("store_errors_total", operation="put", kind="full") == 20
    assert await outcome(one, "lost 1", "Good morning", "And?") == "not_a_continuation"
    assert not one.world.guard.is_open
    redis.ask("CONFIG", "SET", "maxmemory", "0")
    assert await conversation(one, "after") == ["first_turn", "hit"]


async def test_fr107_a_primary_that_was_demoted_is_left_until_it_can_be_written_to(
    redis: Server, router: Router
) -> None:
    one = await router(redis.url)
    await outcome(one, *FIRST)
    redis.ask("REPLICAOF", "127.0.0.1", "1")
    assert {await outcome(one, f"cold {i}") for i in range(10)} <= {"store_unavailable", "first_turn"}
    assert one.metric("store_errors_total", operation="put", kind="read_only") >= 5
    redis.ask("REPLICAOF", "NO", "ONE")
    await recovered(one, 5.0)


async def test_a_wrong_password_is_named_and_a_right_one_helps(
    redis: Server, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    redis.ask("ACL", "SETUSER", "kv", "on", ">right", "~kvr1*", "+@all", "-@dangerous")
    redis.ask("CONFIG", "SET", "requirepass", "other")
    wrong = await router(redis.url.replace("//", "//kv:wrong@"))
    assert await conversation(wrong, "cold") == ["store_unavailable", "store_unavailable"]
    assert wrong.metric("store_errors_total", operation="ping", kind="auth") >= 1
    right = await router(redis.url.replace("//", "//kv:right@"))
    assert await conversation(right, "warm") == ["first_turn", "hit"]
    assert "wrong@" not in caplog.text
    assert "right@" not in caplog.text


async def rubbish(url: str) -> None:
    from redis.asyncio import Redis  # noqa: PLC0415 - skipped where it is missing

    async with Redis.from_url(url) as client:
        for key in await client.keys("kvr1r:*"):
            await client.set(key, os.urandom(100), keepttl=True)


async def test_rubbish_is_a_cold_turn_that_is_counted(redis: Server, router: Router) -> None:
    one = await router(redis.url)
    await outcome(one, *FIRST)
    await rubbish(redis.url)
    assert await outcome(one, *SECOND) == "store_unavailable"
    counted = [one.metric("store_errors_total", operation="take", kind=k) for k in ("unreadable", "wrong_key")]
    assert sum(counted) == 1
    assert await outcome(one, *SECOND, "Good morning", "So?") == "hit"


async def test_routers_with_different_keys_are_cold_for_each_other(redis: Server, router: Router) -> None:
    one = await router(redis.url, encryption_key="a key of 32 characters, or of more")
    other = await router(redis.url, encryption_key="another of 32 characters, or more")
    await outcome(one, *FIRST)
    assert await outcome(other, *SECOND) == "store_unavailable"
    assert other.metric("store_errors_total", operation="take", kind="wrong_key") == 1


async def test_fr106_more_turns_than_connections_are_served_all_the_same(redis: Server, router: Router) -> None:
    one = await router(redis.url, pool_size=20, deadline=DEADLINE)
    end = Response(decode_events(params=handle()), node=DECODE)
    envoys = [one.envoy() for _ in range(500)]
    await asyncio.gather(*(e.play(Request(pieces=[chat(f"Hi {i}")]), end) for i, e in enumerate(envoys)))
    assert {envoy.client.body for envoy in envoys} == {b"".join(decode_events())}
    assert sum(one.outcomes().values()) == 500
    assert set(one.outcomes()) <= {"first_turn", "store_unavailable"}
    cold = one.outcomes().get("store_unavailable", 0)
    kinds = ("busy", "timeout", "breaker_open")
    assert sum(one.metric("store_errors_total", operation="take", kind=kind) for kind in kinds) == cold
    assert connections(redis) <= 20
    await recovered(one, 2.0)
