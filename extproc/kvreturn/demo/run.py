"""The demo's course: each turn once in every way (off, lazy, eager), and once on the plain node."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass

import aiohttp
import openai

from kvreturn.demo.counters import Counts, counts, router_counts, settled
from kvreturn.demo.leg import Leg, Said
from kvreturn.demo.script import Script
from kvreturn.demo.stack import WAYS, Front, Stack

PAUSE = 0.3
"""Seconds that the agent's tools take between two turns."""
_AGAIN = 0.01  # seconds


_WARM_UP = Script(
    opening=[{"role": "user", "content": "Return the name of the file object that was opened. " * 20}],
    turns=[["And now the next one."]],
    tools=[],
    max_tokens=8,
)


@dataclass(frozen=True, slots=True)
class Played:
    """One turn, played one way.

    Attributes:
        counts: what P counted from the request to the end of the return, if there was one.
        ttft_ms: milliseconds from sending the request to the first piece of the answer.
        outcome: the router's word for what became of reuse.
        read_back_tokens: prompt tokens that P read from D while the client waited.
        return_ms: milliseconds that the return after the turn took, 0 without one.
    """

    counts: Counts
    ttft_ms: float
    outcome: str
    read_back_tokens: int = 0
    return_ms: float = 0.0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that P computed; a return adds one, since D never computed the KV of its last token."""
        return self.counts.computed

    @property
    def returned_tokens(self) -> int:
        """Tokens that P read from D after the turn, while nobody waited."""
        return self.counts.read - self.read_back_tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took, by the name of each way to play it, and whether all answers are the oracle's."""

    turn: int
    prompt_tokens: int
    ways: Mapping[str, Played]
    identical: bool


@dataclass(frozen=True, slots=True)
class _Player:
    """Plays the conversation one way, and reads what it took from the nodes' and the router's counters."""

    name: str
    front: Front
    leg: Leg
    session: aiohttp.ClientSession

    async def turn(self, number: int) -> tuple[Said, Played]:
        """Play the next turn, and wait until its KV is back if it returns at once: so no counter shows two turns."""
        session, front, model = self.session, self.front, self.leg.model
        metrics = f"{front.prefill}/metrics"
        counted = await counts(session, metrics)
        before = await router_counts(session, front.router_metrics, model)
        async with self._forgetting() if front.forgetful else nullcontext():
            said = await self.leg.turn(number)
        outcome, after = await settled(session, front.router_metrics, model, before)
        return said, Played(
            counts=await counts(session, metrics) - counted,
            ttft_ms=round(said.ttft_ms, 1),
            outcome=outcome,
            read_back_tokens=after.read_back - before.read_back,
            return_ms=round((after.return_seconds - before.return_seconds) * 1e3, 1),
        )

    @asynccontextmanager
    async def _forgetting(self) -> AsyncIterator[None]:
        """Drop P's prefix cache when an answer has begun, as other traffic would: P still had to serve the prompt.

        Not later than its end, or what has come back to P would be dropped as well. P refuses while a block is in use,
        which one is until D has read it.
        """

        async def forget() -> None:
            await self.leg.answering.wait()
            while not await self._dropped():  # noqa: ASYNC110 - no event tells when it can be
                await asyncio.sleep(_AGAIN)

        self.leg.answering.clear()
        task = asyncio.create_task(forget())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _dropped(self) -> bool:
        async with self.session.post(f"{self.front.prefill}/reset_prefix_cache") as response:
            response.raise_for_status()
            return bool((await response.json())["success"])


async def warm_up(stack: Stack) -> None:
    """Two turns in each way before anything is timed: first requests take longer, on real nodes by seconds."""
    async for _ in play(stack, _WARM_UP):
        pass


async def play(stack: Stack, script: Script) -> AsyncIterator[Turn]:
    """Play the conversation in all ways in step, and tell each turn when it is done."""
    async with AsyncExitStack() as clients:
        session = await clients.enter_async_context(aiohttp.ClientSession())

        async def leg(url: str, model: str, **extra: str) -> Leg:
            client = openai.AsyncOpenAI(base_url=url, api_key="demo", max_retries=0)
            return Leg(await clients.enter_async_context(client), model, script, extra)

        # The salt keeps the ways apart in the nodes' prefix caches, so that none of them gains from another.
        players = [
            _Player(way.name, front, await leg(front.gateway, way.model, cache_salt=way.name), session)
            for way, front in ((way, stack.fronts[way.name]) for way in WAYS)
        ]
        oracle = await leg(stack.oracle, WAYS[0].model)
        for number in range(script.length):
            done = {player.name: await player.turn(number) for player in players}
            plain, _ = await asyncio.gather(oracle.turn(number), asyncio.sleep(PAUSE))
            yield Turn(
                turn=number + 1,
                prompt_tokens=plain.prompt_tokens,
                ways={name: played for name, (_, played) in done.items()},
                identical=all(said.text == plain.text for said, _ in done.values()),
            )
