"""`kvreturn serve --workers`: real processes, real signals, a real redis-server."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from support.extproc import Envoy, Modes, Request, body_message, headers_message
from support.harness import DECODE
from support.nodes import FakePrefill, Seen, chat, decode_events, handle, prefill_body, prefill_params, report
from support.redis import Server, needs_redis, server
from support.serve import spawn, write
from support.streams import GrpcStream
from support.turns import d_handle
from support.workers import exists, working

pytestmark = needs_redis
EVENTS = decode_events(params=handle())
SSE = {":status": "200", "content-type": "text/event-stream"}
TENANT = {"x-tenant": "t"}
PROMPT = list(range(1, 151))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def node() -> AsyncIterator[FakePrefill]:
    async with FakePrefill() as node:
        yield node


async def test_any_worker_serves_any_turn_and_all_drain_as_one(
    redis: Server, node: FakePrefill, tmp_path: Path
) -> None:
    async with working(tmp_path, redis, node, drain_timeout=20) as workers:
        await workers.turn(0, "Hi", headers=TENANT)
        await workers.turn(1, "Hi", "Good morning", "And?", headers=TENANT)
        assert 'kvreturn_turns_total{api="chat",model="m",outcome="first_turn"} 1.0' in await workers.metrics(0)
        assert 'kvreturn_turns_total{api="chat",model="m",outcome="hit"} 1.0' in await workers.metrics(1)
        async with grpc.aio.insecure_channel(workers.listens[1]) as channel:
            stream = GrpcStream(channel)
            envoy = Envoy(stream, Modes())
            await envoy.request(Request(pieces=[chat("Hello")], headers={"content-type": "application/json", **TENANT}))
            await stream.send(headers_message("response", SSE, node=DECODE))
            await stream.receive()
            workers.process.send_signal(signal.SIGTERM)
            await workers.see("worker 0 kvreturn stopped")
            for event in EVENTS:
                await stream.send(body_message("response", event))
                answer = await stream.receive()
                assert answer
                assert answer.HasField("response_body")
            await stream.half_close()
            assert await stream.receive() is None
        assert await workers.ended() == 0
    assert workers.lines[-1].endswith("all workers have stopped")
    assert any("worker 1 kvreturn.turn outcome=hit" in line for line in workers.lines)
    assert "Traceback" not in "\n".join(workers.lines)


async def test_a_killed_worker_comes_back_with_the_settings_of_now_and_costs_no_stream_of_others(
    redis: Server, node: FakePrefill, tmp_path: Path
) -> None:
    """And no worker outlives its supervisor."""
    async with working(tmp_path, redis, node) as workers:
        path = tmp_path / "kvreturn.yaml"
        path.write_text(path.read_text() + "proof: 'off'\n")
        async with grpc.aio.insecure_channel(workers.listens[0]) as channel:
            stream = GrpcStream(channel)
            headers = {**TENANT, "content-type": "application/json"}
            await Envoy(stream, Modes()).request(Request(pieces=[chat("Hello")], headers=headers))
            workers.process.send_signal(signal.SIGHUP)
            await workers.see("settings reloaded; changed: proof", 2)
            os.kill(pid := workers.pid(1), signal.SIGKILL)
            await workers.see(rf"worker 1 \(pid {pid}\) was killed by SIGKILL; it is started again in 0")
            await workers.up(1)
            await stream.send(headers_message("response", SSE, node=DECODE))
            assert await stream.receive()
            stream.cancel()
        for i in range(2):
            await workers.turn(i, "Hi", headers=TENANT)
            assert 'outcome="disabled"} 1.0' in await workers.metrics(i)
        assert 'kvreturn_config_reloads_total{result="applied"} 1.0' in await workers.metrics(0)
        path.write_text(path.read_text() + "nonsense: 1\n")
        workers.process.send_signal(signal.SIGHUP)
        line = len(path.read_text().splitlines())
        await workers.see(rf"the settings stay as they were: {path}:{line}: nonsense: unknown setting", 2)
        workers.process.kill()
        async with asyncio.timeout(20):
            while any(exists(workers.pid(i)) for i in range(2)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
    assert sum(line.endswith("kvreturn stopped") for line in workers.lines) == 2


async def test_addresses_in_use_are_a_line_each_before_any_worker_starts(redis: Server, tmp_path: Path) -> None:
    with socket.socket() as one, socket.socket() as other:
        ports = []
        for taken in (one, other):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports.append(taken.getsockname()[1])
        config = {
            "listen": f"127.0.0.1:{ports[0] - 2}",
            "admin": f"127.0.0.1:{ports[1] - 2}",
            "pools": {"prefill": ["10.0.0.1:8100"], "decode": [DECODE]},
            "secret": "s",
            "tenant_header": "x-tenant",
            "store": {"url": redis.url},
            "workers": 2,
        }
        process = await spawn(write(tmp_path, config))
        _, err = await asyncio.wait_for(process.communicate(), 60)
    told = "Address already in use; free it, or choose another one"
    expected = [
        f"Error: cannot listen on 127.0.0.1:{ports[0]} (listen of worker 1): {told}",
        f"cannot listen on 127.0.0.1:{ports[1]} (admin of worker 1): {told}",
    ]
    assert (process.returncode, err.decode().splitlines()) == (1, expected)


async def test_what_no_worker_can_start_with_ends_all(redis: Server, node: FakePrefill, tmp_path: Path) -> None:
    """An exporter that does not exist is found out in the worker."""
    config = {
        "listen": f"unix:{tmp_path}/router",
        "admin": None,
        "pools": {"prefill": [node.address], "decode": [DECODE]},
        "secret": "s",
        "store": {"url": redis.url},
    }
    process = await spawn(write(tmp_path, config), "--workers", "2", OTEL_TRACES_EXPORTER="fax")
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "could not start; its last lines say why" in err.decode()
    assert "OTEL_TRACES_EXPORTER" in err.decode()


class ReturnHangs:
    """P with our connector, which never ends an eager return.

    Attributes:
        began: set once it has one.
    """

    def __init__(self) -> None:
        self.began = asyncio.Event()

    async def __call__(self, seen: Seen) -> web.StreamResponse:
        body = json.loads(seen.body)
        if body.get("prompt") == [1]:  # the router asks whether it could
            return web.json_response({"choices": [{}], "kv_transfer_params": {"remote_block_ids": [[1]]}})
        if seen.path == "/v1/completions":
            self.began.set()
            await asyncio.Event().wait()
        told = prefill_params(**report(proven=0, read=0))
        answer = json.loads(prefill_body(told, prompt=150)) | {"prompt_token_ids": PROMPT}
        return web.json_response(answer)


async def test_a_return_of_a_router_that_died_is_neither_waited_for_nor_trusted(redis: Server, tmp_path: Path) -> None:
    hangs = ReturnHangs()
    held = d_handle([*PROMPT, *range(151, 161)], secret=b"s")
    held["kvreturn"]["generated"] = list(range(151, 162))
    eager: dict[str, Any] = {"return": "eager", "returns": {"wait": 60, "deadline": 90}}
    async with FakePrefill(hangs) as p, working(tmp_path, redis, p, **eager) as workers:
        await workers.turn(0, "Good day", headers=TENANT, params=held)
        await asyncio.wait_for(hangs.began.wait(), 30)
        os.kill(workers.pid(0), signal.SIGKILL)
        begun = time.monotonic()
        await workers.turn(1, "Good day", "Good morning", "And?", headers=TENANT, params=held)
        assert time.monotonic() - begun < 20  # of the 60 that it would wait for one of its own
        await workers.see(r"worker 1 kvreturn.turn outcome=return_failed\(unfinished\)")


async def test_fr118_fr130_many_streams_at_several_workers_each_with_its_own_loop_and_exporter(
    redis: Server, node: FakePrefill, tmp_path: Path
) -> None:
    """Exporters whose threads were started before a fork are dead in the child (opentelemetry-python#3307).

    Loops that share grpc's poller write BlockingIOError (grpc#42357).
    """
    traces: set[str] = set()

    async def collect(request: web.Request) -> web.Response:
        sent = trace_service_pb2.ExportTraceServiceRequest.FromString(await request.read())
        spans = (span for r in sent.resource_spans for s in r.scope_spans for span in s.spans)
        traces.update(span.trace_id.hex() for span in spans)
        return web.Response(body=trace_service_pb2.ExportTraceServiceResponse().SerializeToString())

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    async with TestServer(app, host="127.0.0.1") as collector:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": str(collector.make_url("")),
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
        names = [f"{i + 1:032x}" for i in range(100)]
        async with working(tmp_path, redis, node, environ=environ) as workers:
            parents = [{**TENANT, "traceparent": f"00-{name}-00000000000000ab-01"} for name in names]
            await asyncio.gather(*(workers.turn(i % 2, f"Hello {i}", headers=p) for i, p in enumerate(parents)))
            workers.process.send_signal(signal.SIGTERM)
            assert await workers.ended() == 0  # what was left is exported at the end
    assert traces >= set(names)
    text = "\n".join(workers.lines)
    assert [text.count(f"worker {i} kvreturn.turn outcome=first_turn") for i in range(2)] == [50, 50]
    assert "BlockingIOError" not in text
    assert "Traceback" not in text
