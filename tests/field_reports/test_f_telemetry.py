"""Section F of the field reports: OpenTelemetry. Number 118 is with the workers."""

import asyncio
import logging
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvreturn.core.ports import Failure, Reply
from kvreturn.telemetry.tracing import Tracing
from support.extproc import Envoy, Request, Response
from support.harness import DECODE, Harness, harness
from support.messages import body_message, headers_message
from support.nodes import Script, answer, chat, decode_events, handle, prefill_body
from support.otlp import collector
from support.streams import LocalStream

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
JSON = {"content-type": "application/json"}
TURN = Request(pieces=[chat("Hi")])
END = Response(decode_events(params=handle()), node=DECODE)
SSE = {"content-type": "text/event-stream"}


def traced(script: Script | None = None, **changes: Any) -> tuple[Harness, InMemorySpanExporter]:  # noqa: ANN401
    """A router whose spans are kept."""
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    router = harness(script, **changes) if script else harness(**changes)
    router.world.tracing = Tracing(provider)
    return router, spans


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [s for s in spans.get_finished_spans() if s.name == name]


def error(span: ReadableSpan) -> object:
    """The span's error; it and the status say the same."""
    kind = (span.attributes or {}).get("error.type")
    assert span.status.is_ok is (kind is None)
    return kind


async def cut(envoy: Envoy) -> None:
    """The client leaves, and Envoy resets the stream."""
    stream = envoy._stream
    assert isinstance(stream, LocalStream)
    stream.cancel()
    await asyncio.wait([stream.task])


async def test_fr112_streams_that_are_cancelled_end_their_spans_and_detach_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    router, spans = traced()
    caplog.set_level(logging.ERROR)
    for _ in range(100):
        envoy = router.envoy()
        await envoy.request(TURN)
        await cut(envoy)
    assert not router.service.running
    assert len(named(spans, "chat")) == 100  # no node has answered to the model's name
    assert len(named(spans, "decode")) == 100
    assert "detach" not in caplog.text


async def test_fr113_the_parent_is_in_the_requests_headers_not_in_the_calls() -> None:
    router, spans = traced()
    await router.play(Request(pieces=[chat("Hi")], headers={**JSON, "traceparent": CALLER}), END)
    (root,) = named(spans, "chat m")
    assert root.context
    assert root.parent
    assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"


async def test_fr114_both_legs_get_the_trace_and_a_span_of_their_own() -> None:
    router, _ = traced()
    request = Request(pieces=[chat("Hi")], headers={**JSON, "traceparent": CALLER, "tracestate": "a=b"})
    envoy = await router.play(request, END)
    to_decode, to_prefill = envoy.upstream.headers or {}, router.stub.headers[0]
    found = [re.fullmatch(r"00-(\w{32})-(\w{16})-01", h["traceparent"]) for h in (to_decode, to_prefill)]
    assert [f and f[1] for f in found] == ["0af7651916cd43dd8448eb211c80319c"] * 2
    assert len({f[2] for f in found if f} | {"b7ad6b7169203331"}) == 3
    assert to_decode["tracestate"] == to_prefill["tracestate"] == "a=b"


def unanswered(failure: Failure) -> Script:
    def script(body: bytes) -> Reply:
        del body
        return Reply("10.0.0.1:8100", failure=failure)

    return script


FAILED_LEGS: list[tuple[Script, str]] = [
    (answer(b"{}", 503), "503"),
    (unanswered(Failure.TIMEOUT), "timeout"),
    (unanswered(Failure.CONNECT), "connect"),
]


@pytest.mark.parametrize(("failed", "kind"), FAILED_LEGS, ids=[f[1] for f in FAILED_LEGS])
async def test_fr115_a_failed_prefill_leg_is_an_error(failed: Script, kind: str) -> None:
    scripts = iter([failed, answer()])

    def script(body: bytes) -> Reply:
        return next(scripts)(body)

    router, spans = traced(script)
    await router.play(TURN, END)
    assert [error(s) for s in named(spans, "prefill")] == [kind, None]
    assert error(named(spans, "chat m")[0]) is None  # the client got its answer
    assert (named(spans, "chat m")[0].attributes or {})["kvreturn.prefill.retries"] == 1


ERRORS: list[tuple[str, Response, str]] = [
    ("D refuses", Response([b"{}"], 503, JSON), "503"),
    ("in the stream", Response([b'data: {"error": {"code": 500, "message": "x"}}\n\n'], headers=SSE), "500"),
]


