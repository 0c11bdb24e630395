"""`kvreturn serve` as a process: start, errors, signals, what it writes and how much memory it keeps."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvreturn.analyze.formats import LineReader
from kvreturn.analyze.observation import Measured
from kvreturn.cli.main import main
from kvreturn.core.outcome import Outcome
from support.extproc import Envoy, Modes, Request, Response, body_message, headers_message, request_headers
from support.harness import DECODE
from support.nodes import FakePrefill, chat, decode_events, handle, hangs, replies
from support.serve import Process, fetch, spawn, write
from support.streams import GrpcStream, StreamError

TURN = Request(pieces=[chat("Hi")])
EVENTS = decode_events(params=handle())
END = Response(EVENTS, node=DECODE)
SSE = {":status": "200", "content-type": "text/event-stream"}


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, node: FakePrefill, *options: str, **changes: Any) -> AsyncIterator[Process]:  # noqa: ANN401
    listen = f"unix:{tmp_path}/router.sock"
    pools = {"prefill": [node.address], "decode": [DECODE]}
    config = {"listen": listen, "admin": None, "pools": pools, "prefill": {"via": "direct"}, **changes}
    process = await spawn(write(tmp_path, config), *options)
    try:
        async with grpc.aio.insecure_channel(listen) as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)
        yield Process(process, listen)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
async def node() -> AsyncIterator[FakePrefill]:
    async with FakePrefill() as node:
        yield node


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_an_idle_router_within_the_notice_to_envoy(
    number: signal.Signals, node: FakePrefill, tmp_path: Path
) -> None:
    async with serving(tmp_path, node) as router:
        begun = time.monotonic()
        assert await router.end(number) == 0
        assert time.monotonic() - begun < 2
        assert "Traceback" not in router.stderr
        assert router.stderr.rstrip().endswith("stopped")
        assert not (tmp_path / "router.sock").exists()


async def test_sigterm_lets_a_running_stream_end_and_refuses_new_ones(node: FakePrefill, tmp_path: Path) -> None:
    """field reports 128, 129."""
    async with serving(tmp_path, node, drain_timeout=20) as router, router.channel() as channel:
        envoy = Envoy(GrpcStream(channel), Modes())
        await envoy.request(TURN)
        stream = envoy._stream
        await stream.send(headers_message("response", SSE, node=DECODE))
        await stream.receive()
        router.process.send_signal(signal.SIGTERM)
        async with router.channel() as other:
            check = health_pb2_grpc.HealthStub(other).Check
            for _ in range(100):
                if (await check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
                await asyncio.sleep(0.005)
            else:
                pytest.fail("health stays SERVING")
            await asyncio.sleep(1.1)  # the time that Envoy has to notice
            refused = GrpcStream(other)
            await refused.send(request_headers())
            with pytest.raises(StreamError):
                await refused.receive()
        for event in EVENTS:
            await stream.send(body_message("response", event))
            answer = await stream.receive()
            assert answer
            assert answer.HasField("response_body")
        await stream.half_close()
        assert await stream.receive() is None
        assert await router.ended() == 0
        assert "Traceback" not in router.stderr
        assert "captured=True" in router.stderr


async def test_json_lines_are_json_each_of_them_and_the_analysis_reads_them(tmp_path: Path) -> None:
    async with (
        FakePrefill(replies()) as node,
        serving(tmp_path, node, "--log-format", "json", "--log-level", "debug") as router,
        router.channel() as channel,
    ):
        envoy = Envoy(GrpcStream(channel))
        await envoy.play(TURN, Response(decode_events(params=handle()), node=DECODE))
        await router.end(signal.SIGTERM)
    lines = [json.loads(line) for line in router.stderr.splitlines()]
    assert all({"ts", "level", "logger"} <= line.keys() for line in lines)
    assert [line["message"] for line in lines if "listening" in line.get("message", "")]
    (told,) = [line for line in lines if line["logger"] == "kvreturn.turn"]
    assert (told["outcome"], told["status"], told["prompt"], told["captured"]) == ("first_turn", 200, 114, True)
    assert LineReader().read(json.dumps(told).encode()) == Measured(Outcome.FIRST_TURN, 114, None, 0)


async def test_sigterm_cancels_what_runs_longer_than_it_may(tmp_path: Path) -> None:
    async with (
        FakePrefill(hangs) as node,
        serving(tmp_path, node, drain_timeout=0.3) as router,
        router.channel() as channel,
    ):
        stream = GrpcStream(channel)
        await stream.send(request_headers())
        await stream.send(body_message("request", TURN.pieces[0], end=True))
        await node.arrived.wait()
        begun = time.monotonic()
        assert await router.end(signal.SIGTERM) == 0
        assert time.monotonic() - begun < 2
        assert node.left.is_set()
        assert "Traceback" not in router.stderr
        assert "outcome=cancelled" in router.stderr
        stream.cancel()


async def refused(config: Path, *options: str) -> tuple[int, str]:
    process = await spawn(config, *options)
    out, err = await asyncio.wait_for(process.communicate(), 10)
    assert out == b""
    return process.returncode or 0, err.decode()


POOLS = "pools: {prefill: ['10.0.0.1:8100'], decode: ['10.0.0.2:8200']}\n"
BAD = [
    ("not YAML", "pools: [", "kvreturn.yaml:2: not YAML: "),
    ("a list", "[]", "the file must hold one mapping"),
    ("empty", "", "the file must hold one mapping"),
    ("no pools", "listen: 127.0.0.1:9090\n", "kvreturn.yaml:1: pools: Field required"),
    (
        "a typo",
        POOLS + "lissten: 127.0.0.1:9090\n",
        "kvreturn.yaml:2: lissten: unknown setting; did you mean `listen`?",
    ),
    ("a bad address", POOLS + "listen: '9090'\n", "kvreturn.yaml:2: listen: '9090' is no host:port"),
    (
        "one port twice",
        POOLS + "listen: 127.0.0.1:9091\n",
        "kvreturn.yaml:2: listen and admin: both are 127.0.0.1:9091; give each its own",
    ),
    (
        "workers without a store",
        POOLS + "workers: 2\n",
        "kvreturn.yaml:2: workers: 2 processes need a session store that they share",
    ),
    ("a wrong value", POOLS + "\nproof: maybe\n", "kvreturn.yaml:3: proof: Input should be"),
]


@pytest.mark.parametrize(("text", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_configuration_is_told_by_line_and_ends_the_program(text: str, message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["serve", "--config", str(write(tmp_path, text))])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr


@pytest.mark.parametrize("command", ["serve", "up"])
def test_where_log_lines_are_json_so_is_the_last_one(command: str, tmp_path: Path) -> None:
    path = write(tmp_path, POOLS + "proof: maybe\nlissten: a:1\n")
    result = CliRunner().invoke(main, [command, "--config", str(path), "--log-format", "json"])
    assert result.exit_code == 1
    told = json.loads(result.stderr)
    assert (told["level"], told["logger"]) == ("critical", "kvreturn")
    assert re.fullmatch(f"{path}:2: proof: .*\n{path}:3: lissten: unknown setting.*", told["message"])


async def test_a_missing_file_is_told(tmp_path: Path) -> None:
    code, err = await refused(tmp_path / "none.yaml")
    assert (code, err) == (1, f"Error: {tmp_path}/none.yaml: No such file or directory\n")


@pytest.mark.parametrize("which", ["listen", "admin"])
async def test_a_port_in_use_is_told(which: str, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = "{}:{}".format(*other.getsockname())
        text = f"{POOLS}secret: s\nlisten: unix:{tmp_path}/router.sock\n"
        text = (
            text.replace(f"unix:{tmp_path}/router.sock", address) if which == "listen" else text + f"admin: {address}\n"
        )
        code, err = await refused(write(tmp_path, text if which == "admin" else text + "admin: null\n"))
    assert code == 1
    assert f"Error: cannot listen on {address}" in err
    assert "Traceback" not in err


async def test_what_is_not_safe_is_said_loudly_at_start(node: FakePrefill, tmp_path: Path) -> None:
    async with serving(tmp_path, node) as router:
        await router.end(signal.SIGTERM)
        assert "no secret is configured" in router.stderr
        assert "no tenant_header is configured" in router.stderr
    async with serving(tmp_path, node, secret="s", tenant_header="x-tenant") as router:
        await router.end(signal.SIGTERM)
        assert "WARNING" not in router.stderr


async def test_thousands_of_cancelled_streams_leave_nothing(node: FakePrefill, tmp_path: Path) -> None:
    """field report 124: a handler that swallows its cancellation leaks in grpc's core."""
    port = _unused_port()
    async with serving(tmp_path, node, "--log-level", "warning", admin=f"127.0.0.1:{port}") as router:
        async with router.channel() as channel:
            first = 2_000  # until the allocator has what it needs
            await _cancel(channel, first)
            before = router.resident
            await _cancel(channel, 6_000 - first)
            grown = router.resident - before
        metrics = ""
        async with asyncio.timeout(10):  # the last cancellations are on their way
            while "kvreturn_live_streams 0.0" not in metrics:
                metrics = await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/metrics")
        await router.end(signal.SIGTERM)
    assert grown < 3 << 20
    assert "kvreturn_sessions 0.0" in metrics
    assert 'kvreturn_turns_total{api="chat",model="other",outcome="cancelled"} 6000.0' in metrics
    told = [line for line in router.stderr.splitlines() if "no health check of" not in line]  # there is no such D
    assert len(told) == 2  # the warnings at start


def _unused_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


async def _cancel(channel: grpc.aio.Channel, count: int) -> None:
    """Streams that end after their first message; a few at a time, so that they really begin."""
    message = request_headers(modes=Modes())

    async def worker(n: int) -> None:
        for _ in range(n):
            stream = GrpcStream(channel)
            await stream.send(message)
            await stream.receive()
            stream.cancel()

    await asyncio.gather(*(worker(count // 20) for _ in range(20)))
