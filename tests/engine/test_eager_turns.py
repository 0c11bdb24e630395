"""`return: eager` through Envoy and the router: the next turn finds the history on P; nothing is pinned meanwhile."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from engine.conftest import JSON, UNCACHED, Engine, front, note
from engine.test_conversation import TOOLS, Talk, dropped_thinking, question
from engine.test_misuse import until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
BLOCK, ANSWER = 32, 300


@contextlib.asynccontextmanager
async def eager(engine: Engine, **changes: Any) -> AsyncIterator[Engine]:  # noqa: ANN401 - settings as YAML has them
    """The same nodes behind a router that returns eagerly."""
    nodes = [engine.nodes[name].address for name in ("prefill", "decode")]
    sink = functools.partial(note, engine.lines)
    async with front(nodes[:1], nodes[1:], sink, **{"return": "eager", **changes}) as (router, gateway):
        yield replace(engine, router=router, gateway=gateway)


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def prefix_cache(engine: Engine) -> AsyncIterator[None]:
    """P with a prefix cache, for this module."""
    await engine.stop("prefill")
    await engine.start("prefill", arguments=())
    yield
    await engine.stop("prefill")
    await engine.start("prefill", arguments=UNCACHED)


def returns(engine: Engine) -> dict[str, float]:
    """Returns by what became of them."""
    samples = [s for m in engine.router.world.metrics.returns.collect() for s in m.samples]
    return {s.labels["result"]: s.value for s in samples if s.name.endswith("_total")}


async def back(engine: Engine, number: int) -> float:
    """Wait for so many returns. Gives the seconds that it took."""
    begun = time.perf_counter()
    while sum(returns(engine).values()) < number:
        await asyncio.sleep(0.01)
        assert time.perf_counter() - begun < 30, returns(engine)
    return time.perf_counter() - begun


async def told(caplog: pytest.LogCaptureFixture) -> JSON:
    """What the router says of the latest turn. Nodes' own counters have its return in them, too."""
    for _ in range(200):
        lines = [r.getMessage() for r in caplog.records if r.name == "kvreturn.turn"]
        if lines:
            break
        await asyncio.sleep(0.01)
    caplog.clear()
    (line,) = lines
    words = dict(word.split("=", 1) for word in line.split())
    return {**words, **{name: int(words[name].replace("-", "0")) for name in ("prompt", "read", "local")}}


