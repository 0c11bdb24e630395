"""The router as a process of its own, with real Envoy before it and a decode node that waits for a word."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from kvreturn.config import Settings
from kvreturn.envoy.process import Child
from support.envoy import Json, unused_address
from support.gateway import CHAT, Front, configuration, envoy_before
from support.nodes import FakePrefill, Seen, chat, decode_events, handle

FIRST = chat("Hi", stream=True)
NEXT = chat("Hi", "Good morning", "And?", stream=True)
EVENTS = decode_events(params=handle())
SSE = b"".join(decode_events())


@dataclass
class Paused:
    """A decode node's handler that writes some bytes, and the rest once it may.

    Attributes:
        before: bytes that are written at once.
        go_on: set by the test.
    """

    before: int
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, seen: Seen) -> web.StreamResponse:
        text = b"".join(EVENTS)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(seen.request)
        await response.write(text[: self.before])
        await self.go_on.wait()
        with contextlib.suppress(ConnectionError):  # whoever hangs up in between is the test's matter
            await response.write(text[self.before :])
            await response.write_eof()
        return response


@dataclass
class RouterProcess:
    """`kvreturn serve` with these settings."""

    plain: Json
    folder: Path
    lines: list[str] = field(default_factory=list)
    child: Child | None = None

    async def start(self) -> None:
        path = self.folder / "kvreturn.yaml"
        path.write_text(yaml.safe_dump(self.plain))
        argv = [sys.executable, "-m", "kvreturn.cli.main", "serve", "--config", str(path)]
        self.child = Child("router", argv, lambda _, line: self.lines.append(line))
        await self.child.start()
        await self.child.ready(lambda: answers(f"http://{self.plain['admin']}/healthz"), 20)

    def signal(self, number: signal.Signals) -> None:
        assert self.child
        os.kill(self.child.pid, number)

    async def kill(self) -> None:
        assert self.child
        self.signal(signal.SIGKILL)
        await self.child.wait()

    async def stop(self) -> int:
        assert self.child
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        return await self.child.stop(10)

    async def outcomes(self) -> dict[str, int]:
        """Turns by outcome, once there are some: they count when their streams close, a moment after the answer."""
        url = f"http://{self.plain['admin']}/metrics"
        async with asyncio.timeout(5), aiohttp.ClientSession() as session:
            while True:
                async with session.get(url) as response:
                    families = text_string_to_metric_families(await response.text())
                samples = [s for family in families for s in family.samples if s.name == "kvreturn_turns_total"]
                if samples:
                    return {s.labels["outcome"]: int(s.value) for s in samples}
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def apart(
    shipped: str, folder: Path, handler: Paused, change: Callable[[Json], object] = lambda _: None
) -> AsyncIterator[tuple[Front, RouterProcess, FakePrefill, FakePrefill]]:
    """Envoy, the router as a process, P, and D with this handler. Whatever happened, no handle reached a client."""
    async with FakePrefill() as p, FakePrefill(handler) as d:
        plain = configuration(shipped, [p.address], [d.address], admin=unused_address(), secret="s3cret")
        router = RouterProcess(plain, folder)
        await router.start()
        try:
            async with envoy_before(Settings.model_validate(plain), change) as there:
                yield there, router, p, d
                handler.go_on.set()
                assert not there.tap.leaks(p.address, d.address)
        finally:
            await router.stop()


async def answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.ok
    except aiohttp.ClientError:
        return False


async def once_up(there: Front, body: bytes) -> bytes:
    """The answer to a request, once Envoy has found the router again."""
    async with asyncio.timeout(5):
        while (answer := await there.post(CHAT, body)).status == 500:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)
    return answer.body
