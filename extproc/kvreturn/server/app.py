"""The router process: everything started, kept running, and drained in order."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvreturn.config import Settings
from kvreturn.core.address import split_address
from kvreturn.envoy.ports import may_be_several, unavailable
from kvreturn.server.admin import admin_app
from kvreturn.server.calls import Calls
from kvreturn.server.endpoints import EndpointService
from kvreturn.server.heap import keep_large, leave_start_alone
from kvreturn.server.reload import Reloader
from kvreturn.server.service import SERVICE, ExternalProcessor, server_options
from kvreturn.server.world import World
from kvreturn.telemetry.environment import metrics_export
from kvreturn.telemetry.loop import watching
from kvreturn.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from kvreturn.telemetry.otlp import MetricsExport

log = logging.getLogger("kvreturn")
_NOTICE = 1.0  # seconds between failing health checks and refusing streams: Envoy looks about once a second

_BACKLOG = 1024  # a burst of Envoy's connections; one that finds no place in line is tried again after a second
_EXPORT = 3.0  # seconds in which the last spans may be exported
_FREES = 5.0  # seconds in which blocks that nobody will read may be freed
_APART = (
    "there are several routers (envoy.routers) and no session store that they share: a turn is cold where another one "
    "served the turn before. Set `store.url` to a Redis or Valkey"
)
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
        self._endpoints = EndpointService((world.prefill, world.decode))
        self._server = grpc.aio.server(options=server_options(world.settings.limits.request_bytes))
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined] # grpc-stubs does not know it
        self._calls = Calls(world, self._service.fast)
        self._web: web.AppRunner | None = None
        self._scripts = self._calls.runner()
        self._socket: Path | None = None  # where scripts call, once that is listened on

    async def start(self) -> None:
        """Listen.

        Raises:
            ListenError: an address is taken or not ours.
        """
        settings = self.world.settings
        self._service.add_to(self._server)
        self._endpoints.add_to(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        check_free({"listen": settings.listen, "calls": settings.calls_listen, "admin": settings.admin})
        try:
            self.port = self._server.add_insecure_port(settings.listen)
        except RuntimeError as e:  # somebody was faster than we are
            raise ListenError(f"cannot listen on {settings.listen} (listen): {e}") from None
        if settings.admin:
            await self._start_admin(settings.admin)
        await self._start_calls(settings.calls_listen)
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    @property
    def streams(self) -> int:
        """Exchanges that run now, in either lane."""
        return len(self._service.running) + self._service.fast.passing

    async def drain(self, seconds: float) -> None:
        """Stop in order: fail health checks, refuse new streams, let running ones end, and close.

        Args:
            seconds: how long running streams may take; what is left then is cancelled.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._calls.serving = False
        await asyncio.sleep(min(_NOTICE, seconds))
        begun = time.monotonic()
        await self._service.fast.drained(seconds)  # while it is still told of them
        await self._scripts.cleanup()
        self._remove_socket()
        self._endpoints.close()
        await self._server.stop(max(seconds - (time.monotonic() - begun), 0.0))
        await self.world.lifecycle.leave(min(seconds, _FREES))
        await self.world.returns.drain(min(seconds, _RETURNS))
        await self.world.tasks.drain(_RETURNS)
        # `stop` does not wait for handlers that called abort (grpc#37239).
        if self._service.running:
            await asyncio.wait(self._service.running, timeout=1.0)
        if self._web:
            await self._web.cleanup()

    async def _start_calls(self, address: str) -> None:
        await _serve_at(self._scripts, address, "calls")
        path = address.removeprefix("unix:")
        self._socket = Path(path) if path != address else None

    def _remove_socket(self) -> None:
        """What gRPC does with its own."""
        if self._socket:
            self._socket.unlink(missing_ok=True)

    async def _set_health(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def _start_admin(self, address: str) -> None:
        host, _ = split_address(address)
        self._web = web.AppRunner(admin_app(self.world, host), access_log=None)
        await _serve_at(self._web, address, "admin")


async def _serve_at(runner: web.BaseRunner, address: str, setting: str) -> None:
    """Have a runner listen.

    Raises:
        ListenError: with the setting that the address comes from.
    """
    await runner.setup()
    path = address.removeprefix("unix:")
    try:
        if path != address:
            site: web.BaseSite = web.UnixSite(runner, path, backlog=_BACKLOG)
        else:
            site = web.TCPSite(runner, *split_address(address), backlog=_BACKLOG)
        await site.start()
    except OSError as e:
        raise ListenError(f"cannot listen on {address} ({setting}): {e.strerror or e}") from None


def check_free(listens: Mapping[str, str | None]) -> None:
    """See that nobody has these addresses.

    Before gRPC tries: it writes lines of its own about a port that is in use, and takes over the path of a Unix socket
    without a word.

    Args:
        listens: by setting; None for what is switched off.

    Raises:
        ListenError: with a line for each that is taken, or not ours.
    """
    taken = unavailable({setting: listen for setting, listen in listens.items() if listen})
    if taken:
        raise ListenError("\n".join(f"cannot listen on {line}" for line in taken))


@contextlib.asynccontextmanager
async def running(settings: Settings, worker: int = 0) -> AsyncIterator[Router]:
    """A router for as long as the context lasts."""
    world = World.create(settings, tracing=Tracing.from_environ(os.environ))
    world.worker = worker
    export = metrics_export(world.metrics, os.environ)
    async with world.client, contextlib.aclosing(world.guard), world.lifecycle.presence(), world.nodes, world.pressure:
        router = Router(world)
        try:
            async with export or contextlib.nullcontext(), watching(world.metrics.loop_lag):
                try:
                    await world.guard.start()
                    await router.start()
                    yield router
                finally:
                    await router.drain(world.settings.drain_timeout)
        finally:
            await _exported(world.tracing, export)


async def _exported(tracing: Tracing, metrics: "MetricsExport | None") -> None:
    """Wait for the last spans and metrics. A dead exporter does not hold up the end of the process."""
    thread = threading.Thread(target=tracing.shutdown, daemon=True)
    thread.start()
    end = time.monotonic() + _EXPORT
    await asyncio.to_thread(thread.join, _EXPORT)
    if metrics:
        await asyncio.to_thread(metrics.join, max(end - time.monotonic(), 0.0))


async def serve(
    settings: Settings, load: Callable[[], Settings], *, worker: int | None = None, watch: Path | None = None
) -> None:
    """Run until SIGTERM or SIGINT, then drain. SIGHUP reads the settings again.

    Args:
        settings: of all workers.
        load: reads them again.
        worker: which one this is; its supervisor holds the other end of its standard input. None without workers.
        watch: the file to reload when it changes, None to wait for SIGHUP.
    """
    keep_large()
    _allow_connections()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if worker is not None:
        loop.add_reader(sys.stdin.fileno(), _orphaned, stop)
    own = settings.worker(worker or 0)
    async with running(own, worker or 0) as router:
        reloader = Reloader(router.world, load, settings)
        loop.add_signal_handler(signal.SIGHUP, reloader.reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        leave_start_alone()
        watching = asyncio.create_task(reloader.watch(watch)) if watch else None
        if not own.store.url and may_be_several(own.routers()):
            router.world.warn_once(_APART)
        log.info("listening on %s, for calls of Envoy's scripts on %s", own.listen, own.calls_listen)
        await stop.wait()
        if watching:
            watching.cancel()
        seconds = router.world.settings.drain_timeout
        log.info("draining %d streams for at most %g s", router.streams, seconds)
    log.info("stopped")


def _allow_connections() -> None:
    """As many as the system allows: each request takes two while its prefill leg runs, and most shells say 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _orphaned(stop: asyncio.Event) -> None:
    """The supervisor is gone."""
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    stop.set()
