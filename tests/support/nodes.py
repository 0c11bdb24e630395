"""vLLM nodes for router tests: what they answer (shapes recorded from vLLM 0.32.0), and a scriptable prefill node."""

import asyncio
import contextlib
import json
import socket
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from kvreturn.core.ports import Ask, Reply
from kvreturn.upstream.client import PrefillClient
from kvreturn.upstream.pool import Pool

JSON = Mapping[str, Any]
COLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_params(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """P's `kv_transfer_params`, for D."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4]],
        "remote_engine_id": "engine-of-p",
        "remote_request_id": "chatcmpl-p",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 114,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
        **changes,
    }


def handle(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """D's `kv_transfer_params`, for the next turn: 160 tokens in 10 blocks, with the kvreturn member."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]],
        "remote_engine_id": "engine-of-d",
        "remote_request_id": "chatcmpl-d",
        "remote_host": "10.0.0.2",
        "remote_port": 5601,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 160,
        "remote_blocks_expiry_time": 2307.4338095069998,
        "transfer_mode": "pull",
        "kvreturn": {
            "v": 1,
            "block_size": 16,
            "scope": b64encode(b"a scope!").decode(),
            "digests": b64encode(bytes(80)).decode(),
            "generated": [7, 8, 9],
            "ttl": 480,
        },
        **changes,
    }


def prefill_body(params: JSON | None = None, *, prompt: int = 114, cached: int = 0) -> bytes:
    """P's answer to the prefill leg."""
    body: dict[str, Any] = {
        "id": "chatcmpl-p",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": " a"}, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt + 1,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
        "kv_transfer_params": prefill_params() if params is None else params,
    }
    return json.dumps(body).encode()


def report(*, proven: int = 160, read: int = 160, local: int = 0, reason: str | None = None) -> dict[str, Any]:
    """What our connector on P says of a handle, as a member of P's parameters."""
    told = {"v": 1, "proven": proven, "read": read, "local": local}
    return {"kvreturn": told if reason is None else {**told, "reason": reason}}


def decode_events(
    text: str = "Good morning", *, params: JSON | None = None, model: str = "m", done: bool = True
) -> list[bytes]:
    """D's streamed chat answer, an event for each word; `params` ride on the terminal event."""

    def event(choice: JSON, **members: object) -> bytes:
        head = {"id": "chatcmpl-d", "object": "chat.completion.chunk", "created": 1795963698, "model": model}
        chunk = {**head, "choices": [{"index": 0, "logprobs": None, **choice}], **members}
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"

    words = [w if i == 0 else " " + w for i, w in enumerate(text.split(" "))]
    events = [event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})]
    events += [event({"delta": {"content": word}, "finish_reason": None}) for word in words]
    last = {} if params is None else {"kv_transfer_params": params}
    events.append(event({"delta": {"content": ""}, "finish_reason": "stop", "stop_reason": None}, **last))
    return [*events, b"data: [DONE]\n\n"] if done else events


def decode_body(text: str = "Good morning", *, params: JSON | None = None, **members: object) -> bytes:
    """D's chat answer in one piece."""
    body: dict[str, Any] = {
        "id": "chatcmpl-d",
        "object": "chat.completion",
        "created": 1795963698,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 114, "total_tokens": 162, "completion_tokens": 48},
        **members,
    }
    if params is not None:
        body["kv_transfer_params"] = params
    return json.dumps(body).encode()