@pytest.mark.parametrize(("response", "kind"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
async def test_fr115_a_failed_decode_leg_is_an_error(response: Response, kind: str) -> None:
    router, spans = traced()
    await router.play(TURN, response)
    (decode,), (root,) = named(spans, "decode"), [s for s in spans.get_finished_spans() if s.name.startswith("chat")]
    assert (error(decode), error(root)) == (kind, kind)
    assert (decode.attributes or {})["http.response.status_code"] == response.status


async def test_fr115_a_stream_that_is_cut_is_an_error() -> None:
    router, spans = traced()
    envoy = router.envoy()
    await envoy.request(TURN)
    await envoy._stream.send(headers_message("response", {":status": "200", **SSE}, node=DECODE))
    for event in decode_events()[:2]:
        await envoy._stream.send(body_message("response", event))
        await envoy._stream.receive()
    await cut(envoy)
    (decode,), (root,) = named(spans, "decode"), named(spans, "chat m")
    assert (error(decode), error(root)) == ("incomplete", "incomplete")
    assert (root.attributes or {})["gen_ai.response.finish_reasons"] == ("error",)


def config(folder: Path) -> Path:
    path = folder / "kvreturn.yaml"
    plain = {
        "listen": f"unix:{folder}/router.sock",
        "admin": None,
        "pools": {"prefill": ["127.0.0.1:1"], "decode": ["127.0.0.1:1"]},
        "drain_timeout": 0.1,
    }
    path.write_text(yaml.safe_dump(plain))
    return path


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_fr116_a_collector_that_never_answers_does_not_hold_up_the_end(protocol: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:  # the kernel accepts, nobody reads
        environ = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{hole.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        }
        command = [sys.executable, "-m", "kvreturn.cli.main", "serve", "--config", str(config(tmp_path))]
        with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as router:
            assert router.stderr
            while "listening" not in router.stderr.readline():
                assert router.poll() is None
            router.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            assert router.wait(15) == 0
            assert time.monotonic() - begun < 0.1 + 6
            assert "Traceback" not in router.stderr.read()


async def test_fr117_a_slow_collector_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    async with collector("http/protobuf") as slow:
        slow.delay = 2.0
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", slow.endpoint)
        tracing = Tracing.from_environ(os.environ)
        router = harness()
        router.world.tracing = tracing
        gaps: list[float] = []
        for i in range(40):
            begun = time.perf_counter()
            await asyncio.sleep(0.005)
            gaps.append(time.perf_counter() - begun - 0.005)
            if i % 4 == 0:
                await router.turn(f"Hi {i}")
        await slow.until(lambda: bool(slow.spans))
        # An exporter in the way would hold the loop for 2 s with each turn; a busy machine makes a gap now and then.
        assert statistics.median(gaps) < 0.02
        assert max(gaps) < 1.0
        slow.delay = 0.0
        await asyncio.to_thread(tracing.shutdown)
    assert len([s for s in slow.spans if s.name == "chat m"]) == 10


async def test_fr119_a_thousand_model_names_are_few_series() -> None:
    router = harness(models={"m": {}})
    for i in range(1000):
        await router.play(Request(pieces=[chat("Hi", model=f"name {i}")]), Response([b"{}"], 404, JSON))
    text = router.world.metrics.expose().decode()
    assert set(re.findall(r'kvreturn_turns_total\{.*model="([^"]*)"', text)) == {"other"}
    assert "name 7" not in text


async def test_fr121_a_choice_that_was_cut_has_error_for_its_reason() -> None:
    router, spans = traced()
    chunk = b'data: {"id":"c","choices":[{"index":%d,"delta":{"content":"x"},"finish_reason":%s}]}\n\n'
    pieces = [chunk % (0, b"null"), chunk % (1, b"null"), chunk % (0, b'"stop"')]
    await router.play(Request(pieces=[chat("Hi", n=2, stream=True)]), Response(pieces, headers=SSE))
    (root,) = named(spans, "chat m")
    assert (root.attributes or {})["gen_ai.response.finish_reasons"] == ("stop", "error")


async def test_fr122_cached_tokens_are_part_of_the_input() -> None:
    """P counts what was cached; D, which has the whole prompt from P, would call all of it cached (field report 67)."""
    router, spans = traced(lambda _: Reply("10.0.0.1:8100", 200, prefill_body(prompt=150, cached=100)))
    usage = {
        "input_tokens": 20,
        "cache_read_input_tokens": 100,
        "cache_creation_input_tokens": 30,
        "output_tokens": 5,
    }
    body = b'{"type":"message","role":"assistant","content":[],"stop_reason":"end_turn","usage":%s}'
    request = b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"Hi"}]}'
    answer = Response([body % str(usage).replace("'", '"').encode()], headers=JSON, node=DECODE)
    await router.play(Request("/v1/messages", [request]), answer)
    told = named(spans, "chat m")[0].attributes or {}
    assert {k: v for k, v in told.items() if k.startswith(("gen_ai.usage", "gen_ai.request.max"))} == {
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": 150,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 100,
        "gen_ai.usage.cache_write.input_tokens": 30,
    }


async def test_fr123_without_variables_nobody_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def connect(self: socket.socket, address: object) -> None:
        del self
        tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", connect)
    tracing = Tracing.from_environ({})
    router = harness()
    router.world.tracing = tracing
    await router.turn("Hi")
    tracing.shutdown()
    assert not tracing.on
    assert tried == []
