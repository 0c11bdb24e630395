"""Whether somebody came for what went back eagerly: to this router, or to another one that shares its store."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvreturn.core.choice import Chooser, Fate
from kvreturn.core.fingerprint import keyed_hash
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Put, Record
from kvreturn.core.unseen import Overdue, Unseen
from kvreturn.server.tasks import Tasks

if TYPE_CHECKING:
    from kvreturn.server.world import World

_TOLD = 1200.0  # seconds for which others can learn that a turn came: longer than they wait for it


class Comers:
    """Tells the chooser, once for each return.

    Args:
        world: what all exchanges share.
        chooser: learns from it.
        tasks: where store calls go on.
    """

    def __init__(self, world: "World", chooser: Chooser, tasks: Tasks) -> None:
        self._world = world
        self._chooser = chooser
        self._tasks = tasks
        self._unseen = Unseen(chooser)

    def returned(self, ticket: bytes, node: str, finish_reason: str | None) -> None:
        """A return has arrived; see `Unseen.add`."""
        self._unseen.add(ticket, node, finish_reason, self._world.clock())

    def came(self, ticket: bytes, fate: Fate, node: str) -> None:
        """The next turn came to this P, which had what went back to it, or had it no more."""
        world = self._world
        if not self._unseen.came(ticket, fate, world.clock()) and world.settings.store.url:
            # Another router had it sent there, and asks before it takes it for unused.
            self._chooser.noticed(node, kept=fate == "used", now=world.clock())
            self._tasks.start(self._tell(ticket))

    def give_up(self) -> None:
        """What nobody came here for by now, nobody will."""
        overdue = self._unseen.give_up(self._world.clock())
        if overdue:
            self._tasks.start(self._learn(overdue))

    async def _tell(self, ticket: bytes) -> None:
        await self._world.guard.put(Put([self._key(ticket)], Record(_TOLD)))

    async def _learn(self, overdue: Sequence[Overdue]) -> None:
        for ticket, node, finish_reason in overdue:
            told = await self._world.guard.take([self._key(ticket)])
            if told.record:
                self._chooser.learned_elsewhere(finish_reason, self._world.clock())
            elif told.reason is not Outcome.STORE_UNAVAILABLE:
                self._chooser.learned(node, finish_reason, "unused", self._world.clock())

    def _key(self, ticket: bytes) -> bytes:
        return b"u" + keyed_hash(self._world.key, ticket)
