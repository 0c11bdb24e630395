"""D goes away, comes back as another, and lets blocks expire: turns go cold, and none fails."""

import asyncio

import pytest

from engine.conftest import Engine
from engine.test_misuse import expected, first_turn, ids, prefill, sealed

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
TTL = 12


async def cold(engine: Engine, prompt: list[int], handle: dict[str, object]) -> str:
    """P answers like a plain node, in time, without a read. Returns its reason."""
    answer, seconds = await prefill(engine, prompt, sealed(handle))
    assert seconds < 2.5, f"P took {seconds:.1f} s"
    assert answer["choices"][0]["token_ids"] == (await expected(engine, prompt))[:1]
    report = answer["kv_transfer_params"]["kvreturn"]
    assert report["read"] == 0
    reason: str = report["reason"]
    return reason


async def test_a_decode_node_that_is_down_restarted_or_lets_blocks_expire(engine: Engine) -> None:
    full, handle = await first_turn(engine, 41)
    prompt = full + ids(42, 60)
    await engine.stop("decode")
    assert await cold(engine, prompt, handle) == "node_gone"

    await engine.start("decode", decoder_kv_blocks_ttl=TTL)
    await asyncio.sleep(5.1)  # so long P does not ask a peer again that did not answer
    assert await cold(engine, prompt, handle) == "used"

    full, handle = await first_turn(engine, 43)
    assert handle["kvreturn"]["ttl"] == TTL
    answer, _ = await prefill(engine, full + ids(44, 60), sealed(handle))
    assert answer["kv_transfer_params"]["kvreturn"]["read"] == 223

    full, handle = await first_turn(engine, 45)
    await asyncio.sleep(TTL + 1)
    assert await cold(engine, full + ids(46, 60), handle) in {"expired", "used"}
