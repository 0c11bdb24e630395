"""Eager returns that can be held up on their way, and Envoy between the router and its prefill nodes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping

import aiohttp

from kvreturn.core.left import Return
from kvreturn.core.ports import Ask, Awaited, Reply
from kvreturn.core.returning import Job
from kvreturn.server.returns import Returns
from kvreturn.server.world import World
from kvreturn.sim import ManualClock
from kvreturn.upstream.client import PrefillClient
from property.watch import Watch


def name_of_return(turn: str) -> str:
    """What the return of a turn is called."""
    return turn.replace("t", "r")


class HeldReturns(Returns):
    """A router's returns, each of which is named after its turn and can be held up.

    Args:
        world: the router's.
        watch: knows the gates.
        waits: whether a turn that waits for a return lets it go on.

    Attributes:
        errors: what went wrong in the router itself.
    """

    def __init__(self, world: World, watch: Watch, *, waits: bool) -> None:
        super().__init__(world)
        self._watch = watch
        self._waits = waits
        self.errors: list[Exception] = []

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do, and nothing is left of what was done."""
        return not (self._tasks or self._running or self._tenants or self._waiting)

    async def wait(self, ticket: bytes) -> Awaited:
        waiting = asyncio.ensure_future(super().wait(ticket))
        await asyncio.sleep(0)
        if self._waits:
            self._watch.let_returns_go()
        return await waiting

    async def _run(self, task: Return) -> None:
        watch, name = self._watch, name_of_return(self._watch.turn.get())
        watch.turn.set(name)
        watch.returning.add(name)
        try:
            await super()._run(task)
        except Exception as error:
            self.errors.append(error)
            raise
        finally:
            watch.returning.discard(name)
            watch.events += 1

    @contextlib.asynccontextmanager
    async def _turn_of(self, job: Job) -> AsyncIterator[bool]:
        try:
            async with self._watch.deadline():
                await self._watch.at("queue", self._watch.turn.get())
        except TimeoutError:
            yield False
            return
        async with super()._turn_of(job) as ready:
            yield ready


class HeldClient(PrefillClient):
    """Sends to the nodes what Envoy would, where it would: to another node if the named one is away.

    Args:
        world: the router's.
        watch: knows the gates, and who is away.
        clock: bounds the returns.
    """

    def __init__(self, world: World, watch: Watch, clock: ManualClock) -> None:
        super().__init__(world.prefill, None)
        self._watch = watch
        self._clock = clock
        self._nodes = world.settings.pools.sources["prefill"].static

    async def _post(self, node: str, ask: Ask, headers: Mapping[str, str]) -> Reply:
        watch = self._watch
        if node in watch.away:
            watch.away.discard(node)
            others = [other for other in self._nodes if other != node]
            if ask.only or not others:
                raise aiohttp.ClientConnectionError("no healthy upstream")
            node = others[0]
        name = watch.turn.get()
        if name not in watch.returning:
            return await super()._post(node, ask, headers)
        watch.probes[node] += json.loads(ask.body)["prompt"] == [1]
        async with watch.deadline(self._clock):
            await watch.at("sent", name)
            reply = await super()._post(node, ask, headers)
            await watch.at("come", name)
        return reply
