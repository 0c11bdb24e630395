"""The router process: everything started, kept running, and drained in order."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator

import grpc
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvreturn.config import Settings
from kvreturn.core.address import split_address
from kvreturn.server.admin import admin_app
from kvreturn.server.service import SERVICE, ExternalProcessor, server_options
from kvreturn.server.world import World
from kvreturn.telemetry.tracing import Tracing

log = logging.getLogger("kvreturn")
_NOTICE = 1.0  # seconds between failing health checks and refusing streams: Envoy looks about once a second

_EXPORT = 3.0  # seconds in which the last spans may be exported
_FREES = 5.0  # seconds in which blocks that nobody will read may be freed
_RETURNS = 5.0  # seconds in which returns that are under way may end


class ListenError(Exception):
    """An address cannot be listened on."""


class Router:
    """A running router.

    Attributes:
        world: what its exchanges share.
        port: the TCP port that it listens on, 0 for a Unix socket.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.port = 0
        self._service = ExternalProcessor(world)
        self._server = grpc.aio.server(options=server_options(world.settings.limits.request_bytes))
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined] # grpc-stubs does not know it
        self._web: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ListenError: an address is taken or not ours.
        """
        settings = self.world.settings
        self._service.add_to(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if _answers(settings.listen):
            raise ListenError(f"cannot listen on {settings.listen}: another router is running there")
        try:
            self.port = self._server.add_insecure_port(settings.listen)
        except RuntimeError as e:
            hint = "is another router running, or is the address none of this machine's?"
            raise ListenError(f"cannot listen on {settings.listen}: {hint} ({e})") from None
        if settings.admin:
            await self._start_admin(settings.admin)
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, seconds: float) -> None:
        """Stop in order: fail health checks, refuse new streams, let running ones end, and close.

        Args:
            seconds: how long running streams may take; what is left then is cancelled.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await asyncio.sleep(min(_NOTICE, seconds))
        await self._server.stop(seconds)
        await self.world.lifecycle.leave(min(seconds, _FREES))
        await self.world.returns.drain(min(seconds, _RETURNS))
        # `stop` does not wait for handlers that called abort (grpc#37239).
        if self._service.running:
            await asyncio.wait(self._service.running, timeout=1.0)
        if self._web:
            await self._web.cleanup()

    async def _set_health(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def _start_admin(self, address: str) -> None:
        host, port = split_address(address)
        self._web = web.AppRunner(admin_app(self.world, host), access_log=None)
        await self._web.setup()
        try:
            await web.TCPSite(self._web, host, port).start()
        except OSError as e:
            raise ListenError(f"cannot listen on {address} (admin): {e.strerror}") from None


def _answers(listen: str) -> bool:
    """Whether somebody listens on a Unix socket: gRPC would take its path over without a word."""
    scheme, _, path = listen.partition(":")
    if scheme != "unix":
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:  # nobody, at most a socket that a killed router has left
            return False
    return True


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Router]:
    """A router for as long as the context lasts."""
    world = World.create(settings, tracing=Tracing.from_environ(os.environ))
    async with (
        world.client,
        contextlib.aclosing(world.guard),
        world.lifecycle.presence(),
        world.pressure or contextlib.nullcontext(),
    ):
        router = Router(world)
        try:
            await world.guard.start()
            await router.start()
            yield router
        finally:
            await router.drain(settings.drain_timeout)
            await _export(world.tracing)


async def _export(tracing: Tracing) -> None:
    """Export the last spans. A dead exporter does not hold up the end of the process."""
    thread = threading.Thread(target=tracing.shutdown, daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, _EXPORT)


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT, then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as router:
        log.info("listening on %s", settings.listen)
        await stop.wait()
        log.info("draining %d streams for at most %g s", len(router._service.running), settings.drain_timeout)  # noqa: SLF001
    log.info("stopped")
