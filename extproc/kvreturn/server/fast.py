"""The fast lane, router side: turns whose requests a script in Envoy tells of, and whose answers it tells of in parts.

docs/lanes.md has the picture. A request comes whole, in one call, and one answer says what becomes of it. A streamed
answer passes in Envoy, where the script strips it; here the same bytes go through the same capture and record as in the
portable lane, so that a turn ends the same way in both. An answer that the script does not take on comes by ext_proc.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator

import grpc

from kvreturn._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse
from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody
from kvreturn.core.ports import Refuse
from kvreturn.envoy import names
from kvreturn.envoy.ports import NAMED, are_told_apart
from kvreturn.server.called import CALLED, CalledSide, Go
from kvreturn.server.exchange import Exchange
from kvreturn.server.messages import Headers, Message
from kvreturn.server.part import Begun, Part
from kvreturn.server.request import Metadata
from kvreturn.server.world import World

_LOGS = "envoy.service.accesslog.v3.AccessLogService"
_OVERTAKEN = 6.0  # seconds that a part may be late behind the next one: the script's calls may take nearly as long
_BEHIND = 1.0  # and behind the end of an exchange that was broken off
_SILENT = 30.0  # while tokens come, a script tells of them every 20 s


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
        self._forward_only = False  # the request is over: what is refused now is an answer, by ext_proc
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
        self._forward_only = True
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
        if self._forward_only:
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
                async with asyncio.timeout(_OVERTAKEN):
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


class FastLane:
    """The turns in the fast lane, and the calls that tell of them.

    Args:
        world: what all exchanges share.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.on = world.settings.envoy.lane == "fast"
        self.expected = self.on and are_told_apart(world.settings.routers())
        if self.on and not self.expected:
            world.warn_once(NAMED)
        self._idle = world.settings.envoy.stream_idle_timeout + 60.0  # Envoy gives up sooner
        self.named: dict[str, FastExchange] = {}
        self._passing: dict[str, asyncio.TimerHandle] = {}
        self._calls = 0
        self._working: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed = asyncio.Event()

    @property
    def passing(self) -> int:
        """Exchanges that are under way now, but for those whose answer comes by ext_proc."""
        return len(self._passing) + self._calls

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """While a script waits to hear what becomes of a request."""
        self._calls += 1
        self._empty.clear()
        try:
            with self._world.metrics.live.track_inprogress():
                yield
        finally:
            self._calls -= 1
            self._look()

    def _look(self) -> None:
        if not self.passing:
            self._empty.set()

    def exchange(self) -> FastExchange:
        """A new exchange, of which a script tells."""
        return FastExchange(self._world, self)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register Envoy's access log."""
        logs = grpc.stream_unary_rpc_method_handler(
            self.logs,
            request_deserializer=StreamAccessLogsMessage.FromString,
            response_serializer=StreamAccessLogsResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_LOGS, {"StreamAccessLogs": logs}),))

    def name(self, exchange: FastExchange) -> str:
        """A name for a turn, that nobody can guess."""
        name = secrets.token_hex(16)
        self.named[name] = exchange
        return name

    def forget(self, name: str) -> None:
        """A name is of no more use."""
        self._drop(name)
        self.named.pop(name, None)

    def join(self, name: str) -> FastExchange | None:
        """The exchange of this name, whose answer comes by ext_proc; None if there is none that waits for one."""
        if name not in self._passing:
            return None
        self._drop(name)
        exchange = self.named[name]
        exchange.joined()
        return exchange

    def enter(self, name: str) -> None:
        """A request goes to its node, or a part of its answer has come."""
        self._expect(name, self._idle)
        self._empty.clear()

    def _expect(self, name: str, seconds: float) -> None:
        """A turn is over unless more is heard of it before then."""
        if name in self._passing:
            self._passing[name].cancel()
        else:
            self._world.metrics.live.inc()  # its call is over, the exchange is not
        self._passing[name] = asyncio.get_running_loop().call_later(seconds, self.leave, name)

    def leave(self, name: str) -> None:
        """An exchange is over."""
        if self._drop(name):
            self.named[name].finish()

    def _over(self, name: str, status: int) -> None:
        """Envoy is through with an exchange."""
        if name in self._passing:
            self.named[name].ended(status)
            self.leave(name)

    def _drop(self, name: str) -> bool:
        """Expect nothing more of a turn; whether something was expected."""
        timer = self._passing.pop(name, None)
        if timer:
            timer.cancel()
            self._world.metrics.live.dec()
        self._look()
        return timer is not None

    async def drained(self, seconds: float) -> None:
        """Wait until no turn is left, for so long at most; then no more is heard of any."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            pass
        self._closed.set()
        for name in list(self._passing):
            self.leave(name)

    async def part(self, name: str, part: Part) -> bool:
        """A part of an answer; done when what it leaves is stored: the client gets no more of it until then.

        Returns:
            Whether there is such a turn.
        """
        exchange = self.named.get(name)
        if exchange is None or name not in self._passing:
            return False
        self.enter(name)
        # The script may give up waiting, which cancels the call; what is begun is done all the same.
        work = asyncio.create_task(exchange.part(part))
        self._working.add(work)
        work.add_done_callback(self._working.discard)
        await asyncio.shield(work)
        return True

    async def logs(
        self,
        messages: AsyncIterator[StreamAccessLogsMessage],
        context: "grpc.aio.ServicerContext[StreamAccessLogsMessage, StreamAccessLogsResponse]",
    ) -> StreamAccessLogsResponse:
        """Envoy's log of exchanges that are over: that a client has left, or a node died, the script cannot tell."""
        del context
        reader = asyncio.create_task(self._read_logs(messages))
        closed = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait((reader, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._doubt()
            for task in (reader, closed):
                task.cancel()
            await asyncio.gather(reader, closed, return_exceptions=True)
        return StreamAccessLogsResponse()

    def _doubt(self) -> None:
        """An Envoy may be gone, and its turns with it: those of which no part comes soon.

        Not those of which none can come: such an answer may be long in coming, and would be refused then.
        """
        for name in self._passing:
            if self.named[name].in_parts:
                self._expect(name, _SILENT)

    async def _read_logs(self, messages: AsyncIterator[StreamAccessLogsMessage]) -> None:
        loop = asyncio.get_running_loop()
        async for message in messages:
            for entry in message.http_logs.log_entry:
                ours = entry.common_properties.metadata.filter_metadata[names.METADATA_NAMESPACE]
                name = ours.fields[names.TURN_KEY].string_value
                # The answer's headers may be on their way yet, and parts; after a good end, the last one is.
                if name in self.named:
                    broken = entry.common_properties.response_flags
                    status = entry.response.response_code.value
                    loop.call_later(_BEHIND if broken else 2 * _OVERTAKEN, self._over, name, status)
