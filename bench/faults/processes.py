"""The processes of a fault run: all of them real ones, on free loopback ports, that can be killed and started again."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from kvreturn.envoy.process import Child, ProcessError, Sink

_READY_WITHIN = 40.0
_OK = 200
_SENTINEL = """\
sentinel monitor {service} 127.0.0.1 {primary} 1
sentinel down-after-milliseconds {service} 3000
sentinel failover-timeout {service} 10000
"""
SERVICE = "chaos"
"""What sentinel calls the primary."""


@dataclass
class Process:
    """A process that is started again as it was.

    Attributes:
        name: what logs and errors call it.
        argv: command line.
        answers: whether it can serve.
        sink: takes its log.
        child: the one that runs.
    """

    name: str
    argv: Sequence[str]
    answers: Callable[[], Awaitable[bool]]
    sink: Sink
    child: Child | None = None

    async def start(self) -> None:
        """Start it, and wait until it can serve.

        Raises:
            ProcessError: it did not.
        """
        self.child = Child(self.name, self.argv, self.sink)
        await self.child.start()
        await self.child.ready(self.answers, _READY_WITHIN)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        os.kill(self.pid, number)

    @property
    def pid(self) -> int:
        """Of the one that runs.

        Raises:
            ProcessError: none does.
        """
        if self.child is None:
            raise ProcessError(f"{self.name} was not started")
        return self.child.pid

    async def kill(self) -> None:
        """`kill -9`, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        assert self.child
        await self.child.wait()

    async def stop(self, grace: float = 5.0) -> int:
        """SIGTERM, and wait for its end. Returns the exit code, 0 if it never ran."""
        if self.child is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        return await self.child.stop(grace)


def kvreturn(name: str, arguments: Sequence[str], health: str, sink: Sink) -> Process:
    """A subcommand of `kvreturn`.

    Args:
        name: of the process.
        arguments: its command line.
        health: URL that answers 200 when it can serve.
        sink: takes its log.
    """

    async def answers() -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(health) as response:
                return response.status == _OK
        except aiohttp.ClientError:
            return False

    return Process(name, [sys.executable, "-m", "kvreturn.cli.main", *arguments], answers, sink)


def router(number: int, settings: dict[str, Any], folder: Path, sink: Sink) -> Process:
    """`kvreturn serve` with these settings."""
    path = folder / f"router-{number}.yaml"
    path.write_text(yaml.safe_dump(settings))
    health = f"http://{settings['admin']}/healthz"
    return kvreturn(f"router {number}", ["serve", "--config", str(path)], health, sink)


async def ask(port: int, *words: str) -> str:
    """A Redis server's answer to one command, as it stands on the wire; nothing if it does not come in five seconds."""
    writer = None
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            command = "".join(f"${len(w)}\r\n{w}\r\n" for w in words)
            writer.write(f"*{len(words)}\r\n{command}".encode())
            answer = (await reader.read(65536)).decode()
            writer.close()
            return answer
    if writer:
        writer.close()
    return ""


async def _until(done: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await done():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.05)


@dataclass
class Stores:
    """A primary, its replica, and the sentinel that watches them: the real programs.

    Attributes:
        ports: of the two servers.
        sentinel_port: of the sentinel.
        servers: the two, in the order of their ports.
        sentinel: the sentinel.
    """

    ports: Sequence[int]
    sentinel_port: int
    servers: list[Process] = field(default_factory=list)
    sentinel: Process | None = None

    @classmethod
    def create(cls, ports: Sequence[int], folder: Path, sink: Sink) -> "Stores":
        """Make them; `start` starts them.

        Raises:
            ProcessError: there is no redis-server.
        """
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            raise ProcessError("no redis-server or valkey-server here: apt-get install redis-server")
        *data, sentinel = ports
        made = cls(data, sentinel)
        for port in data:
            # Saved when it is told to end, as a restart should be; killed, it loses what the other one has.
            argv = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "3600 1", "--dir", str(folder)]
            argv += ["--dbfilename", f"{port}.rdb", "--repl-diskless-sync-delay", "0"]
            if port != data[0]:
                argv += ["--replicaof", f"127.0.0.1 {data[0]}"]
            made.servers.append(Process(f"redis {port}", argv, made._pings(port), sink))
        config = folder / "sentinel.conf"
        text = f"port {sentinel}\nbind 127.0.0.1\n" + _SENTINEL.format(service=SERVICE, primary=data[0])
        config.write_text(text)
        made.sentinel = Process("sentinel", [binary, str(config), "--sentinel"], made._pings(sentinel), sink)
        return made

    @property
    def url(self) -> str:
        """What routers are given."""
        return f"redis+sentinel://127.0.0.1:{self.sentinel_port}/{SERVICE}"

    async def start(self) -> None:
        """Start all, and wait until the replica follows.

        Raises:
            ProcessError: one of them did not start.
        """
        for server in self.servers:
            await server.start()
        assert self.sentinel
        await self.sentinel.start()
        await self.replicated()

    async def replicated(self) -> None:
        """Wait until the primary has its replica, and sentinel knows.

        Raises:
            TimeoutError: that takes more than half a minute.
        """

        async def done() -> bool:
            primary = await self.primary()
            follows = "state=online" in await ask(self.ports[primary], "INFO", "replication")
            replica = str(self.ports[1 - primary])
            return follows and replica in await ask(self.sentinel_port, "SENTINEL", "REPLICAS", SERVICE)

        await _until(done)

    async def primary(self) -> int:
        """Index of the server that sentinel names as the primary, once it does.

        Raises:
            TimeoutError: that takes more than half a minute.
        """
        found: list[int] = []

        async def done() -> bool:
            told = await ask(self.sentinel_port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
            found.extend(index for index, port in enumerate(self.ports) if f"\r\n{port}\r\n" in told)
            return bool(found)

        await _until(done)
        return found[0]

    async def promoted(self, old: int) -> float:
        """Wait until sentinel names another primary than `old`, and it takes writes. Returns seconds.

        Raises:
            TimeoutError: that takes more than half a minute.
        """
        begun = time.monotonic()

        async def done() -> bool:
            return await self.primary() != old and "role:master" in await ask(
                self.ports[1 - old], "INFO", "replication"
            )

        await _until(done)
        return time.monotonic() - begun

    async def stop(self) -> None:
        """Stop all."""
        await asyncio.gather(*[p.stop() for p in (*self.servers, self.sentinel) if p])

    @staticmethod
    def _pings(port: int) -> Callable[[], Awaitable[bool]]:
        async def answers() -> bool:
            return "PONG" in await ask(port, "PING")

        return answers
