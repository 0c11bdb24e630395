"""What routers have counted so far, whatever became of the processes in between."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

INTERVAL = 0.25
"""Seconds between two looks. A router that is killed takes with it what it counted after the last one."""
_TURNS = "kvreturn_turns_total"
_REUSED = ("hit", "partial_hit", "local_hit")
_NOTHING_TO_GAIN = ("first_turn", "slower")


async def samples(session: aiohttp.ClientSession, admin: str) -> dict[str, float]:
    """A router's metrics by name, labels added up; empty if it does not answer."""
    found: dict[str, float] = {}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with session.get(f"http://{admin}/metrics", timeout=aiohttp.ClientTimeout(total=2)) as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                outcome = f":{sample.labels['outcome']}" if sample.name == _TURNS else ""
                name = sample.name + outcome
                found[name] = found.get(name, 0.0) + sample.value
    return found


@dataclass
class Outcomes:
    """Turns by outcome, over all routers and all their lives.

    Attributes:
        admins: addresses of the routers' metrics.
        total: turns by outcome.
    """

    admins: Sequence[str]
    total: Counter[str] = field(default_factory=Counter)
    _last: dict[str, Counter[str]] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def watched(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Look again and again for as long as the context lasts."""
        task = asyncio.create_task(self._watch(session))
        try:
            yield
            if task.done():
                task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def look(self, session: aiohttp.ClientSession) -> None:
        """Add what has come since the last look. A router that counts less than before has been started again."""
        for admin in self.admins:
            found = await samples(session, admin)
            prefix = f"{_TURNS}:"
            now = Counter({k.removeprefix(prefix): int(v) for k, v in found.items() if k.startswith(prefix)})
            if not found:
                continue
            before = self._last.get(admin, Counter())
            if any(now[k] < v for k, v in before.items()):
                before = Counter()
            self.total += now - before
            self._last[admin] = now

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        while True:
            await self.look(session)
            await asyncio.sleep(INTERVAL)


def reuse(outcomes: Counter[str]) -> float | None:
    """Share of the turns that had something to gain whose prefix came back, in percent; None without any."""
    later = sum(outcomes.values()) - sum(outcomes[word] for word in _NOTHING_TO_GAIN)
    return 100 * sum(outcomes[word] for word in _REUSED) / later if later else None
