"""Conversations that are over before their time: their owner says so, or an operator, or the last router stops.

What they left is taken from the store, so that nobody else can use it, and D is told to free the blocks.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvreturn.core.api import API
from kvreturn.core.api.base import read_model
from kvreturn.core.fingerprint import Scope
from kvreturn.core.identity import find_session
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import PRESENCE, Taken
from kvreturn.core.scrub import scrub_body, stamped
from kvreturn.store.errors import StoreError

if TYPE_CHECKING:
    from kvreturn.server.world import World

log = logging.getLogger("kvreturn")


@dataclass(slots=True)
class Ended:
    """What became of what was taken from the store.

    Attributes:
        records: how many were taken.
        handles: how many of them had a handle.
        freed: how many of those D was told to free; what it was not told waits for D's own TTL.
    """

    records: int = 0
    handles: int = 0
    freed: int = 0


@dataclass(slots=True)
class Clearing(Ended):
    """All conversations are being ended.

    Attributes:
        state: whether it goes on, and how it ended.
    """

    state: Literal["running", "done", "failed"] = "running"


class Lifecycle:
    """Ends conversations.

    Args:
        world: what all exchanges share.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self.clearing: Clearing | None = None
        self._task: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None

    async def end_session(self, scope: Scope, session: str, credentials: Mapping[str, str]) -> Ended:
        """End a conversation by the id that the client gave it.

        Args:
            scope: whose it is.
            session: what stood in the client's header or member (docs/identity.md).
            credentials: for nodes.

        Raises:
            StoreError: nothing is known of it.
        """
        return await self._free(await self._world.guard.end(scope.conversation_key(session)), credentials)

    async def end_turn(
        self, api: API, body: bytes, headers: Mapping[str, str], credentials: Mapping[str, str]
    ) -> Ended:
        """End the conversation whose last turn had this body. Of several equal ones it is the newest.

        Args:
            api: of the turn.
            body: of the turn; its answer may be added, as the next turn would have it.
            headers: of the turn, as far as they name tenant and session.
            credentials: for nodes.

        Raises:
            JSONTextError: it is no JSON object.
            BadRequestError: it is no turn.
            StoreError: nothing is known of it.
        """
        keys = await asyncio.to_thread(self._places, api, body, headers)  # bodies may be large
        taken = await self._world.take(keys, hurry=False)
        if taken.reason is Outcome.STORE_UNAVAILABLE:
            raise StoreError("unavailable")
        return await self._free([taken] if taken.record else [], credentials)

    def _places(self, api: API, body: bytes, headers: Mapping[str, str]) -> list[bytes]:
        """Where the turn of this body, or the one that it is a whole turn of, is stored: as `Turn` would have it."""
        world = self._world
        scope, text = world.scope(headers), scrub_body(ObjectText(body))
        model = read_model(text)
        policy = world.policy(model)
        session = find_session(headers, text, own=world.settings.session_header)
        text = stamped(text, api, scope if policy.salts else None)
        prompt = api.read(text, strict=policy.strict, longest=policy.history)
        trail = scope.trail(prompt.root, prompt.items)
        own = scope.session_key(model, session.id) if session else None
        # With an id, only its own: an equal conversation of another session goes on.
        return [trail.places(key, own)[0] for key in (trail.turn_key(), trail.prompt_key()) if key]

    def end_all(self, credentials: Mapping[str, str]) -> Clearing:
        """End all conversations of all who share the store, in the background. One at a time: a running one goes on."""
        if self.clearing is None or self.clearing.state != "running":
            self.clearing = Clearing()
            self._task = asyncio.create_task(self._clear(self.clearing, credentials))
        return self.clearing

    async def _clear(self, clearing: Clearing, credentials: Mapping[str, str]) -> None:
        try:
            async for part in self._world.store.take_all():
                ended = await self._free(part, credentials)  # some at a time, and no faster than nodes take it
                clearing.records += ended.records
                clearing.handles += ended.handles
                clearing.freed += ended.freed
            clearing.state = "done"
        except StoreError as e:
            clearing.state = "failed"
            log.warning("not all conversations could be ended: the store failed (%s); try again", e.kind)
        if clearing.handles:
            log.info("of %d handles that nobody will use, %d were freed", clearing.handles, clearing.freed)

    async def _free(self, taken: Sequence[Taken], credentials: Mapping[str, str]) -> Ended:
        for one in taken:
            self._world.took(one)
        held = [t.record for t in taken if t.record and t.record.handle]
        told = await asyncio.gather(*(self._world.freeing.free(record, credentials) for record in held))
        return Ended(len(taken), len(held), sum(told))

    @contextlib.asynccontextmanager
    async def presence(self) -> AsyncIterator[None]:
        """Tell the other routers that this one runs, for as long as the context lasts."""
        if self._world.settings.store.on_last_exit == "keep":
            yield
            return
        self._beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            await self._hush()

    async def _hush(self) -> None:
        if self._beating:
            self._beating.cancel()
            await asyncio.wait([self._beating])

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(StoreError, TimeoutError):  # turns tell of a store that is away
                async with asyncio.timeout(PRESENCE / 3):
                    await self._world.store.present()
            await asyncio.sleep(PRESENCE / 3)

    async def leave(self, seconds: float) -> None:
        """This router stops: free what nobody will come for.

        Args:
            seconds: that it may take.
        """
        world = self._world
        shared = world.settings.store.url is not None
        try:
            async with asyncio.timeout(seconds):
                if self._task and not self._task.done():
                    await self._task
                await self._hush()  # who has left tells no more of itself
                if not shared or (world.settings.store.on_last_exit == "free" and await world.store.leave()):
                    self.end_all({})
                    assert self._task
                    await self._task
        except (StoreError, TimeoutError):
            log.warning("not all that the decode nodes hold was freed; the rest waits for its TTL there")
