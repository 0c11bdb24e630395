"""Many conversations at once: D keeps serving, pins stay in their budget, and every answer is a plain node's."""

import asyncio

import pytest

from engine.conftest import BUDGET, JSON, Engine
from engine.test_misuse import ids

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
CONVERSATIONS = 200
_BLOCKS = 1536  # of D: 192 MiB, 128 KiB a block of 32 tokens


async def ask(engine: Engine, base: str, prompt: list[int]) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, answer = await engine.post(base, "/v1/completions", body | {"return_token_ids": True})
    assert status == 200, answer
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


async def talk(engine: Engine, base: str, seed: int) -> list[list[int]]:
    """Two turns, the second one beginning with all of the first."""
    prompt = ids(seed, 150)
    first = await ask(engine, base, prompt)
    return [first, await ask(engine, base, prompt + first + ids(seed + 10_000, 40))]


async def test_two_hundred_conversations_at_once(engine: Engine) -> None:
    pinned: list[float] = []
    over = asyncio.Event()

    async def watch() -> None:
        while not over.is_set():
            pinned.append(await engine.metric(engine.d, "kvreturn_pinned_blocks"))
            await asyncio.sleep(0.2)

    watcher = asyncio.create_task(watch())
    before, sources = engine.outcomes(), await engine.sources()
    got = await asyncio.gather(*[talk(engine, engine.gateway, 1_000 + i) for i in range(CONVERSATIONS)])
    over.set()
    await watcher
    want = await asyncio.gather(*[talk(engine, engine.single, 1_000 + i) for i in range(CONVERSATIONS)])
    assert [i for i in range(CONVERSATIONS) if got[i] != want[i]] == []
    outcomes: JSON = {o: int(n - before.get(o, 0)) for o, n in engine.outcomes().items() if n > before.get(o, 0)}
    after = await engine.sources()
    early = await engine.metric(engine.d, "kvreturn_early_releases_total")
    print(f"outcomes {outcomes}; most blocks pinned {max(pinned):.0f} of {_BLOCKS}; early releases {early:.0f}")
    print(f"read back {after['external_kv_transfer'] - sources['external_kv_transfer']:.0f} tokens")
    assert max(pinned) <= BUDGET * _BLOCKS
    assert sum(outcomes.values()) == 2 * CONVERSATIONS
    assert outcomes.get("prefill_failed", 0) == outcomes.get("read_failed", 0) == 0
