"""The fast lane, router side: turns whose answers pass in Envoy, which tells of them in parts.

docs/lanes.md has the picture. The script in Envoy (envoy/lua/fast_lane.lua) strips what passes; here the same bytes go
through the same capture and record as in the portable lane, so that a turn ends the same way in both. Once a script has
taken an answer on, the ext_proc stream ends with OK: the router may die, and the answer still comes to its end.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping

import grpc

from kvreturn._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from kvreturn._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse
from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
)
from kvreturn.envoy import names
from kvreturn.server.exchange import Exchange
from kvreturn.server.messages import Headers, Message, read_headers, read_metadata
from kvreturn.server.own_cluster import NO_CLUSTER, own_cluster
from kvreturn.server.part import Part
from kvreturn.server.request import Mode
from kvreturn.server.world import World

_LOGS = "envoy.service.accesslog.v3.AccessLogService"
_NO_BODY = ProcessingMode(
    response_header_mode=ProcessingMode.HeaderSendMode.SKIP,
    response_body_mode=ProcessingMode.BodySendMode.NONE,
    response_trailer_mode=ProcessingMode.HeaderSendMode.SKIP,
)
_OVERTAKEN = 6.0  # seconds that a part may be late behind the next one: the script's calls may take nearly as long
_BEHIND = 1.0  # and behind the end of an exchange that was broken off
_SILENT = 30.0  # while tokens come, a script tells of them every 20 s
_OTHER_SCRIPT = (
    "the fast lane's scripts in Envoy are of another version, so that its turns leave nothing: make the bootstrap "
    "again with `kvreturn envoy-config`"
)
_NO_SCRIPT = (
    "envoy.lane is `fast`, but Envoy has no scripts for it: streamed answers pass through the router. Make Envoy's "
    "bootstrap again with `kvreturn envoy-config` and start it with that, or set envoy.lane: portable"
)


def _for_scripts(headers: Mapping[str, str]) -> bool:
    """Whether fast_lane.lua takes on answers with such headers."""
    plain = "transfer-encoding" in headers and "content-encoding" not in headers and "trailer" not in headers
    events = headers.get("content-type", "").lower().startswith("text/event-stream")
    return plain and events and headers.get(":status", "")[:1] in {"2", "3"}


class FastExchange(Exchange):
    """An exchange whose answer may leave for the fast lane.

    Args:
        world: what all exchanges share.
        lane: to which it may leave.
    """

    def __init__(self, world: World, lane: "FastLane") -> None:
        super().__init__(world)
        self._lane = lane
        self._name = ""
        self._apart = False  # the answer passes in the fast lane
        self._next = 0  # number of the part that is awaited; none is before the answer's headers have come
        self._parts = asyncio.Condition()

    def _metadata(self, changes: Headers, prefer: str | None, slack: int | None = None) -> list[tuple[str, str]]:
        values = super()._metadata(changes, prefer, slack)
        streams = self._turn and self._turn.prompt and self._turn.prompt.stream
        if not streams or self._record is None or self._config.response_body_mode != Mode.STREAMED:
            return values
        self._name = self._name or self._lane.name(self)
        values += [(names.TURN_KEY, self._name), (names.CALL_KEY, self._lane.cluster)]
        return [*values, (names.EARLY_KEY, "1")] if self._record.kept else values

    async def _response_headers(self, message: ProcessingRequest) -> list[Message]:
        answers = await super()._response_headers(message)
        taken_on = self._name and read_metadata(message, names.LANE_KEY) == self._name
        if taken_on and self._response and not message.response_headers.end_of_stream:
            (answer,) = answers
            assert isinstance(answer, ProcessingResponse)
            answer.mode_override.CopyFrom(_NO_BODY)
            # Envoy's Lua sets one with each chunk that it changes, for as long as the headers are here.
            answer.response_headers.response.header_mutation.remove_headers.append("content-length")
            self.over = self._apart = True
            if self._record:
                self._record.passes_in_envoy()
            self._lane.enter(self._name)
            async with self._parts:
                self._next = 1
                self._parts.notify_all()
        elif self._name and self._response and _for_scripts(read_headers(message.response_headers.headers)):
            self._world.warn_once(_NO_SCRIPT)
        return answers

    def close(self) -> None:
        """See `Exchange.close`: in the fast lane, this stream's end is not the exchange's."""
        if not self._apart:
            self._lane.forget(self._name)
            super().close()

    def finish(self) -> None:
        """The exchange is over; nothing more can come of it."""
        self._apart = False
        self.close()

    async def part(self, part: Part) -> None:
        """Take a part.

        Parts are separate calls, so one may overtake another, and the answer's headers too.
        """
        async with self._parts:
            try:
                async with asyncio.timeout(_OVERTAKEN):
                    await self._parts.wait_for(lambda: self._next >= part.number)
            except TimeoutError:
                # One is lost, so nobody knows what the answer was: the turn leaves nothing.
                self._lane.leave(self._name)
                return
            if self._next > part.number:
                return  # the script did not know that it had come
            try:
                await self._read(part)
            finally:
                self._next += 1
                self._parts.notify_all()
        if part.last:
            self._lane.leave(self._name)

    async def _read(self, part: Part) -> None:
        assert self._record
        begun = self._world.clock()
        pieces = list(part.pieces())
        for i, (text, late) in enumerate(pieces, 1):
            self._record.late = late
            await self._response_body(HttpBody(body=text, end_of_stream=part.last and i == len(pieces)))
        if self._response:
            self._response.capture.collect()  # nothing more comes for a while: no bytes are kept for that long
        self.took(self._world.clock() - begun)


class FastLane:
    """The turns in the fast lane, and the calls that tell of them.

    Args:
        world: what all exchanges share.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.cluster = own_cluster(world.settings) or ""
        if world.settings.envoy.lane == "fast" and not self.cluster:
            world.warn_once(NO_CLUSTER.format(listen=world.settings.listen))
        self._idle = world.settings.envoy.stream_idle_timeout + 60.0  # Envoy gives up sooner
        self._named: dict[str, FastExchange] = {}
        self._passing: dict[str, asyncio.TimerHandle] = {}
        self._working: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed = asyncio.Event()

    @property
    def passing(self) -> int:
        """Answers that pass now."""
        return len(self._passing)

    def exchange(self) -> Exchange:
        """A new exchange of the role `gateway`."""
        return FastExchange(self._world, self) if self.cluster else Exchange(self._world)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the services: the script's own call, and Envoy's access log."""
        part = grpc.unary_unary_rpc_method_handler(self.part)  # bytes, both ways
        logs = grpc.stream_unary_rpc_method_handler(
            self.logs,
            request_deserializer=StreamAccessLogsMessage.FromString,
            response_serializer=StreamAccessLogsResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(names.FAST_SERVICE, {"Part": part}),
                grpc.method_handlers_generic_handler(_LOGS, {"StreamAccessLogs": logs}),
            )
        )

    def name(self, exchange: FastExchange) -> str:
        """A name for a turn, that nobody can guess."""
        name = secrets.token_hex(16)
        self._named[name] = exchange
        return name

    def forget(self, name: str) -> None:
        """A name is of no more use."""
        self._named.pop(name, None)

    def enter(self, name: str) -> None:
        """An answer passes in the fast lane; said again with each part."""
        self._expect(name, self._idle)
        self._empty.clear()

    def _expect(self, name: str, seconds: float) -> None:
        """A turn is over unless more is heard of it before then."""
        if name in self._passing:
            self._passing[name].cancel()
        else:
            self._world.metrics.live.inc()  # its stream is over, the exchange is not
        self._passing[name] = asyncio.get_running_loop().call_later(seconds, self.leave, name)

    def leave(self, name: str) -> None:
        """An exchange is over."""
        timer = self._passing.pop(name, None)
        if timer:
            timer.cancel()
            self._world.metrics.live.dec()
            self._named[name].finish()
        if not self._passing:
            self._empty.set()

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

    async def part(self, text: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        """A part of an answer. Answered when what it leaves is stored: the client gets no more of it until then."""
        told = {str(k): str(v) for k, v in context.invocation_metadata() or ()}
        name = told.get(names.TURN_HEADER, "")
        exchange = self._named.get(name)
        if exchange is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "kvreturn: there is no such turn")
        if name in self._passing:
            self.enter(name)
        try:
            part = Part.read(told.get(names.PART_HEADER, ""), text)
        except ValueError:
            self._world.warn_once(_OTHER_SCRIPT)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"kvreturn: {_OTHER_SCRIPT}")
        # The script may give up waiting, which cancels the call; what is begun is done all the same.
        work = asyncio.create_task(exchange.part(part))
        self._working.add(work)
        work.add_done_callback(self._working.discard)
        await asyncio.shield(work)
        return b""

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
        """An Envoy may be gone, and its turns with it: those of which no part comes soon."""
        for name in self._passing:
            self._expect(name, _SILENT)

    async def _read_logs(self, messages: AsyncIterator[StreamAccessLogsMessage]) -> None:
        loop = asyncio.get_running_loop()
        async for message in messages:
            for entry in message.http_logs.log_entry:
                ours = entry.common_properties.metadata.filter_metadata[names.METADATA_NAMESPACE]
                name = ours.fields[names.TURN_KEY].string_value
                # The answer's headers may be on their way yet, and parts; after a good end, the last one is.
                if name in self._named:
                    broken = entry.common_properties.response_flags
                    loop.call_later(_BEHIND if broken else 2 * _OVERTAKEN, self.leave, name)