def chat(*contents: str, **members: Any) -> bytes:  # noqa: ANN401 - JSON
    """A client's chat request; messages alternate between user and assistant."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return json.dumps({"model": "m", "messages": messages, **members}).encode()


def sent_params(body: bytes) -> Any:  # noqa: ANN401 - JSON
    """`kv_transfer_params` of a request body, None where it has none."""
    return json.loads(body).get("kv_transfer_params")


def carried_handle(body: bytes) -> Any:  # noqa: ANN401 - JSON
    """The handle that a prefill request carries, sealed (docs/handle-format.md) or as vLLM has it; None if cold."""
    params = sent_params(body)
    if params["remote_block_ids"]:
        return params
    return params.get("kvreturn", {}).get("handle")


Script = Callable[[bytes], Reply]


def answer(body: bytes | None = None, status: int = 200, content_type: str = "application/json") -> Script:
    """A script: always the same answer."""
    reply = prefill_body() if body is None else body
    return lambda _: Reply("10.0.0.1:8100", status, reply, content_type)


def connector(body: bytes) -> Reply:
    """A script: P with our connector, which proves and reads whatever it gets."""
    carried = carried_handle(body)
    told = report(proven=carried["remote_num_tokens"], read=carried["remote_num_tokens"]) if carried else {}
    return Reply("10.0.0.1:8100", 200, prefill_body(prefill_params(**told)))


class StubPrefill(PrefillClient):
    """A prefill client without a socket.

    Attributes:
        script: makes the answers.
        asks: what was asked, in order.
        headers: what was sent with it.
    """

    def __init__(self, script: Script = connector) -> None:
        super().__init__(Pool([], lambda: 0.0), None)
        self.script = script
        self.asks: list[Ask] = []
        self.headers: list[Mapping[str, str]] = []

    async def ask(self, ask: Ask, headers: Mapping[str, str], seconds: float) -> Reply:
        del seconds
        self.asks.append(ask)
        self.headers.append(headers)
        return self.script(ask.body)


@dataclass
class Seen:
    """A request that arrived at a node."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    request: web.Request


Handler = Callable[[Seen], Awaitable[web.StreamResponse]]


def replies(body: bytes | None = None, status: int = 200, headers: JSON | None = None) -> Handler:
    """A handler: always the same answer; without `body`, that of a P with our connector."""

    async def handler(seen: Seen) -> web.StreamResponse:
        text = connector(seen.body).body if body is None else body
        return web.Response(body=text, status=status, headers=headers or {"content-type": "application/json"})

    return handler


@dataclass
class FakePrefill:
    """A node that listens; does what `handler` says, and tells Envoy that it is well.

    Attributes:
        handler: makes the answers.
        address: `host:port`, once it is entered.
        seen: what arrived, in order.
        arrived: set by each request.
        left: set when a peer leaves before it has its answer, as vLLM notices it.
    """

    handler: Handler = field(default_factory=replies)
    address: str = ""
    seen: list[Seen] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._runner
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("user-agent") in {"Envoy/HC", "kvreturn/HC"}:
            return web.Response()
        headers = {k.lower(): v for k, v in request.headers.items()}
        seen = Seen(request.path, headers, await request.read(), request)
        self.seen.append(seen)
        self.arrived.set()
        try:
            return await self.handler(seen)
        except asyncio.CancelledError:
            self.left.set()
            raise


def streams(*pieces: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> Handler:
    """A handler: answers with these pieces, each in a write of its own; of events, unless `headers` say otherwise."""

    async def handler(seen: Seen) -> web.StreamResponse:
        named = headers or {"content-type": "text/event-stream; charset=utf-8"}
        response = web.StreamResponse(status=status, headers=named)
        await response.prepare(seen.request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    return handler


async def hangs(seen: Seen) -> web.StreamResponse:
    """A handler: never answers."""
    del seen
    await asyncio.Event().wait()
    raise AssertionError


async def dies(seen: Seen) -> web.StreamResponse:
    """A handler: closes the connection instead of an answer."""
    assert seen.request.transport
    seen.request.transport.abort()
    return web.Response()


async def dies_midway(seen: Seen) -> web.StreamResponse:
    """A handler: closes the connection after half an answer."""
    body = prefill_body()
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(body))})
    await response.prepare(seen.request)
    await response.write(body[: len(body) // 2])
    assert seen.request.transport
    seen.request.transport.abort()
    return response


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """An address on which every connect is refused: bound, but not listened on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{s.getsockname()[1]}"


def in_turn(*handlers: Handler) -> Handler:
    """A handler: these one after the other, the last one for all that follow."""
    rest: Sequence[Handler] = handlers

    async def handler(seen: Seen) -> web.StreamResponse:
        nonlocal rest
        first, rest = rest[0], rest[1:] or rest
        return await first(seen)

    return handler
