"""What prefill nodes and routers counted during a leg."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.samples import Sample

from kvreturn.demo.counters import by_label, scrape

_SOURCES = "vllm:prompt_tokens_by_source_total"
_LOCAL, _EXTERNAL, _COMPUTED = "local_cache_hit", "external_kv_transfer", "local_compute"
_CACHE_CONFIG = "vllm:cache_config_info"
_BYTES, _SECONDS = "vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum"
_FAILED = "vllm:nixl_num_failed_transfers_total"
_TURNS, _READ = "kvreturn_turns_total", "kvreturn_read_back_tokens_total"
_UNNAMED = "other"  # of models beyond those that have a label of their own
_PATIENCE = 5.0  # seconds: a turn counts when its stream is closed, a moment after the client has the end


class CountersError(Exception):
    """A metrics endpoint that does not answer as it should; the message says which and what to give."""


@dataclass(frozen=True, slots=True)
class Look:
    """What all prefill nodes and the leg's routers have counted: so far, or during something.

    Attributes:
        prompt: prompt tokens on P by where their KV came from: `local_cache_hit`, `external_kv_transfer`,
            `local_compute`.
        turns: of the routers, by outcome.
        read_back: prompt tokens that P read from D, as the routers know it.
        bytes: that NIXL brought to P.
        seconds: that this took.
        failed: NIXL's failed transfers on P.
        caching: whether P has a prefix cache; None if no P was asked.
        routers: whether any router was asked.
    """

    prompt: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    read_back: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    failed: int = 0
    caching: bool | None = None
    routers: bool = False

    def since(self, before: "Look") -> "Look":
        """What came since an earlier look."""
        return self._with(before, -1)

    def plus(self, other: "Look") -> "Look":
        """Both together."""
        return self._with(other, 1)

    def _with(self, other: "Look", sign: int) -> "Look":
        prompt, turns = (
            Counter({name: mine[name] + sign * theirs[name] for name in mine | theirs})
            for mine, theirs in ((self.prompt, other.prompt), (self.turns, other.turns))
        )
        return Look(
            prompt=prompt,
            turns=+turns,
            read_back=self.read_back + sign * other.read_back,
            bytes=self.bytes + sign * other.bytes,
            seconds=self.seconds + sign * other.seconds,
            failed=self.failed + sign * other.failed,
            caching=self.caching if self.caching is not None else other.caching,
            routers=self.routers or other.routers,
        )

    def share(self, source: str) -> float | None:
        """Which part of the prompt tokens on P came from there; None if none were counted."""
        total = sum(self.prompt.values())
        return self.prompt[source] / total if total else None

    @property
    def local(self) -> float | None:
        """Share of P's own prefix cache."""
        return self.share(_LOCAL)

    @property
    def read(self) -> float | None:
        """Share that P read from D."""
        return self.share(_EXTERNAL)

    @property
    def computed(self) -> float | None:
        """Share that P computed."""
        return self.share(_COMPUTED)

    @property
    def rate(self) -> float | None:
        """Bytes per second of the reads; None if nothing was read."""
        return self.bytes / self.seconds if self.bytes and self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Meters:
    """Where a leg's counters are.

    Attributes:
        prefill: metrics URLs of prefill nodes, perhaps none.
        routers: metrics URLs of routers (their admin ports), perhaps none.
        model: whose turns are counted.
    """

    prefill: Sequence[str] = ()
    routers: Sequence[str] = ()
    model: str = ""

    async def look(self, session: aiohttp.ClientSession) -> Look:
        """Read them all.

        Raises:
            CountersError: one does not answer, or with something else.
        """
        nodes = [_node(await _scrape(session, url, "vllm:", "--prefill-metrics"), url) for url in self.prefill]
        routers = [
            _router(await _scrape(session, url, "kvreturn_", "--router-metrics"), self.model) for url in self.routers
        ]
        total = Look()
        for each in (*nodes, *routers):
            total = total.plus(each)
        return total

    async def settled(self, session: aiohttp.ClientSession, before: Look, turns: int) -> Look:
        """What was counted since `before`, once the routers have counted so many turns, or have had time to."""
        now = (await self.look(session)).since(before)
        deadline = asyncio.get_running_loop().time() + _PATIENCE
        while self.routers and now.turns.total() < turns and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
            now = (await self.look(session)).since(before)
        return now


async def _scrape(session: aiohttp.ClientSession, url: str, prefix: str, option: str) -> list[Sample]:
    try:
        samples = await scrape(session, url)
    except (aiohttp.ClientError, TimeoutError, ValueError) as e:
        raise CountersError(f"{option} {url} cannot be read: {type(e).__name__}: {e}") from None
    if not any(sample.name.startswith(prefix) for sample in samples):
        raise CountersError(f"{option} {url} has no {prefix}* metrics: is it the right port, with /metrics at its end?")
    return samples


def _node(samples: list[Sample], url: str) -> Look:
    def total(name: str) -> float:
        return sum(s.value for s in samples if s.name == name)

    config = next((s.labels for s in samples if s.name == _CACHE_CONFIG), None)
    if config is None:
        raise CountersError(f"--prefill-metrics {url} has no {_CACHE_CONFIG}: vLLM of this age cannot be compared")
    sources = by_label(samples, _SOURCES, "source")
    return Look(
        prompt=Counter({name: int(value) for name, value in sources.items()}),
        bytes=total(_BYTES),
        seconds=total(_SECONDS),
        failed=int(total(_FAILED)),
        caching=config.get("enable_prefix_caching") == "True",
    )


def _router(samples: list[Sample], model: str) -> Look:
    turns = by_label(samples, _TURNS, "outcome", model=model) or by_label(samples, _TURNS, "outcome", model=_UNNAMED)
    read = sum(s.value for s in samples if s.name == _READ)
    return Look(turns=Counter({name: int(value) for name, value in turns.items()}), read_back=int(read), routers=True)
