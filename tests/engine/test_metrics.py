"""Our connector's metrics on the pages of real nodes."""

import asyncio
import re

import pytest
from kvreturn_connector.counts import COUNTERS, GAUGES, REASONS, UNREAD

from engine.conftest import Engine
from engine.test_load import ask, talk

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
_COUNTED = ("handles", "proofs", "proven_tokens", "reads", "read_tokens", "unread")


async def counted(engine: Engine) -> dict[str, float]:
    return {name: await engine.metric(engine.p, f"kvreturn_{name}_total") for name in _COUNTED}


async def grown(engine: Engine, before: dict[str, float], handles: int) -> dict[str, int]:
    """What has been added, once so many handles more have been counted: vLLM tells with its next step."""
    async with asyncio.timeout(30):
        while (now := await counted(engine))["handles"] < before["handles"] + handles:
            await ask(engine, engine.p, [1, 2, 3])
            await asyncio.sleep(0.1)
    return {name: int(now[name] - before[name]) for name in _COUNTED}


async def test_what_p_proves_and_reads_is_on_its_page(engine: Engine) -> None:
    before, sources, outcomes = await counted(engine), await engine.sources(), engine.outcomes()
    await talk(engine, engine.gateway, 50_001)
    got = await grown(engine, before, 1)
    read = int((await engine.sources())["external_kv_transfer"] - sources["external_kv_transfer"])
    assert engine.outcomes().get("hit", 0) == outcomes.get("hit", 0) + 1
    # 150 of the prompt and 12 generated, of which D holds all but the last one's KV.
    assert (got["handles"], got["proofs"], got["reads"], got["unread"]) == (1, 1, 1, 0)
    assert read > 0
    assert got["read_tokens"] == read
    assert read <= got["proven_tokens"] <= 161


async def test_every_name_and_reason_is_there_before_anything_happens(engine: Engine) -> None:
    for base in (engine.p, engine.d):
        async with engine.session.get(f"{base}/metrics") as answer:
            page = await answer.text()
        names = set(re.findall(r"^# TYPE vllm:(kvreturn_\w+)", page, re.MULTILINE))
        assert {*GAUGES, *(f"{name}_total" for name in (*COUNTERS, UNREAD))} <= names
        reasons = re.findall(rf'^vllm:{UNREAD}_total\{{.*reason="(\w+)"', page, re.MULTILINE)
        assert sorted(reasons) == sorted(REASONS)
