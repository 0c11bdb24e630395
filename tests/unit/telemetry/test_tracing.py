"""Traces: one per turn, joined with the caller's and the nodes', linked from turn to turn, and sent by real OTLP."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvreturn.core.ports import Reply
from kvreturn.telemetry.environment import TelemetryError
from kvreturn.telemetry.tracing import Tracing
from support.extproc import Request, Response
from support.harness import DECODE, Harness, harness
from support.nodes import carried_handle, chat, decode_events, handle, prefill_body, prefill_params, report

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TURN, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
WORDS = ("Hi", "Good morning", "And?", "Good morning", "And then?", "Good morning", "Why?", "Good morning", "Bye")


def prefill(body: bytes) -> Reply:
    """P: 200 tokens of prompt, of which a handle brings 160."""
    told = report() if carried_handle(body) else report(proven=0, read=0)
    return Reply("10.0.0.1:8100", 200, prefill_body(prefill_params(**told), prompt=200))


@pytest.fixture
def traced() -> tuple[Harness, InMemorySpanExporter]:
    """A router whose spans are kept."""
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    router = harness(prefill)
    router.world.tracing = Tracing(provider)
    return router, spans


async def play(router: Harness, turns: int, **headers: str) -> list[Mapping[str, str]]:
    """A conversation. Returns the headers that D got in each turn."""
    got: list[Mapping[str, str]] = []
    for turn in range(turns):
        request = Request(
            pieces=[chat(*WORDS[: 2 * turn + 1])], headers={"content-type": "application/json", **headers}
        )
        envoy = await router.play(request, Response(decode_events(params=handle()), node=DECODE))
        got.append(dict(envoy.upstream.headers or {}))
    return got


def roots(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    return [s for s in spans.get_finished_spans() if s.name == "chat m"]


async def test_a_turn_is_one_trace_with_its_steps(traced: tuple[Harness, InMemorySpanExporter]) -> None:
    router, spans = traced
    await play(router, 1)
    finished = spans.get_finished_spans()
    (root,) = roots(spans)
    assert root.context
    assert sorted(s.name for s in finished) == ["chat m", "decode", "prefill", "store", "take"]
    assert {s.context.trace_id for s in finished if s.context} == {root.context.trace_id}
    assert {s.parent.span_id for s in finished if s.parent} == {root.context.span_id}
    (decode,) = [s for s in finished if s.name == "decode"]
    assert [e.name for e in decode.events] == ["first_token", "terminal_event"]


async def test_it_tells_what_became_of_the_turn(traced: tuple[Harness, InMemorySpanExporter]) -> None:
    router, spans = traced
    await play(router, 2)
    first, second = [dict(r.attributes or {}) for r in roots(spans)]
    assert first["kvreturn.outcome"] == "first_turn"
    assert "kvreturn.tokens.read_back" not in first
    assert {k: second[k] for k in second if k.startswith(("gen_ai", "kvreturn"))} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": False,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 0.0,
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "kvreturn.api": "chat",
        "kvreturn.outcome": "hit",
        "kvreturn.proof": "connector",
        "kvreturn.tokens.prompt": 200,
        "kvreturn.tokens.computed": 40,
        "kvreturn.tokens.read_back": 160,
        "kvreturn.tokens.local": 0,
        "kvreturn.handle.age": 0.0,
        "kvreturn.handle.captured": True,
        "kvreturn.prefill.retries": 0,
        "kvreturn.prefill.fallback": False,
    }


async def test_it_joins_the_callers_trace_and_passes_it_on(traced: tuple[Harness, InMemorySpanExporter]) -> None:
    router, spans = traced
    (to_decode,) = await play(router, 1, traceparent=CALLER)
    by_name = {s.name: s for s in spans.get_finished_spans()}
    root = by_name["chat m"]
    assert root.context
    assert root.parent
    assert (root.context.trace_id, root.parent.span_id) == (TURN, SPAN)
    for headers, leg in ((to_decode, "decode"), (router.stub.headers[0], "prefill")):
        context = by_name[leg].context
        assert context
        assert headers["traceparent"] == f"00-{TURN:032x}-{context.span_id:016x}-01"


async def test_each_turn_links_to_the_one_whose_handle_it_used(
    traced: tuple[Harness, InMemorySpanExporter],
) -> None:
    router, spans = traced
    await play(router, 5)
    turns = roots(spans)
    assert [len(t.links) for t in turns] == [0, 1, 1, 1, 1]
    for before, after in itertools.pairwise(turns):
        assert before.context
        assert after.links[0].context.span_id == before.context.span_id


async def test_an_error_is_one(traced: tuple[Harness, InMemorySpanExporter]) -> None:
    router, spans = traced
    await router.play(Request(pieces=[b"{}"]), Response([], node=DECODE))
    (root,) = [s for s in spans.get_finished_spans() if s.name == "chat"]
    assert root.attributes
    assert root.attributes["error.type"] == "400"
    assert not root.status.is_ok


async def test_no_content_and_no_address_is_in_it(traced: tuple[Harness, InMemorySpanExporter]) -> None:
    router, spans = traced
    await play(router, 2, authorization="Bearer tell-nobody")
    text = "".join(s.to_json() for s in spans.get_finished_spans())
    assert not [w for w in ("Good morning", "tell-nobody", "10.0.0", "engine-of", "chatcmpl") if w in text]


HOSTILE: list[tuple[dict[str, Any], list[bytes]]] = [
    ({"n": 10**30}, decode_events()),
    ({"model": "\ud800"}, decode_events()),
    ({}, [b'data: {"error": {"code": "User 7 said \\ud800 secret things", "message": "secret"}}\n\n']),
    ({}, [b'data: {"choices": [{"index": 1000000000, "delta": {}, "finish_reason": "stop"}]}\n\n']),
]


@pytest.mark.parametrize(("asked", "answered"), HOSTILE, ids=["count", "model", "error", "index"])
async def test_whatever_client_and_node_write_the_exporter_can_send_it(
    asked: dict[str, Any],
    answered: list[bytes],
    traced: tuple[Harness, InMemorySpanExporter],
    caplog: pytest.LogCaptureFixture,
) -> None:
    router, spans = traced
    await router.play(Request(pieces=[chat("Hi", **asked)]), Response(answered, node=DECODE))
    sent = encode_spans(spans.get_finished_spans()).SerializeToString()
    assert not [r for r in caplog.records if r.name.startswith("opentelemetry")]
    assert b"secret" not in sent
    assert len(sent) < 10_000
    assert b'outcome="first_turn"' in router.world.metrics.expose()


async def test_without_tracing_the_callers_trace_goes_to_both_legs() -> None:
    router = harness()
    (to_decode,) = await play(router, 1, traceparent=CALLER)
    assert to_decode["traceparent"] == router.stub.headers[0]["traceparent"] == CALLER


# --- the environment ---


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
    ],
)
def test_the_standard_variables_switch_it_on(environ: dict[str, str], *, on: bool) -> None:
    tracing = Tracing.from_environ(environ)
    assert tracing.on is on
    tracing.shutdown()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "give otlp, console or none"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "give grpc or http/protobuf"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "0"}, "must be a positive integer"),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SPAN_LINK_COUNT_LIMIT": "-1"}, "must be a non-negative integer"),
    ],
)
def test_what_is_not_there_is_said(environ: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)  # the SDK looks there
    with pytest.raises(TelemetryError, match=said):
        Tracing.from_environ(environ)
