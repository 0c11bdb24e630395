"""Reading what nodes and router count, from their `/metrics`."""

import asyncio
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_SOURCE = "vllm:prompt_tokens_by_source_total"
_COMPUTED, _READ = "local_compute", "external_kv_transfer"
# What NixlConnector counts on the node that reads. vLLM 0.32.0 adds them up in the step that reports the request as
# loaded, so they are there when the prefill leg's answer is. Simulated nodes have none.
_NIXL = ("vllm:nixl_bytes_transferred_count", "vllm:nixl_bytes_transferred_sum", "vllm:nixl_num_failed_transfers_total")
_TURNS, _CHOICES, _RETURNS = "kvreturn_turns_total", "kvreturn_return_choices_total", "kvreturn_returns_total"
_READ_BACK, _RETURN_SECONDS = "kvreturn_read_back_tokens_total", "kvreturn_return_duration_seconds_sum"
# Seconds: a turn counts when its stream is closed, a moment after the client has the end; the router gives up a return
# that has waited for 5 and taken 30.
_PATIENCE = 40.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What a node counted.

    Attributes:
        computed: prompt tokens that it computed.
        read: prompt tokens that it read from another node.
        transfers: its NIXL reads.
        transferred_bytes: bytes that these brought.
        failed: NIXL reads that failed.
    """

    computed: int = 0
    read: int = 0
    transfers: int = 0
    transferred_bytes: int = 0
    failed: int = 0

    def __add__(self, other: Self) -> "Counts":
        """Both together."""
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: Self) -> "Counts":
        """What came since an earlier look at the same node."""
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(earlier), strict=True)))


async def counts(session: aiohttp.ClientSession, url: str) -> Counts:
    """Read what a node has counted so far."""
    samples = await scrape(session, url)
    sources = by_label(samples, _SOURCE, "source")
    nixl = [sum(s.value for s in samples if s.name == name) for name in _NIXL]
    return Counts(*(int(n) for n in (sources.get(_COMPUTED, 0), sources.get(_READ, 0), *nixl)))


async def prompt_tokens_by_source(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Read vLLM's counter of prompt tokens by where their KV came from."""
    return by_label(await scrape(session, url), _SOURCE, "source")


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """What a router counted.

    Attributes:
        turns: turns of one model, by outcome.
        read_back: prompt tokens that P read from D while a client waited.
        begun: eager returns that were decided on.
        ended: eager returns that were brought to an end, a good one or not.
        return_seconds: time that all of them took.
    """

    turns: Mapping[str, float]
    read_back: int
    begun: int
    ended: int
    return_seconds: float


async def router_counts(session: aiohttp.ClientSession, url: str, model: str) -> RouterCounts:
    """Read what a router has counted so far; turns are those of one model."""
    samples = await scrape(session, url)

    def total(name: str, **labels: str) -> float:
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    return RouterCounts(
        turns=by_label(samples, _TURNS, "outcome", model=model),
        read_back=int(total(_READ_BACK)),
        begun=int(total(_CHOICES, choice="eager")),
        ended=int(total(_RETURNS)),
        return_seconds=total(_RETURN_SECONDS),
    )


async def settled(
    session: aiohttp.ClientSession, url: str, model: str, before: RouterCounts
) -> tuple[str, RouterCounts]:
    """Wait until the router has counted the model's one turn since `before`, and its return, if any, has ended.

    A return is decided on before its turn is counted, so none can come later.

    Returns:
        The turn's outcome, and what is counted now.

    Raises:
        TimeoutError: that did not happen.
    """
    deadline = asyncio.get_running_loop().time() + _PATIENCE
    while asyncio.get_running_loop().time() < deadline:
        now = await router_counts(session, url, model)
        outcome = next((name for name, count in now.turns.items() if count > before.turns.get(name, 0)), None)
        if outcome and now.ended - before.ended >= now.begun - before.begun:
            return outcome, now
        await asyncio.sleep(0.01)
    raise TimeoutError(f"no turn of model {model} and its return were counted by the router within {_PATIENCE:g} s")


async def scrape(session: aiohttp.ClientSession, url: str) -> list[Sample]:
    """All samples of a metrics endpoint."""
    async with session.get(url) as response:
        text = await response.text()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def by_label(samples: list[Sample], name: str, label: str, **labels: str) -> dict[str, float]:
    """Add up one metric's samples by one label; others that are given must match."""
    found: dict[str, float] = {}
    for sample in samples:
        if sample.name == name and labels.items() <= sample.labels.items():
            key = sample.labels[label]
            found[key] = found.get(key, 0.0) + sample.value
    return found
