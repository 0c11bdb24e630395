"""A real Envoy with our bootstrap, and its peers: an ext_proc server that does as told, nodes that record requests."""

import asyncio
import contextlib
import io
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import grpc.aio
from aiohttp import web

from kvreturn._proto.envoy.config.core.v3.base_pb2 import HeaderValueOption
from kvreturn._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from kvreturn.config import Settings
from kvreturn.envoy.bootstrap import build, to_dict
from kvreturn.envoy.names import EXT_PROC_FILTER
from kvreturn.envoy.runner import EnvoyProcess

_FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_REPLACE = HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_CHUNK = 62_000
Json = dict[str, Any]


# Below the ports that the system hands out (from 32768 on), or a connection could take one before its server does; each
# test process begins elsewhere, since Envoys share a port without a word.
_PORTS = itertools.cycle(range(10_000, 32_000))
for _ in range(os.getpid() * 5_501 % 22_000):
    next(_PORTS)


def unused_address() -> str:
    """A TCP address on which nobody listens, another one each time; nor where a router there listens for calls."""
    for port in _PORTS:
        with socket.socket() as s, socket.socket() as calls, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            calls.bind(("127.0.0.1", port - 1000))
            return f"127.0.0.1:{port}"
    raise AssertionError


@dataclass
class Node:
    """A node whose answer is its own name.

    Attributes:
        healthy: how it answers health checks.
        status: of all other answers.
        gate: answers go on after their first byte when it is set.
        requests: what it was sent, with the body.
    """

    name: str
    address: str = ""
    healthy: bool = True
    status: int = 200
    gate: asyncio.Event | None = None
    requests: list[tuple[web.Request, bytes]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer anything."""
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if request.headers.get("upgrade") == "websocket":
            return await self._echo(request)
        self.requests.append((request, await request.read()))
        if not self.gate:
            return web.Response(text=self.name, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(self.name[:1].encode())
        await self.gate.wait()
        await response.write_eof(self.name[1:].encode())
        return response

    async def _echo(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        async for message in ws:
            await ws.send_str(f"{self.name} {message.data}")
        return ws


@contextlib.asynccontextmanager
async def serving(*nodes: Node) -> AsyncIterator[None]:
    """Let nodes serve; one that has no address yet gets one."""
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", node.handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            node.address = node.address or unused_address()
            host, _, port = node.address.rpartition(":")
            await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        yield


@dataclass
class Router:
    """An ext_proc server.

    Attributes:
        listen: its address once it serves.
        node: the decode node that it names, if any.
        rewrite: makes the new request body of the old one.
        delay: seconds before it answers a request body.
        abort: end every stream with an error.
        calls: the messages of each stream.
    """

    listen: str = ""
    node: str | None = None
    rewrite: Callable[[bytes], bytes] = lambda body: body
    delay: float = 0.0
    abort: bool = False
    calls: list[list[pb.ProcessingRequest]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Serve on `listen`, or on an address of the system's choice."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        service = grpc.method_handlers_generic_handler(
            "envoy.service.ext_proc.v3.ExternalProcessor", {"Process": handler}
        )
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port(self.listen or "127.0.0.1:0")
        self.listen = self.listen or f"127.0.0.1:{port}"
        await server.start()
        try:
            yield
        finally:
            await server.stop(0)

    def paths(self) -> list[str]:
        """The `:path` of each call, as it arrived."""
        headers = [call[0].request_headers.headers.headers for call in self.calls]
        return [h.raw_value.decode() for hs in headers for h in hs if h.key == ":path"]

    async def _process(
        self, requests: AsyncIterator[pb.ProcessingRequest], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.ProcessingResponse]:
        if self.abort:
            await context.abort(grpc.StatusCode.INTERNAL, "told so")
        call: list[pb.ProcessingRequest] = []
        self.calls.append(call)
        body = bytearray()
        async for message in requests:
            call.append(message)
            modes = call[0].protocol_config
            kind = message.WhichOneof("request")
            if kind == "request_headers" and modes.request_body_mode == _FULL_DUPLEX:
                continue  # answered once the body is there
            if kind == "request_body":
                body += message.request_body.body
                if not message.request_body.end_of_stream:
                    continue
                await asyncio.sleep(self.delay)
                for answer in self._request(self.rewrite(bytes(body)), modes):
                    yield answer
            else:
                yield _passed_on(message, modes)

    def _request(self, body: bytes, modes: pb.ProtocolConfiguration) -> list[pb.ProcessingResponse]:
        if modes.request_body_mode == _FULL_DUPLEX:
            answers = [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]
            for start in range(0, len(body), _CHUNK):
                answer = pb.ProcessingResponse()
                streamed = answer.request_body.response.body_mutation.streamed_response
                streamed.body, streamed.end_of_stream = body[start : start + _CHUNK], start + _CHUNK >= len(body)
                answers.append(answer)
        else:
            answer = pb.ProcessingResponse()
            answer.request_body.response.body_mutation.body = body
            length = answer.request_body.response.header_mutation.set_headers.add(append_action=_REPLACE)
            length.header.key, length.header.raw_value = "content-length", str(len(body)).encode()
            answers = [answer]
        if self.node is not None:
            answers[0].dynamic_metadata.update({"kvreturn": {"decode_node": self.node}})
        return answers


def _passed_on(message: pb.ProcessingRequest, modes: pb.ProtocolConfiguration) -> pb.ProcessingResponse:
    answer = pb.ProcessingResponse()
    kind = message.WhichOneof("request")
    assert kind
    getattr(answer, kind).SetInParent()
    if kind == "response_body" and modes.response_body_mode == _FULL_DUPLEX:
        streamed = answer.response_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = message.response_body.body, message.response_body.end_of_stream
    return answer


@dataclass
class Gateway:
    """A running Envoy.

    Attributes:
        settings: what its bootstrap was made of.
        envoy: the process.
        client: talks to the client listener.
        prefill: talks to the prefill listener.
        log: its lines.
    """

    settings: Settings
    envoy: EnvoyProcess
    client: aiohttp.ClientSession
    prefill: aiohttp.ClientSession
    log: list[str]

    async def ask(self, body: bytes = b"{}", headers: dict[str, str] | None = None) -> tuple[int, str]:
        """POST a completion; status and text of the answer."""
        async with self.client.post("/v1/completions", data=io.BytesIO(body), headers=headers) as response:
            return response.status, await response.text()


@contextlib.asynccontextmanager
async def gateway(
    router: str,
    decode: list[str],
    prefill: list[str] | None = None,
    *,
    change: Callable[[Json], object] = lambda _: None,
    **envoy: object,
) -> AsyncIterator[Gateway]:
    """Run Envoy with our bootstrap.

    Args:
        router: address of the ext_proc server.
        decode: addresses of the decode nodes.
        prefill: addresses of the prefill nodes.
        change: edits the bootstrap.
        envoy: settings of that section.
    """
    listens = {name: unused_address() for name in ("listen", "prefill_listen", "admin")}
    pools = {"decode": decode, "prefill": prefill or decode}
    ours = {"lane": "portable", **listens, **envoy}  # what is here in a router's place speaks ext_proc only
    settings = Settings.model_validate({"listen": router, "admin": None, "pools": pools, "envoy": ours})
    bootstrap = to_dict(build(settings))
    change(bootstrap)
    log: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        process = EnvoyProcess(bootstrap, sink=lambda _, line: log.append(line), concurrency=1)
        await stack.enter_async_context(process)
        urls = (settings.envoy.listen, settings.envoy.prefill_listen)
        client, through = [await stack.enter_async_context(aiohttp.ClientSession(f"http://{u}")) for u in urls]
        yield Gateway(settings, process, client, through, log)


def client_manager(bootstrap: Json) -> Json:
    """The HTTP connection manager of the client listener."""
    listener: Json = bootstrap["static_resources"]["listeners"][0]
    manager: Json = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def client_ext_proc(bootstrap: Json) -> Json:
    """The ext_proc filter's configuration there."""
    filters = client_manager(bootstrap)["http_filters"]
    config: Json = next(f["typed_config"] for f in filters if f["name"] == EXT_PROC_FILTER)
    inner: Json = config.get("extension_config", {}).get("typed_config", config)  # the fast lane's is in a matcher
    return inner


def scripts(bootstrap: Json) -> list[Json]:
    """The sources of the client listener's scripts."""
    configs = [f["typed_config"] for f in client_manager(bootstrap)["http_filters"]]
    return [config["default_source_code"] for config in configs if "default_source_code" in config]


async def raw(address: str, request: str) -> tuple[int, str]:
    """Send a request byte for byte; status and text of the answer."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split(b" ")[1]), body.decode()
