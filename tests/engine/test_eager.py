"""The KV comes back right after a turn: P keeps it in its prefix cache, and neither node pins anything for it."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.conftest import JSON, UNCACHED, Engine
from engine.test_misuse import COLD, HELD, PATH, body, decode, expected, first_turn, ids, prefill, sealed

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
BLOCK, ANSWER = 32, 320


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def prefix_cache(engine: Engine) -> AsyncIterator[None]:
    """P with a prefix cache, for this module."""
    await engine.stop("prefill")
    await engine.start("prefill", arguments=())
    yield
    await engine.stop("prefill")
    await engine.start("prefill", arguments=UNCACHED)


def told(handle: JSON, **more: bool) -> JSON:
    return {"kvreturn": {**sealed(handle)["kvreturn"], **more}}


async def until_zero(engine: Engine, base: str, name: str) -> float:
    """Seconds until a gauge is zero."""
    begun = time.perf_counter()
    while await engine.metric(base, name):
        assert time.perf_counter() - begun < 1.5, f"{name} is not 0"
        await asyncio.sleep(0.02)
    return time.perf_counter() - begun


async def test_a_turn_that_is_brought_back_at_once_leaves_only_what_is_new(engine: Engine) -> None:
    full, held = ids(51, 200), 0
    for turn in range(6):
        before = await engine.sources()
        answer, _ = await prefill(engine, full, {})
        after = await engine.sources()
        computed = after["local_compute"] - before["local_compute"]
        assert after["external_kv_transfer"] == before["external_kv_transfer"]
        assert computed <= len(full) - held + BLOCK
        tokens, handle = await decode(engine, full, answer["kv_transfer_params"], ANSWER)
        assert tokens == await expected(engine, full, ANSWER)
        assert handle
        full += tokens
        begun = time.perf_counter()
        answer, _ = await prefill(engine, full, told(handle, keep=False))
        seconds = time.perf_counter() - begun
        params = answer["kv_transfer_params"]
        held = handle["remote_num_tokens"]
        assert params.keys() == {"kvreturn"}
        assert params["kvreturn"]["proven"] == held
        assert params["kvreturn"]["read"] + params["kvreturn"]["local"] == held
        freed = await until_zero(engine, engine.d, "kvreturn_pinned_blocks")
        released = await until_zero(engine, engine.p, "kv_cache_usage_perc")
        print(
            f"turn {turn + 1}: computed {computed:.0f}, brought back {params['kvreturn']['read']} in {seconds:.2f} s, "
            f"D free after {freed:.2f} s, P after {released:.2f} s"
        )
        full += ids(60 + turn, 50)


async def test_a_prompt_can_be_computed_ahead_without_a_pin(engine: Engine) -> None:
    prompt = ids(71, 300)
    answer, _ = await prefill(engine, prompt, {"kvreturn": {"v": 1, "keep": False}})
    assert answer["kv_transfer_params"].keys() == {"kvreturn"}
    await until_zero(engine, engine.p, "kv_cache_usage_perc")
    answer, _ = await prefill(engine, [*prompt, 1], {})
    assert answer["kv_transfer_params"]["kvreturn"]["local"] == 288


@pytest.mark.parametrize("node", ["p", "d"])
async def test_a_handle_is_freed_without_a_read(engine: Engine, node: str) -> None:
    full, handle = await first_turn(engine, 72)
    before = await engine.sources()
    for reason in ("freed", "used"):
        request = body([1], 1) | {"kv_transfer_params": {**COLD, **told(handle, free=True)}}
        begun = time.perf_counter()
        status, answer = await engine.post(getattr(engine, node), PATH, request)
        print(f"{reason} after {(time.perf_counter() - begun) * 1000:.0f} ms")
        assert status == 200, answer
        report = answer["kv_transfer_params"]["kvreturn"]
        assert (report["reason"], report["read"]) == (reason, 0)
        await until_zero(engine, engine.d, "kvreturn_pinned_blocks")
    assert (await engine.sources())["external_kv_transfer"] == before["external_kv_transfer"]
    answer, _ = await prefill(engine, full + ids(73, 60), sealed(handle))
    assert answer["kv_transfer_params"]["kvreturn"]["reason"] == "used"


async def test_freeing_needs_the_whole_handle(engine: Engine) -> None:
    full, handle = await first_turn(engine, 74)
    forged = {**handle, "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]]}
    answer, _ = await prefill(engine, [1], told(forged, free=True))
    assert answer["kv_transfer_params"]["kvreturn"]["reason"] == "used"
    answer, _ = await prefill(engine, full + ids(75, 60), sealed(handle))
    assert answer["kv_transfer_params"]["kvreturn"]["read"] == HELD
