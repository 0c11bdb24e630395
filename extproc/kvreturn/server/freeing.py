"""Requests of our own to nodes, beside any turn: first of all that D is to free blocks that nobody will read."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvreturn.core.handle import HandleError, read_handle
from kvreturn.core.ports import Ask, Record, Reply
from kvreturn.core.returning import PATH, free_body

if TYPE_CHECKING:
    from kvreturn.server.world import World

_SECONDS = 5.0
_AT_A_TIME = 8
_FREED = (200, 404)  # ours answers with a report, a stock node that it has no such model
_FORBIDDEN = (401, 403)


async def ask(world: "World", question: Ask, seconds: float, headers: Mapping[str, str]) -> Reply:
    """Send a request that no client waits for to a prefill node.

    Args:
        world: sends it.
        question: the request.
        seconds: that it may take.
        headers: of it; vLLM's `--api-key` wants credentials.
    """
    reply = await world.client.ask(replace(question, last=True), {"x-request-id": world.new_id(), **headers}, seconds)
    if reply.status in _FORBIDDEN:
        world.warn_once(
            "a prefill node takes no credentials of clients' for /v1/completions: eager returns and the freeing of "
            "blocks need that"
        )
    return reply


class Freeing:
    """Has D free the blocks of handles that nobody will read, a few at a time.

    Args:
        world: sends the requests.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._slots = asyncio.Semaphore(_AT_A_TIME)

    async def free(self, record: Record, credentials: Mapping[str, str]) -> bool:
        """Have D free the blocks of a record's handle. Whoever calls has taken it, so that nobody else uses it.

        Args:
            record: with the handle; without one there is nothing to free.
            credentials: headers of a turn's request that vLLM's `--api-key` wants.

        Returns:
            Whether D was told.
        """
        world = self._world
        try:
            handle = read_handle(record.handle or b"")
        except HandleError:
            return False
        node = record.prefill_node or world.prefill.choose()
        form = world.forms.form(node) if node else None
        async with self._slots:
            reply = await ask(world, Ask(PATH, free_body(form, handle), prefer=node), _SECONDS, credentials)
        told = reply.status in _FREED
        world.metrics.frees.labels("sent" if told else "failed").inc()
        return told
