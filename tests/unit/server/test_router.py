"""The router as a server: sockets, health, limits, drain; over real gRPC, in this process."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvreturn.server import app
from kvreturn.server.app import ListenError, running
from kvreturn.server.service import SERVICE
from support.calls import Script
from support.extproc import ALL_MODES, Envoy, Mode, Modes, Request, Response, body_message, request_headers
from support.harness import DECODE, Harness, settings
from support.nodes import FakePrefill, Seen, chat, decode_events, handle, hangs, replies, sent_params
from support.streams import GrpcStream, StreamError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TURN = Request(pieces=[chat("Hi")])
END = Response(decode_events(params=handle()), node=DECODE)


def unused_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@pytest.fixture
async def node() -> AsyncIterator[FakePrefill]:
    async with FakePrefill() as node:
        yield node


def channel(address: str) -> grpc.aio.Channel:
    """Envoy's gRPC client has no limits of its own."""
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    return grpc.aio.insecure_channel(address, options=unlimited)


async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    check = health_pb2_grpc.HealthStub(channel).Check
    response = await check(health_pb2.HealthCheckRequest(service=service), timeout=1)
    status: int = response.status
    return status


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_turns_over_a_socket(kind: str, node: FakePrefill, tmp_path: Path) -> None:
    listen = f"127.0.0.1:{unused_port()}" if kind == "tcp" else f"unix:{tmp_path}/router.sock"
    config = settings(listen=listen, pools={"prefill": [node.address], "decode": [DECODE]})
    async with running(config) as router, channel(listen) as c:
        assert router.port == (int(listen.rpartition(":")[2]) if kind == "tcp" else 0) or kind == "unix"
        for modes in ALL_MODES:
            envoy = Envoy(GrpcStream(c), modes)
            await envoy.play(TURN, END)
            assert envoy.client.body == b"".join(decode_events())
            assert sent_params(envoy.upstream.body)
        assert await health(c) == SERVING
        assert await health(c, SERVICE) == SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await health(c, "another")


async def test_a_body_of_five_mib_fits_into_one_message(node: FakePrefill, tmp_path: Path) -> None:
    """gRPC's own limit is 4 MiB, and BUFFERED bodies come in one message."""
    listen = f"unix:{tmp_path}/router"
    config = settings(listen=listen, pools={"prefill": [node.address], "decode": [DECODE]})
    body = chat("x" * (5 << 20))
    async with running(config), channel(listen) as c:
        for mode in (Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED):
            pieces = [body[i : i + (64 << 10)] for i in range(0, len(body), 64 << 10)]
            envoy = Envoy(GrpcStream(c), Modes(mode))
            await envoy.play(Request(pieces=pieces), END)
            assert envoy.upstream.body.startswith(body[:-1])
            assert len(envoy.upstream.body) > len(body)


