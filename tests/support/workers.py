"""`kvreturn serve --workers` as processes, before a redis-server."""

import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from support.envoy import Json
from support.extproc import Envoy, Modes, Request, Response
from support.harness import DECODE
from support.nodes import FakePrefill, chat, decode_events, handle
from support.redis import Server
from support.serve import fetch, spawn, write
from support.streams import GrpcStream

# A channel of its own that tries again soon: gRPC's first look often comes before the worker is there.
_IMPATIENT = [
    ("grpc.use_local_subchannel_pool", 1),
    *((f"grpc.{name}_reconnect_backoff_ms", 100) for name in ("initial", "min", "max")),
]


@dataclass
class Workers:
    """Running workers.

    Attributes:
        process: the supervisor.
        listens: the workers' addresses.
        admins: the `host:port` of their admin ports.
        lines: what all wrote so far.
    """

    process: asyncio.subprocess.Process
    listens: list[str]
    admins: list[str]
    lines: list[str] = field(default_factory=list)

    async def read(self) -> None:
        assert self.process.stderr
        async for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())

    async def see(self, pattern: str, times: int = 1) -> None:
        """Wait until so many lines match."""
        deadline = time.monotonic() + 40
        while sum(1 for line in self.lines if re.search(pattern, line)) < times:
            assert time.monotonic() < deadline, "\n".join(self.lines)
            await asyncio.sleep(0.01)

    def pid(self, worker: int) -> int:
        """The latest process that is this worker."""
        return int(
            next(m[1] for x in reversed(self.lines) if (m := re.search(rf"worker {worker} is process (\d+)", x)))
        )

    async def up(self, worker: int) -> None:
        """Wait until a worker serves."""
        async with grpc.aio.insecure_channel(self.listens[worker], _IMPATIENT) as channel:
            await asyncio.wait_for(channel.channel_ready(), 40)

    async def turn(
        self, worker: int, *contents: str, headers: dict[str, str] | None = None, params: Json | None = None
    ) -> Envoy:
        """A chat turn through one worker, which leaves a handle."""
        async with grpc.aio.insecure_channel(self.listens[worker]) as channel:
            envoy = Envoy(GrpcStream(channel), Modes())
            request = Request(pieces=[chat(*contents)])
            if headers:
                request = Request(pieces=request.pieces, headers={"content-type": "application/json", **headers})
            await envoy.play(request, Response(decode_events(params=params or handle()), node=DECODE))
            return envoy

    async def metrics(self, worker: int) -> str:
        return await asyncio.to_thread(fetch, f"http://{self.admins[worker]}/metrics")

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 40)


@contextlib.asynccontextmanager
async def working(
    folder: Path,
    redis: Server,
    node: FakePrefill,
    *options: str,
    count: int = 2,
    environ: dict[str, str] | None = None,
    **changes: Any,  # noqa: ANN401
) -> AsyncIterator[Workers]:
    """So many workers, once all of them serve."""
    listen = f"unix:{folder}/router"
    port = _port(count)
    config = {
        "listen": listen,
        "admin": f"127.0.0.1:{port}",
        "pools": {"prefill": [node.address], "decode": [DECODE]},
        "prefill": {"via": "direct"},
        "secret": "s",
        "tenant_header": "x-tenant",
        "store": {"url": redis.url, "deadline": 10.0},
        "drain_timeout": 0.05,
        **changes,
    }
    process = await spawn(write(folder, config), "--workers", str(count), *options, **(environ or {}))
    listens = [listen, *(f"{listen}.{i}" for i in range(1, count))]
    workers = Workers(process, listens, [f"127.0.0.1:{port + 2 * i}" for i in range(count)])
    reading = asyncio.create_task(workers.read())
    try:
        for i in range(count):
            await workers.up(i)
        yield workers
    finally:
        if process.returncode is None:
            process.kill()  # the workers notice
            await process.wait()
        await reading  # to the end: until the last worker is gone


def _port(count: int) -> int:
    """The first of free ports, two apart."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            for i in range(1, count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + 2 * i))
            return port


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
