"""Reading what nodes and router count, from their `/metrics`."""

import asyncio
from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

_SOURCE = "vllm:prompt_tokens_by_source_total"
_TURNS = "kvreturn_turns_total"
_PATIENCE = 2.0  # seconds: a turn counts when its stream is closed, a moment after the client has the end


async def prompt_tokens_by_source(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Read vLLM's counter of prompt tokens by where their KV came from."""
    return await _samples(session, url, _SOURCE, by="source")


async def turns_by_outcome(session: aiohttp.ClientSession, url: str, model: str) -> dict[str, float]:
    """Read the router's counter of turns by outcome, for one model."""
    return await _samples(session, url, _TURNS, by="outcome", model=model)


async def new_outcome(session: aiohttp.ClientSession, url: str, model: str, before: Mapping[str, float]) -> str:
    """Wait for the outcome of the model's one turn that ended since `before`."""
    deadline = asyncio.get_running_loop().time() + _PATIENCE
    while asyncio.get_running_loop().time() < deadline:
        now = await turns_by_outcome(session, url, model)
        for outcome, count in now.items():
            if count > before.get(outcome, 0):
                return outcome
        await asyncio.sleep(0.01)
    raise TimeoutError(f"the router counted no turn of model {model} within {_PATIENCE:g} s")


async def _samples(session: aiohttp.ClientSession, url: str, name: str, *, by: str, **labels: str) -> dict[str, float]:
    async with session.get(url) as response:
        text = await response.text()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                key = sample.labels[by]
                found[key] = found.get(key, 0.0) + sample.value
    return found
