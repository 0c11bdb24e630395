"""The simulator is kept honest: the same prompts and handles give the same reports on it and on real vLLM."""

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from zlib import crc32

import aiohttp
import pytest
import pytest_asyncio

from engine.conftest import Engine
from engine.test_misuse import HANDLES, PROMPTS, Change, first_turn, ids, prefill, sealed, stock
from kvreturn.sim import NO_TIMING, HttpFabric, NodeConfig, SimNode

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
# What only the real connector tells: D checks what it is asked for; the simulated one trusts a handle's own words.
REAL_ONLY = {
    "one token too many",
    "40 tokens too many",
    "block ids out of range",
    "another conversation's block ids",
    "another engine id",
    "another request id",
    "nobody listens there",
    "a black hole",
}


@pytest_asyncio.fixture(loop_scope="session")
async def simulated(engine: Engine) -> AsyncIterator[Engine]:
    """The same nodes, simulated."""
    base = NodeConfig(connector="kvreturn", model="tiny", block_size=32, timing=NO_TIMING, allowed_peers=("127.0.0.1",))
    fabric = HttpFabric()
    nodes = [
        SimNode(replace(base, role="prefill", prefix_caching=False, side_host="127.0.0.1"), fabric=fabric),
        SimNode(replace(base, role="decode", side_host="127.0.0.1"), fabric=fabric),
    ]
    p, d = [await node.start() for node in nodes]
    async with aiohttp.ClientSession() as session:
        yield replace(engine, p=p, d=d, session=session)
    for node in nodes:
        await node.stop()
    await fabric.close()


async def report(engine: Engine, seed: int, change: Callable[[list[int]], list[int]], form: Change) -> object:
    full, handle = await first_turn(engine, seed)
    answer, _ = await prefill(engine, change(full), form(handle))
    told = answer["kv_transfer_params"]["kvreturn"]
    return told["proven"], told["read"], told["local"], told.get("reason")


def brought_back(handle: dict[str, object]) -> dict[str, object]:
    return {"kvreturn": {"v": 1, "handle": handle, "keep": False}}


def given_back(handle: dict[str, object]) -> dict[str, object]:
    return {"kvreturn": {"v": 1, "handle": handle, "free": True}}


@pytest.mark.parametrize("form", [sealed, stock, brought_back, given_back])
@pytest.mark.parametrize("change", [p[1] for p in PROMPTS], ids=[p[0] for p in PROMPTS])
async def test_prompts(
    engine: Engine, simulated: Engine, form: Change, change: Callable[[list[int]], list[int]]
) -> None:
    assert await report(simulated, 7, change, form) == await report(engine, 7, change, form)


@pytest.mark.parametrize(
    "tamper", [h[1] for h in HANDLES if h[0] not in REAL_ONLY], ids=[h[0] for h in HANDLES if h[0] not in REAL_ONLY]
)
async def test_handles(engine: Engine, simulated: Engine, tamper: Change) -> None:
    seed = crc32(b"agree")

    def more(full: list[int]) -> list[int]:
        return full + ids(8, 60)

    def form(handle: dict[str, object]) -> dict[str, object]:
        return stock(tamper(handle))

    assert await report(simulated, seed, more, form) == await report(engine, seed, more, form)


async def labels_by_sample(engine: Engine, url: str) -> dict[str, set[str]]:
    async with engine.session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    samples = re.findall(r"^(vllm:\w+)\{(.*)\} ", text, re.MULTILINE)
    return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in samples}


async def test_metrics_have_real_names_and_labels(engine: Engine, simulated: Engine) -> None:
    await first_turn(simulated, 7)
    await first_turn(engine, 7)
    for ours, theirs in ((simulated.p, engine.p), (simulated.d, engine.d)):
        mine, real = await labels_by_sample(simulated, ours), await labels_by_sample(engine, theirs)
        assert "vllm:kvreturn_pins" in mine
        for name, labels in mine.items():
            # Of the cache's settings, the simulator has those that matter to it.
            assert labels <= real[name] if name == "vllm:cache_config_info" else labels == real[name], name
