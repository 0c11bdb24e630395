"""Envoy's scripts, as the router sees them: HTTP calls, and ext_proc for answers that they do not take on.

What a script sends, and what it makes of what it is told, is as in kvreturn/envoy/lua/request.lua and part.lua.
"""

import asyncio
import base64
import contextlib
import io
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from aiohttp import web

from kvreturn._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from kvreturn.server.calls import Calls
from support.extproc import Envoy, Mode, Modes, Request, Response
from support.harness import Harness
from support.streams import LocalStream, Stream

Kind = Literal["whole", "none", "left"]


@dataclass
class Told:
    """What becomes of a request.

    Attributes:
        status: of the answer that the client gets; None if the request goes on.
        headers: of that answer, or of the request as it goes on.
        meta: what is put into Envoy's metadata.
        body: of that answer, or of the request as it goes on.
        put: bytes of it that came from the router.
        rewritten: whether the script makes a new body.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    put: int = 0
    rewritten: bool = False


def apply(said: bytes, headers: dict[str, str], body: bytes) -> Told:
    """What a script makes of the router's answer."""
    head, _, rest = said.partition(b"\n\n")
    first, *lines = head.decode().split("\n")
    if first != "go":
        word, status = first.split(" ")
        assert word == "answer"
        told = Told(int(status), body=rest)
        lines_left = [line.split(" ", 1) for line in lines]
        assert all(word == "set" for word, _ in lines_left)
        told.headers = dict(_named(value) for _, value in lines_left)
        return told
    told, made, at = Told(headers=dict(headers)), [], 0
    for word, value in (line.split(" ", 1) for line in lines):
        if word == "set":
            name, text = _named(value)
            told.headers[name] = text
        elif word == "remove":
            told.headers.pop(value, None)
        elif word == "meta":
            key, _, text = value.partition(":")
            told.meta[key] = text
        elif word == "keep":
            start, stop = map(int, value.split(" "))
            assert 0 <= start < stop <= len(body)
            made.append(body[start:stop])
        else:
            assert word == "put"
            made.append(rest[at : at + int(value)])
            at += int(value)
    assert at == len(rest)
    told.body, told.put, told.rewritten = b"".join(made) if made else body, at, bool(made)
    return told


def _named(value: str) -> tuple[str, str]:
    name, _, text = value[1:].partition(":")  # Envoy's own names begin with one
    assert name == name.lower()
    return value[0] + name, text


@dataclass
class Script:
    """A script in Envoy.

    Attributes:
        router: whom it calls.
        http: over which.
        calls: that take them.
    """

    router: Harness
    http: aiohttp.ClientSession
    calls: Calls

    async def request(self, request: Request, kind: Kind | None = None, version: str = "2") -> Told:
        """Tell of a request, and do as the router says."""
        pseudo = {":method": request.method, ":path": request.path, ":scheme": "http", ":authority": "llm.example"}
        headers, body = {**pseudo, **request.headers}, b"".join(request.pieces)
        head = "".join(f"{name}:{value}\n" for name, value in headers.items()).encode("latin-1")
        about = f"{version} {kind or ('whole' if request.pieces else 'none')} {base64.b64encode(head).decode()}"
        named = {"x-kvreturn-head": about}
        async with self.http.post(
            "/kvreturn/request", headers=named, data=io.BytesIO(body if kind != "left" else b"")
        ) as said:
            assert (said.status, said.headers["x-kvreturn-reply"]) == (200, "1")
            return apply(await said.read(), headers, body)

    async def part(self, turn: str, about: str, text: bytes, *, packed: bool = True) -> int:
        """Tell of a part of an answer. Returns the status."""
        named = {"x-kvreturn-turn": turn, "x-kvreturn-part": about}
        data = b"raw %d\n%b" % (len(text), text) if packed else text  # so it does where there is nothing to pack
        async with self.http.post("/kvreturn/part", headers=named, data=data) as said:
            assert said.headers["x-kvreturn-reply"] == "1"
            assert not await said.read()
            return said.status

    async def by_ext_proc(self, turn: str, response: Response) -> Envoy:
        """An answer that the script does not take on. Returns what comes of it."""
        envoy = Answered(LocalStream(self.router.service), turn)
        await envoy.respond(response)
        await envoy.finish()
        return envoy


@contextlib.asynccontextmanager
async def calling(router: Harness) -> AsyncIterator[Script]:
    """A script that calls this router."""
    calls = Calls(router.world, router.service.fast)
    runner = calls.runner()
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as listens:
        await web.SockSite(runner, listens).start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{listens.getsockname()[1]}") as http:
            yield Script(router, http, calls)
        await runner.cleanup()


class Answered(Envoy):
    """An exchange of whose request a script has told.

    Args:
        stream: opened at the answer's headers.
        turn: the name in Envoy's metadata.
    """

    def __init__(self, stream: Stream, turn: str) -> None:
        super().__init__(stream, Modes(Mode.NONE, Mode.STREAMED))
        self._turn = turn

    async def _give(self, message: pb.ProcessingRequest) -> None:
        message.metadata_context.filter_metadata["kvreturn"].update({"turn": self._turn})
        message.protocol_config.CopyFrom(self.modes.config())
        await super()._give(message)


class Log:
    """Envoy's access log, of exchanges that are over."""

    def __init__(self, router: Harness) -> None:
        self._messages: asyncio.Queue[StreamAccessLogsMessage | None] = asyncio.Queue()
        context: Any = None
        self.task = asyncio.create_task(router.service.fast.logs(self._read(), context))

    def over(self, *turns: str, broken: bool = True, status: int = 200) -> None:
        """Write a message about these."""
        message = StreamAccessLogsMessage()
        for name in turns:
            entry = message.http_logs.log_entry.add()
            entry.response.response_code.value = status
            entry.common_properties.response_flags = b"\x78\x01" if broken else b""  # downstream_connection_termination
            entry.common_properties.metadata.filter_metadata["kvreturn"].update({"turn": name})
        self._messages.put_nowait(message)

    async def close(self) -> None:
        """The Envoy, or one of its workers, is gone."""
        self._messages.put_nowait(None)
        await self.task

    async def _read(self) -> AsyncIterator[StreamAccessLogsMessage]:
        while message := await self._messages.get():
            yield message


def left(router: Harness) -> Sequence[object]:
    """What is there of exchanges that are under way, or that leaked."""
    fast, world = router.service.fast, router.world
    loads = [node.load for pool in (world.prefill, world.decode) for node in pool.snapshot()]
    counted = (world.admission.live, fast.passing, router.metric("live_streams"), sum(loads))
    return [*filter(None, counted), *fast.named, *router.service.running, *fast._working]