async def test_a_body_over_the_limit_is_a_413_also_in_one_message(node: FakePrefill, tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/router"
    pools = {"prefill": [node.address], "decode": [DECODE]}
    config = settings(listen=listen, pools=pools, limits={"request_bytes": 5 << 20})
    async with running(config), channel(listen) as c:
        envoy = Envoy(GrpcStream(c), Modes())
        await envoy.play(Request(pieces=[b"x" * ((5 << 20) + 1)]), END)
        assert envoy.client.status == 413


async def test_admin_serves_metrics_and_health(node: FakePrefill, tmp_path: Path) -> None:
    listen, admin = f"unix:{tmp_path}/router", f"127.0.0.1:{unused_port()}"
    config = settings(listen=listen, admin=admin, pools={"prefill": [node.address], "decode": [DECODE]})
    async with running(config), channel(listen) as c, aiohttp.ClientSession(f"http://{admin}") as http:
        await Envoy(GrpcStream(c), Modes()).play(TURN, END)
        async with http.get("/metrics") as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/plain")
            assert 'kvreturn_turns_total{api="chat",model="m",outcome="first_turn"} 1.0' in await response.text()
        async with http.get("/healthz") as response:
            assert (response.status, await response.text()) == (200, "ok\n")
        async with http.get("/") as response:
            assert response.content_type == "text/html"
        async with http.get("/nothing") as response:
            assert response.status == 404


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_scripts_call_it_where_the_settings_say(
    kind: str, node: FakePrefill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, told: bool
) -> None:
    monkeypatch.setattr(app, "_NOTICE", 0.0)
    listen = f"127.0.0.1:{unused_port()}" if kind == "tcp" else f"unix:{tmp_path}/router"
    there = {"tcp": f"127.0.0.1:{unused_port()}", "unix": f"unix:{tmp_path}/called"}[kind] if told else None
    config = settings(listen=listen, calls=there, pools={"prefill": [node.address], "decode": [DECODE]})
    assert config.calls_listen == (there or config.calls_of(listen))
    for _ in range(2):  # the second one finds what the first has left of a Unix socket
        async with running(config) as router, web_client(config.calls_listen) as http:
            script = Script(Harness(config), http, router._calls)
            turn = (await script.request(TURN)).meta["turn"]
            assert await script.part(turn, f"1 1 200,0,{DECODE}", b"".join(decode_events(params=handle()))) == 200
            assert router.world.metrics.value("kvreturn_handles_captured_total") == 1
            async with http.get("/kvreturn/health") as health:
                assert health.status == 200


def web_client(address: str) -> aiohttp.ClientSession:
    if not address.startswith("unix:"):
        return aiohttp.ClientSession(f"http://{address}")
    connector = aiohttp.UnixConnector(address.removeprefix("unix:"))
    return aiohttp.ClientSession("http://router", connector=connector)


async def test_a_drain_lets_calls_end_and_waits_for_the_parts_of_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_NOTICE", 0.05)
    arrived, answer = asyncio.Event(), asyncio.Event()

    async def waits(seen: Seen) -> web.StreamResponse:
        arrived.set()
        await answer.wait()
        return await replies()(seen)

    async with FakePrefill(waits) as node:
        config = settings(listen=f"unix:{tmp_path}/router", pools={"prefill": [node.address], "decode": [DECODE]})
        async with running(config) as router, web_client(config.calls_listen) as http:
            script = Script(Harness(config), http, router._calls)
            call = asyncio.create_task(script.request(TURN))
            await arrived.wait()
            drain = asyncio.create_task(router.drain(5))
            await asyncio.sleep(0.1)
            async with http.get("/kvreturn/health") as health:
                assert health.status == 503
            assert router.streams == 1
            answer.set()
            turn = (await call).meta["turn"]
            await asyncio.sleep(0.05)
            assert not drain.done()
            assert await script.part(turn, f"1 1 200,0,{DECODE}", b"".join(decode_events(params=handle()))) == 200
            await asyncio.wait_for(drain, 1)
            assert router.world.metrics.value("kvreturn_handles_captured_total") == 1
            with pytest.raises(aiohttp.ClientConnectionError):
                await script.request(TURN)


async def test_a_drain_ends_a_call_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_NOTICE", 0.05)
    async with FakePrefill(hangs) as node:
        config = settings(listen=f"unix:{tmp_path}/router", pools={"prefill": [node.address], "decode": [DECODE]})
        async with web_client(config.calls_listen) as http:
            async with running(config) as router:
                call = asyncio.create_task(Script(Harness(config), http, router._calls).request(TURN))
                await node.arrived.wait()
                begun = time.monotonic()
                await router.drain(0.2)
            assert time.monotonic() - begun < 1
            await asyncio.wait_for(node.left.wait(), 1)
            with pytest.raises(aiohttp.ClientConnectionError):
                await call
            assert router.world.admission.live == router.streams == 0


@pytest.mark.parametrize("taken", ["listen", "calls", "admin"])
async def test_a_port_in_use_is_told_by_its_address(taken: str, node: FakePrefill) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = "{}:{}".format(*other.getsockname())
        ports = {"listen": f"127.0.0.1:{unused_port()}", "admin": None, taken: address}
        config = settings(**ports, pools={"prefill": [node.address], "decode": [DECODE]})
        with pytest.raises(ListenError, match=rf"cannot listen on {address} \({taken}\): Address already in use"):
            async with running(config):
                pass


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_an_address_in_use_by_another_router_is_neither_shared_nor_taken_over(
    kind: str, node: FakePrefill, tmp_path: Path
) -> None:
    """With SO_REUSEPORT both would get some of the streams; a Unix socket's path would be the second one's alone."""
    listen = f"127.0.0.1:{unused_port()}" if kind == "tcp" else f"unix:{tmp_path}/router"
    config = settings(listen=listen, pools={"prefill": [node.address], "decode": [DECODE]})
    async with running(config), channel(listen) as c:
        with pytest.raises(ListenError, match=r"\(listen\): Address already in use"):
            async with running(config):
                pass
        assert await health(c) == SERVING


async def test_a_socket_that_a_killed_router_left_is_no_hindrance(node: FakePrefill, tmp_path: Path) -> None:
    path = tmp_path / "router"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    assert path.is_socket()
    config = settings(listen=f"unix:{path}", pools={"prefill": [node.address], "decode": [DECODE]})
    async with running(config), channel(f"unix:{path}") as c:
        assert await health(c) == SERVING


async def test_a_burst_of_connections_waits_in_line_while_the_router_is_busy(node: FakePrefill) -> None:
    """Linux drops those that find no place, and the peer tries again after a second."""
    calls = unused_port()
    config = settings(calls=f"127.0.0.1:{calls}", pools={"prefill": [node.address], "decode": [DECODE]})
    async with running(config):
        with contextlib.ExitStack() as stack:
            for _ in range(500):  # none of which the event loop, which this test holds up, accepts meanwhile
                stack.enter_context(socket.create_connection(("127.0.0.1", calls), timeout=0.8))


async def test_a_drain_lets_streams_end_and_takes_no_new_ones(
    node: FakePrefill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health fails first, so that Envoy stops sending here before streams are refused (field report 129)."""
    monkeypatch.setattr(app, "_NOTICE", 0.1)
    listen = f"unix:{tmp_path}/router"
    config = settings(listen=listen, pools={"prefill": [node.address], "decode": [DECODE]}, drain_timeout=5)
    async with running(config) as router, channel(listen) as c, channel(listen) as other:
        running_turn = Envoy(GrpcStream(c), Modes())
        await running_turn.request(TURN)
        drain = asyncio.create_task(router.drain(5))
        await asyncio.sleep(0.03)
        assert await health(other) == NOT_SERVING
        late = Envoy(GrpcStream(c), Modes())  # in the time of notice streams are still taken
        await late.request(TURN)
        await late.respond(END)
        await late.finish()
        assert late.client.status == 200
        await asyncio.sleep(0.15)
        refused = GrpcStream(other)
        await refused.send(request_headers())
        with pytest.raises(StreamError) as e:
            await refused.receive()
        assert e.value.code is grpc.StatusCode.UNAVAILABLE
        assert not drain.done()
        await running_turn.respond(END)
        await running_turn.finish()
        assert running_turn.client.body == b"".join(decode_events())
        await asyncio.wait_for(drain, 1)


async def test_a_drain_ends_in_time_whatever_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_NOTICE", 0.05)
    listen = f"unix:{tmp_path}/router"
    async with FakePrefill(hangs) as node:
        config = settings(listen=listen, pools={"prefill": [node.address], "decode": [DECODE]}, drain_timeout=0.2)
        async with channel(listen) as c:
            async with running(config):
                stream = GrpcStream(c)
                await stream.send(request_headers())
                await stream.send(body_message("request", TURN.pieces[0], end=True))
                await node.arrived.wait()
                begun = time.monotonic()
            assert time.monotonic() - begun < 1
            await asyncio.wait_for(node.left.wait(), 0.2)
            await stream.receive()  # the answer to the headers
            with pytest.raises(StreamError):
                await stream.receive()


async def test_a_drain_gives_envoy_a_second_to_notice_and_is_quick_beyond_that(
    node: FakePrefill, tmp_path: Path
) -> None:
    """Until Envoy's health check sees it, it still sends streams: refusing them at once would be errors to clients."""
    config = settings(listen=f"unix:{tmp_path}/router", pools={"prefill": [node.address], "decode": [DECODE]})
    async with running(config):
        begun = time.monotonic()
    assert 1.0 <= time.monotonic() - begun < 1.3


async def test_fr127_a_handler_that_aborts_is_waited_for(
    node: FakePrefill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Server.stop` does not wait for the rest of a handler that called `abort` (grpc#37239)."""
    monkeypatch.setattr(app, "_NOTICE", 0.05)
    closed = []
    listen = f"unix:{tmp_path}/router"
    config = settings(listen=listen, pools={"prefill": [node.address], "decode": [DECODE]}, drain_timeout=0.3)
    async with channel(listen) as c:
        async with running(config) as router:
            plain = router._service._take

            async def aborts(*args: object) -> None:
                try:
                    await args[2].abort(grpc.StatusCode.INTERNAL, "planted")  # type: ignore[attr-defined]
                finally:
                    await asyncio.sleep(0.3)
                    closed.append(True)

            monkeypatch.setattr(router._service, "_take", aborts)
            stream = GrpcStream(c)
            await stream.send(request_headers())
            with pytest.raises(StreamError):
                await stream.receive()
            monkeypatch.setattr(router._service, "_take", plain)
        assert closed == [True]
