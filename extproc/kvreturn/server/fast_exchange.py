"""An exchange in the fast lane: its request comes whole, in one call, and a streamed answer is told of in parts."""

import asyncio
from typing import TYPE_CHECKING

from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody
from kvreturn.core.ports import Refuse
from kvreturn.envoy import names
from kvreturn.server.called import CALLED, CalledSide, Go
from kvreturn.server.exchange import Exchange
from kvreturn.server.messages import Headers, Message
from kvreturn.server.part import Begun, Part
from kvreturn.server.request import Metadata
from kvreturn.server.world import World

if TYPE_CHECKING:
    from kvreturn.server.fast import FastLane

OVERTAKEN = 6.0
"""Seconds that a part may be late behind the next one: the script's calls may take nearly as long."""


class FastExchange(Exchange):
    """An exchange whose request a script has told of.

    Args:
        world: what all exchanges share.
        lane: that knows it by its name.
    """

    def __init__(self, world: World, lane: "FastLane") -> None:
        super().__init__(world)
        self._lane = lane
        self._config = CALLED
        self._told: Go | Refuse | None = None  # what becomes of the request
        self.name = ""  # what the script calls it; empty if its answer does not matter
        self._apart = self._closed = False  # apart: no stream or call is under way, but the exchange is
        self.in_parts = False  # whether a script may take its answer on
        self._next = 1  # number of the part that is awaited
        self._parts = asyncio.Condition()

    async def request(self, headers: dict[str, str], body: bytes | None) -> Go | Refuse:
        """What becomes of a request.

        Args:
            headers: as Envoy has them.
            body: None if it has none, or none that is read.
        """
        begun = self._world.clock()
        self._headers = headers
        await self._request_begins(end=body is None)
        if body is not None and self._request and self._told is None:
            await self._request_body(HttpBody(body=body, end_of_stream=True))
        if isinstance(self._request, CalledSide):
            self._told = self._told or self._request.go
        self.took(self._world.clock() - begun)
        assert self._told
        if isinstance(self._told, Go) and self.name:
            self._apart = True
            self._lane.enter(self.name)
        return self._told

    def failed(self) -> Refuse:
        """What becomes of a request where `request` raised."""
        self._told = None
        self.fail()
        assert isinstance(self._told, Refuse)
        return self._told

    def _side(self) -> CalledSide:
        return CalledSide(self._limits.request_bytes)

    def _let_go(self, headers: Headers, metadata: Metadata) -> list[Message]:
        self._told = Go(headers, metadata)
        return []

    def _leave(self, changes: Headers) -> list[Message]:
        return self._let_go(changes, ())

    def _say(self, refusal: Refuse) -> list[Message]:
        if self._told:  # the request is over: this is an answer, by ext_proc
            return super()._say(refusal)
        self._told = refusal
        return []

    def _metadata(self, changes: Headers, prefer: str | None, slack: int | None = None) -> list[tuple[str, str]]:
        values = super()._metadata(changes, prefer, slack)
        if not self._looks:
            return values
        self.name = self.name or self._lane.name(self)
        values.append((names.TURN_KEY, self.name))
        if self._turn and self._turn.prompt and self._turn.prompt.stream and self._lane.on:
            self.in_parts = True
            values.append((names.LANE_KEY, "1"))
        if self._request_id:
            values.append((names.REQUEST_ID_KEY, self._request_id))
        return [*values, (names.EARLY_KEY, "1")] if self._record and self._record.kept else values

    def close(self) -> None:
        """See `Exchange.close`: while it is apart, what else ends is not the exchange."""
        if not (self._apart or self._closed):
            self._closed = True
            self._lane.forget(self.name)
            super().close()

    def joined(self) -> None:
        """The answer comes by an ext_proc stream, whose end is the exchange's."""
        self._apart = False

    def finish(self) -> None:
        """The exchange is over; nothing more can come of it."""
        self._apart = False
        self.close()

    async def part(self, part: Part) -> None:
        """Take a part. Parts are separate calls, so one may overtake another."""
        async with self._parts:
            try:
                async with asyncio.timeout(OVERTAKEN):
                    await self._parts.wait_for(lambda: self._next >= part.number)
            except TimeoutError:
                # One is lost, so nobody knows what the answer was: the turn leaves nothing.
                self._lane.leave(self.name)
                return
            if self._next > part.number:
                return  # the script did not know that it had come
            over = True  # if this fails, nobody knows what the answer was, either
            try:
                await self._read(part)
                over = part.last
            finally:
                self._next += 1
                self._parts.notify_all()
                if over:
                    self._lane.leave(self.name)

    async def _read(self, part: Part) -> None:
        if part.begun:
            self._answer_begins(part.begun)
        assert self._record
        begun = self._world.clock()
        pieces = list(part.pieces())
        for i, (text, late) in enumerate(pieces, 1):
            self._record.late = late
            await self._response_body(HttpBody(body=text, end_of_stream=part.last and i == len(pieces)))
        if self._response:
            self._response.capture.collect()  # nothing more comes for a while: no bytes are kept for that long
        self.took(self._world.clock() - begun)

    def ended(self, status: int) -> None:
        """Envoy is through with it, and has answered the client with this status, 0 if with none."""
        if status and self._record and self._response is None:
            self._answer_begins(Begun(status, 0.0, None))

    def _answer_begins(self, begun: Begun) -> None:
        """The script takes on nothing but plain streams of events."""
        assert self._record
        self._record.late = begun.late
        self._response_begins({":status": str(begun.status), "content-type": "text/event-stream"}, begun.node)
        self._record.passes_in_envoy()
