"""What the fast lane's scripts in Envoy call, over HTTP/1: their requests, and the parts of their answers."""

import asyncio
import base64
import logging

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from kvreturn.core.api.base import error_body
from kvreturn.core.ports import Refuse
from kvreturn.envoy import names
from kvreturn.server.called import Go, read_head, reply
from kvreturn.server.fast import FastLane
from kvreturn.server.fast_exchange import FastExchange
from kvreturn.server.intake import is_read
from kvreturn.server.part import Part
from kvreturn.server.tasks import is_cancelled
from kvreturn.server.world import World

log = logging.getLogger("kvreturn")
_SHUTDOWN = 0.1  # seconds; by then nothing is under way that is to end
_ARRIVES = 1.0  # seconds after which Envoy has an answer, or has hung up
_ROOM = 64 << 10  # Envoy takes a little more than `limits.header_bytes`, and a header of ours has them all
_READ = 1 << 20  # bytes that may come in without a stop: a body is wanted as a whole
_KINDS = ("whole", "none", "left")
_OURS = {names.REPLY_HEADER: "1"}
_OTHER_SCRIPT = (
    "kvreturn: the fast lane's scripts in Envoy are of another version than the router: make the bootstrap again with "
    "`kvreturn envoy-config`"
)


class Calls:
    """Serves the scripts.

    Args:
        world: what all exchanges share.
        fast: the turns.
    """

    def __init__(self, world: World, fast: FastLane) -> None:
        self._world = world
        self._fast = fast
        self.serving = True
        """Whether new turns are welcome, as Envoy's health check is told."""

    def runner(self) -> web.ServerRunner:
        """All that is served, ready to listen."""
        room = 2 * self._world.settings.limits.header_bytes + _ROOM
        server = web.Server(
            self._serve,
            request_factory=_request,
            # A client that leaves ends its call, and with it the prefill leg.
            handler_cancellation=True,
            access_log=None,
            max_line_size=room,
            max_field_size=room,
            read_bufsize=_READ,
        )
        return web.ServerRunner(server, shutdown_timeout=_SHUTDOWN)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = (request.method, request.path)
        if asked == ("POST", names.REQUEST_PATH):
            return await self._request(request)
        if asked == ("POST", names.PART_PATH):
            return await self._part(request)
        healthy = asked == ("GET", names.HEALTH_PATH)
        return web.Response(status=404 if not healthy else 200 if self.serving else 503)

    async def _request(self, request: web.BaseRequest) -> web.StreamResponse:
        """A client's request: its headers, and behind them its body."""
        body = await _body_of(request)
        try:
            version, kind, head = request.headers.get(names.HEAD_HEADER, "").split(" ")
            headers = read_head(base64.b64decode(head))
        except ValueError:
            version, kind, headers = "", "", {}
        if version != names.SCRIPTS or kind not in _KINDS or (kind == "left" and is_read(headers)):
            log.error(_OTHER_SCRIPT)
            other = Refuse(500, error_body(_OTHER_SCRIPT, "InternalServerError", 500), why="setup")
            return web.Response(body=reply(other, b""), headers=_OURS)
        return await self._answered(request, headers, body if kind == "whole" else None)

    async def _answered(
        self, request: web.BaseRequest, headers: dict[str, str], body: bytes | None
    ) -> web.StreamResponse:
        exchange, connection = self._fast.exchange(), request.transport
        try:
            with self._fast.call():
                told = await self._told(exchange, headers, body)
                response = web.Response(body=reply(told, body or b""), headers=_OURS)
                await response.prepare(request)
                await response.write_eof()
        except ConnectionError:  # the client left while this was written
            exchange.finish()
            return response
        except BaseException:
            exchange.finish()  # the client has left: nobody will tell of its answer
            raise
        exchange.close()
        if exchange.name and connection:
            asyncio.get_running_loop().call_later(_ARRIVES, self._look, connection, exchange.name)
        return response

    def _look(self, connection: asyncio.Transport, name: str) -> None:
        """A client that left before Envoy had our answer: no script has the turn's name, so no log will have it either.

        Envoy then hangs up, and keeps a connection whose answer it has got.
        """
        if connection.is_closing():
            self._fast.doubt(name)

    async def _told(self, exchange: FastExchange, headers: dict[str, str], body: bytes | None) -> Go | Refuse:
        try:
            return await exchange.request(headers, body)
        except (Exception, asyncio.CancelledError):
            if is_cancelled():
                raise
            log.exception("an exchange failed")
            return exchange.failed()

    async def _part(self, request: web.BaseRequest) -> web.Response:
        """A part of an answer."""
        told = request.headers
        turn = told.get(names.TURN_HEADER, "")
        if turn not in self._fast.named:  # unread: who knows no turn must not say how large a text gets unpacked
            return web.Response(status=404, headers=_OURS)
        try:
            part = Part.read(told.get(names.PART_HEADER, ""), await _body_of(request))
        except ValueError:
            self._world.warn_once(_OTHER_SCRIPT)
            return web.Response(status=400, headers=_OURS)
        known = await self._fast.part(turn, part)
        return web.Response(status=200 if known else 404, headers=_OURS)


async def _body_of(request: web.BaseRequest) -> bytes:
    # `request.read()` would keep it for as long as its connection has no other request.
    return await request.content.read()


def _request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: RequestHandler,
    writer: AbstractStreamWriter,
    task: "asyncio.Task[None]",
) -> web.BaseRequest:
    # No limit here: the router's own has an answer of its own.
    return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=0)
