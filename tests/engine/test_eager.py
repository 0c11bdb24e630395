"""The KV comes back right after a turn: P keeps it in its prefix cache, and neither node pins anything for it."""

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.conftest import UNCACHED, Engine
from engine.test_misuse import decode, expected, ids, prefill, until

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


async def test_a_turn_that_is_brought_back_at_once_leaves_only_what_is_new(engine: Engine) -> None:
    full, held = ids(51, 200), 0
    pinned = await engine.metric(engine.d, "kvreturn_pinned_blocks")
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
        answer, _ = await prefill(engine, full, {"kvreturn": {"v": 1, "handle": handle, "keep": False}})
        seconds = time.perf_counter() - begun
        params = answer["kv_transfer_params"]
        held = handle["remote_num_tokens"]
        assert params.keys() == {"kvreturn"}
        assert params["kvreturn"]["proven"] == held
        assert params["kvreturn"]["read"] + params["kvreturn"]["local"] == held
        freed = await until(engine, engine.d, "kvreturn_pinned_blocks", pinned)
        released = await until(engine, engine.p, "kv_cache_usage_perc", 0)
        assert freed + released < 1
        print(
            f"turn {turn + 1}: computed {computed:.0f}, brought back {params['kvreturn']['read']} in {seconds:.2f} s, "
            f"D free after {freed:.2f} s, P after {released:.2f} s"
        )
        full += ids(60 + turn, 50)


async def test_a_prompt_can_be_computed_ahead_without_a_pin(engine: Engine) -> None:
    prompt = ids(71, 300)
    answer, _ = await prefill(engine, prompt, {"kvreturn": {"v": 1, "keep": False}})
    assert answer["kv_transfer_params"].keys() == {"kvreturn"}
    assert await until(engine, engine.p, "kv_cache_usage_perc", 0) < 1
    answer, _ = await prefill(engine, [*prompt, 1], {})
    assert answer["kv_transfer_params"]["kvreturn"]["local"] == 288
