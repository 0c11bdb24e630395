"""The gRPC service `envoy.service.ext_proc.v3.ExternalProcessor`."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from kvreturn.core.api.base import error_body
from kvreturn.core.ports import Refuse
from kvreturn.envoy import names
from kvreturn.server.exchange import Exchange
from kvreturn.server.fast import FastLane
from kvreturn.server.messages import Message, read_metadata, refused_by
from kvreturn.server.roles import DecodeExchange, PrefillExchange
from kvreturn.server.scriptless import ScriptlessExchange
from kvreturn.server.tasks import is_cancelled
from kvreturn.server.world import World

log = logging.getLogger("kvreturn")
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
# Envoy sends bodies in BUFFERED mode as one message; gRPC's own limit is 4 MiB (envoy answers 500 beyond it).
_ROOM = 1 << 20
_LEGS: dict[str, type[Exchange]] = {names.PREFILL: PrefillExchange, names.DECODE: DecodeExchange}
_ROLES = (names.GATEWAY, *_LEGS)
_GONE = "kvreturn: the router that has this turn is gone, and nobody else can read the answer; send the request again"
_UNKNOWN = Refuse(502, error_body(_GONE, "BadGateway", 502), why="unknown_turn")


def server_options(request_bytes: int) -> list[tuple[str, int]]:
    """Channel options for bodies of this size."""
    return [
        ("grpc.max_receive_message_length", request_bytes + _ROOM),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # another process on this port is a mistake, not a helper
    ]


class ExternalProcessor:
    """Serves streams; knows which are running, so that a drain can wait for them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.fast = FastLane(world)
        self.running: set[asyncio.Task[object]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service. Messages may be serialised already: constant answers are."""
        method = grpc.stream_stream_rpc_method_handler(
            self.process, request_deserializer=ProcessingRequest.FromString, response_serializer=_serialise
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": method}),))
        self.fast.add_to(server)

    async def process(
        self,
        requests: AsyncIterator[ProcessingRequest],
        context: "grpc.aio.ServicerContext[ProcessingRequest, Message]",
    ) -> None:
        """One stream: one HTTP exchange."""
        role = dict(context.invocation_metadata() or ()).get(names.ROLE_HEADER, names.GATEWAY)
        if role not in _ROLES:
            log.error("Envoy's metadata %s: %r is no role; there are %s", names.ROLE_HEADER, role, ", ".join(_ROLES))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "kvreturn: no such role")
        task = asyncio.current_task()
        assert task
        self.running.add(task)
        exchange: Exchange | None = None
        try:
            with self._world.metrics.live.track_inprogress():
                async for request in requests:
                    if request.observability_mode:
                        continue  # Envoy ignores answers then
                    exchange = exchange or self._exchange(role, request)
                    if exchange is None:
                        await context.write(refused_by(_UNKNOWN))
                        return
                    await self._take(exchange, request, context)
                    if exchange.over:
                        return
        finally:
            # Envoy ends streams by cancelling them, also after a good end (envoy#22727): no error, just the end.
            if exchange:
                exchange.close()
            self.running.discard(task)

    def _exchange(self, role: str, first: ProcessingRequest) -> Exchange | None:
        """The exchange of a stream that begins so; None if there ought to be one, and is none any more."""
        if role in _LEGS:
            return _LEGS[role](self._world)
        name = read_metadata(first, names.TURN_KEY)
        if name and first.WhichOneof("request") == "response_headers":
            return self.fast.join(name)
        return ScriptlessExchange(self._world) if self.fast.expected else Exchange(self._world)

    async def _take(
        self,
        exchange: Exchange,
        request: ProcessingRequest,
        context: "grpc.aio.ServicerContext[ProcessingRequest, Message]",
    ) -> None:
        begun = self._world.clock()
        try:
            answers = await exchange.handle(request)
            exchange.took(self._world.clock() - begun)
        except (Exception, asyncio.CancelledError):
            # A cancellation that is not this stream's is an error too: let through, it would look like one, and
            # Envoy would wait for ever (grpc#29248).
            if is_cancelled():
                raise
            log.exception("an exchange failed")
            if exchange.answering:
                # Bytes of the answer have gone out: all that is left is to end it, which Envoy does.
                await context.abort(grpc.StatusCode.INTERNAL, "kvreturn: internal error")
            answers = exchange.fail()
        for answer in answers:
            await context.write(answer)


def _serialise(message: Message) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
