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
from kvreturn.envoy import names
from kvreturn.envoy.ports import NAMED
from kvreturn.server.fast_exchange import OVERTAKEN, FastExchange
from kvreturn.server.part import Part
from kvreturn.server.world import World

_LOGS = "envoy.service.accesslog.v3.AccessLogService"
_BEHIND = 1.0  # seconds that parts may be late behind the end of an exchange that was broken off
_SILENT = 30.0  # while tokens come, a script tells of them every 20 s


class FastLane:
    """The turns in the fast lane, and the calls that tell of them.

    Args:
        world: what all exchanges share.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.on = world.settings.envoy.lane == "fast"
        self.expected = world.settings.fast_lane
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

    def doubt(self, name: str) -> None:
        """Envoy may not know of this turn: it is over, unless something is heard of it soon."""
        if name in self._passing:
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
                    loop.call_later(_BEHIND if broken else 2 * OVERTAKEN, self._over, name, status)
