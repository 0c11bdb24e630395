"""Real redis-servers on loopback, and stores that are kept in them."""

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvreturn.store.client import connect
from kvreturn.store.codec import Codec
from kvreturn.store.redis import RedisStore
from kvreturn.store.url import parse_store_url
from support.envoy import unused_address
from support.harness import Harness, harness
from support.nodes import decode_events

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(
    BINARY is None, reason="there is no redis-server or valkey-server here: apt-get install redis-server"
)
KEY = b"the key of these tests"


def _unused_port() -> int:
    return int(unused_address().rpartition(":")[2])


@dataclass
class Server:
    """A redis-server, started at once.

    Attributes:
        folder: where it lives, its log included.
        options: its own, as on the command line.
        port: its TCP port, another one each time.
    """

    folder: Path
    options: tuple[str, ...] = ()
    port: int = field(init=False)
    process: "subprocess.Popen[bytes]" = field(init=False)

    def __post_init__(self) -> None:
        self.port = _unused_port()
        self.start()

    @property
    def url(self) -> str:
        """What leads to it."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, also again after `kill`."""
        assert BINARY
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), "--logfile", f"{self.port}.log", "--unixsocket", f"{self.port}.sock"]
        self.process = subprocess.Popen([*command, *self.options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self.ask("PING"):
                    return
            time.sleep(0.01)
        raise AssertionError(f"redis-server on {self.port} does not start")

    def ask(self, *words: str) -> bytes:
        """The raw answer to a short command, over a connection of its own."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=2) as s:
            s.sendall(f"*{len(words)}\r\n".encode() + b"".join(f"${len(w)}\r\n{w}\r\n".encode() for w in words))
            return s.recv(65536)

    def pause(self) -> None:
        """It keeps its connections, accepts more, and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """After `pause`."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Its connections are reset, and further ones refused."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[Server]:
    """A redis-server for as long as the context lasts."""
    running = Server(folder, options)
    try:
        yield running
    finally:
        running.kill()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[list[Server]]:
    """A cluster of two primaries, half of the slots on each."""
    with contextlib.ExitStack() as stack:
        both, buses = [], [_unused_port(), _unused_port()]
        for bus in buses:
            options = ("--cluster-enabled", "yes", "--cluster-config-file", f"{bus}.conf", "--cluster-port", str(bus))
            both.append(stack.enter_context(server(folder, *options)))
        both[0].ask("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
        both[1].ask("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
        both[1].ask("CLUSTER", "SET-CONFIG-EPOCH", "2")
        both[0].ask("CLUSTER", "MEET", "127.0.0.1", str(both[1].port), str(buses[1]))
        deadline = time.monotonic() + 20
        while not all(b"cluster_state:ok" in one.ask("CLUSTER", "INFO") for one in both):
            assert time.monotonic() < deadline, "the cluster does not come up"
            time.sleep(0.05)
        yield both


def redis_store(url: str, *, key: bytes = KEY, pool_size: int = 32, **more: Any) -> RedisStore:  # noqa: ANN401 - its options
    """A store there."""
    return RedisStore(connect(parse_store_url(url), pool_size=pool_size, connect_timeout=10.0), Codec(key), **more)


@contextlib.asynccontextmanager
async def sharing(url: str, **store: Any) -> AsyncIterator[Harness]:  # noqa: ANN401 - settings as YAML has them
    """A started router that keeps its sessions there, and soon finds a server again that was away.

    Its deadline is longer than the default, so that a busy machine changes no outcome.
    """
    one = harness(store={"url": url, "breaker_probe": 0.1, "deadline": 1.0} | store)
    async with contextlib.aclosing(one.world.guard):
        await one.world.guard.start()
        yield one


async def outcome(router: Harness, *contents: str) -> str:
    """The outcome of one more turn, which ends well."""
    before = router.outcomes()
    envoy = await router.turn(*contents)
    assert envoy.client.status == 200
    assert envoy.client.body == b"".join(decode_events())
    (word,) = {k for k, v in router.outcomes().items() if v != before.get(k, 0)}
    return word


async def conversation(router: Harness, name: str) -> list[str]:
    """The outcomes of two turns."""
    return [await outcome(router, name, *rest) for rest in ((), ("Good morning", "And?"))]


async def recovered(router: Harness, seconds: float) -> float:
    """Waits until two turns of a conversation are as ever. Returns how long it took."""
    begun = time.monotonic()
    while await conversation(router, f"again {time.monotonic()}") != ["first_turn", "hit"]:
        assert time.monotonic() - begun < seconds
        await asyncio.sleep(0.02)
    return time.monotonic() - begun