async def test_seven_turns_with_tools_are_a_plain_nodes_and_found_on_p(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvreturn.turn")
    async with eager(engine) as product, Talk(product) as talk:
        pins = await engine.metric(engine.d, "kvreturn_pins")
        messages: list[JSON] = [{"role": "system", "content": "You have tools."}]
        held = 0
        for turn in range(7):
            messages.append({"role": "user", "content": question(turn)})
            message, _, _, _ = await talk.chat(messages, stream=turn % 2 == 0, max_tokens=ANSWER, tools=TOOLS)
            seconds = await back(product, turn + 1)
            free = await until(engine, engine.d, "kvreturn_pins", pins)
            unleased = await until(engine, engine.p, "kv_cache_usage_perc", 0)
            line = await told(caplog)
            print(
                f"turn {turn + 1}: {line['outcome']}, computed {line['prompt'] - line['local']} of {line['prompt']}, "
                f"back after {seconds:.2f} s, D free after {free:.2f} s, P after {unleased:.2f} s"
            )
            assert line["outcome"] == ("hit" if turn else "first_turn")
            assert line["read"] == 0
            assert line["local"] + BLOCK >= held
            assert free < 1
            assert unleased < 1
            held = line["prompt"] + ANSWER - 1
            messages.append(message)
        assert returns(product) == {"returned": 7}
        assert talk.worst < 1e-3
        print(f"largest difference of a log probability: {talk.worst}")


async def test_a_template_that_drops_thinking_hits_up_to_there(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvreturn.turn")
    async with eager(engine) as product, Talk(product) as talk:
        messages: list[JSON] = [{"role": "system", "content": "Think."}]
        for turn in range(4):
            messages.append({"role": "user", "content": question(turn)})
            message, _, _, _ = await talk.chat(messages, max_tokens=ANSWER)
            await back(product, turn + 1)
            line = await told(caplog)
            share = line["local"] / line["prompt"]
            print(f"turn {turn + 1}: {line['outcome']}, {line['local']} of {line['prompt']} on P ({share:.0%})")
            assert line["outcome"] == ("partial_hit" if turn else "first_turn")
            messages.append(dropped_thinking(message))


async def test_a_pause_of_twice_the_ttl_is_no_matter(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvreturn.turn")
    await engine.stop("decode")
    await engine.start("decode", decoder_kv_blocks_ttl=12)
    try:
        async with eager(engine) as product, Talk(product) as talk:
            messages: list[JSON] = [{"role": "user", "content": question(1)}]
            message, _, _, _ = await talk.chat(messages, max_tokens=ANSWER)
            await back(product, 1)
            await told(caplog)
            await asyncio.sleep(24)
            messages += [message, {"role": "user", "content": question(2)}]
            await talk.chat(messages)
            line = await told(caplog)
            print(f"after 24 s with a TTL of 12 s: {line['outcome']}, {line['local']} of {line['prompt']} on P")
            assert (line["outcome"], line["read"]) == ("hit", 0)
    finally:
        await engine.stop("decode")
        await engine.start("decode")


@pytest.mark.parametrize("flag", [True, False], ids=["streamed form", "loaded form"])
async def test_stock_nodes_need_no_connector_of_ours(
    engine: Engine, caplog: pytest.LogCaptureFixture, *, flag: bool
) -> None:
    caplog.set_level(logging.INFO, "kvreturn.turn")
    await asyncio.gather(engine.stop("prefill"), engine.stop("decode"))
    await engine.start("prefill", arguments=(), stock=True, bidirectional_kv_xfer=flag)
    await engine.start("decode", stock=True)
    try:
        async with eager(engine, proof="off") as product, Talk(product) as talk:
            messages: list[JSON] = [{"role": "system", "content": f"Flag {flag}"}]
            for turn in range(4):
                messages.append({"role": "user", "content": question(turn)})
                message, _, _, _ = await talk.chat(messages, stream=False, max_tokens=ANSWER)
                seconds = await back(product, turn + 1)
                free = await until(engine, engine.d, "kv_cache_usage_perc", 0)
                line = await told(caplog)
                print(
                    f"turn {turn + 1}: {line['outcome']}, {line['local']} of {line['prompt']} on P, "
                    f"back after {seconds:.2f} s, D free after {free:.2f} s"
                )
                assert line["outcome"] == ("hit" if turn else "first_turn")
                assert free < 1
                messages.append(message)
            assert returns(product) == {"returned": 4}
        async with eager(engine, proof="off", returns={"max_tokens": 1}) as product, Talk(product) as talk:
            messages = [{"role": "user", "content": question(9)}]
            await talk.chat(messages, stream=False, max_tokens=ANSWER)
            free = await until(engine, engine.d, "kv_cache_usage_perc", 0)
            print(f"blocks that neither go back nor can be read: D free {free:.2f} s after the plain node's answer")
            assert product.router.world.metrics.value("kvreturn_frees_total", result="sent") == 1
    finally:
        await asyncio.gather(engine.stop("prefill"), engine.stop("decode"))
        await engine.start("prefill", arguments=())
        await engine.start("decode")


@pytest.mark.parametrize("salted", [True, False], ids=["salted", "shared"])
async def test_a_tenants_salt_parts_the_engines_prefix_caches(
    engine: Engine, caplog: pytest.LogCaptureFixture, *, salted: bool
) -> None:
    """Both nodes take it, D's digests are made under it, and P finds another tenant's blocks only without it."""
    caplog.set_level(logging.INFO, "kvreturn.turn")
    lines = {}
    async with (
        eager(engine, **{"return": "lazy", "secret": "s", "tenant_cache_salt": salted}) as product,
        Talk(product) as talk,
    ):
        for tenant in ("alice", "bob"):
            talk.gateway = talk.gateway.with_options(api_key=tenant)
            messages: list[JSON] = [{"role": "system", "content": f"Salted {salted}"}]
            for turn in range(2):
                messages.append({"role": "user", "content": question(turn)})
                message, _, _, _ = await talk.chat(messages, max_tokens=ANSWER)
                messages.append(message)
                lines[tenant, turn] = line = await told(caplog)
                told_of = f"{line['local']} of {line['prompt']} on P, {line['read']} read"
                print(f"{tenant} {turn + 1}: {line['outcome']}, {told_of}")
    assert [lines[tenant, 0]["outcome"] for tenant in ("alice", "bob")] == ["first_turn", "first_turn"]
    assert lines["alice", 0]["local"] == 0
    assert (lines["alice", 1]["outcome"], lines["alice", 1]["read"] > 0) == ("hit", True)
    assert (lines["bob", 0]["local"] > 0) is not salted
    assert (lines["bob", 1]["read"] > 0) is salted
