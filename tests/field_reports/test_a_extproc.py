"""Field reports, section A: Envoy's ext_proc protocol, as far as it shows without a real Envoy.

The rest of the section is about Envoy's configuration, and is tested there: 7, 8, 10, 13, 14, 16, 26, 27, 31, 32.
"""

import asyncio
import gzip
import hashlib
import json
import logging
import time

import pytest

from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from kvreturn.core import capture
from kvreturn.server.exchange import Exchange
from support.extproc import (
    ALL_MODES,
    Mode,
    Modes,
    Request,
    Response,
    body_message,
    headers_message,
    request_headers,
    trailers_message,
)
from support.harness import DECODE, harness, live
from support.nodes import FakePrefill, chat, decode_events, handle, hangs, prefill_params, sent_params
from support.streams import LocalStream

DUPLEX = Modes(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)
SSE = {":status": "200", "content-type": "text/event-stream"}
TURN = Request(pieces=[chat("Hi")])
END = Response(decode_events(params=handle()), node=DECODE)
PLAIN = b"".join(decode_events())


async def received(stream: LocalStream) -> list[pb.ProcessingResponse]:
    """All answers up to the end of the stream."""
    answers = []
    while (answer := await stream.receive()) is not None:
        answers.append(answer)
    return answers


def streamed(answers: list[pb.ProcessingResponse], kind: str = "request_body") -> list[pb.StreamedBodyResponse]:
    """The full duplex body answers of one direction."""
    bodies = [getattr(a, kind) for a in answers if a.WhichOneof("response") == kind]
    return [b.response.body_mutation.streamed_response for b in bodies]


async def test_001_full_duplex_bodies_are_answered_by_streamed_response_and_others_by_body() -> None:
    modes = Modes(Mode.FULL_DUPLEX_STREAMED, Mode.STREAMED)
    envoy = await harness().play(TURN, END, modes)
    requests = [a.request_body.response.body_mutation for a in envoy.answers if a.HasField("request_body")]
    responses = [a.response_body.response.body_mutation for a in envoy.answers if a.HasField("response_body")]
    assert {m.WhichOneof("mutation") for m in requests} == {"streamed_response"}
    assert {m.WhichOneof("mutation") for m in responses} == {None, "body"}


async def test_002_a_second_end_of_stream_is_ignored() -> None:
    router = harness()
    stream = LocalStream(router.service)
    await stream.send(request_headers(modes=DUPLEX))
    await stream.send(body_message("request", chat("Hi"), end=True))
    await stream.send(body_message("request", b"d", end=True))
    await stream.half_close()
    answers = await received(stream)  # which raises if the stream does not end with OK
    assert len(router.asks) == 1
    bodies = streamed(answers)
    assert [b.end_of_stream for b in bodies] == [True]
    assert json.loads(bodies[0].body)["kv_transfer_params"] == prefill_params()


async def test_003_an_empty_message_may_end_the_body() -> None:
    router = harness()
    stream = LocalStream(router.service)
    await stream.send(request_headers(modes=DUPLEX))
    await stream.send(body_message("request", chat("x" * 39)))
    await stream.send(body_message("request", b"", end=True))
    await stream.half_close()
    bodies = streamed(await received(stream))
    assert json.loads(b"".join(b.body for b in bodies))["messages"][0]["content"] == "x" * 39
    assert bodies[-1].end_of_stream


async def test_004_large_bodies_go_in_several_answers() -> None:
    router = harness()
    frame = len(chat("")) + len(b', "kv_transfer_params":' + json.dumps(prefill_params()).encode()) - 1
    stream = LocalStream(router.service)
    await stream.send(request_headers(modes=DUPLEX))
    body = chat("x" * (200_000 - frame))
    await stream.send(body_message("request", body, end=True))
    await stream.half_close()
    bodies = streamed(await received(stream))
    assert [len(b.body) for b in bodies] == [62_000, 62_000, 62_000, 14_000]
    assert [b.end_of_stream for b in bodies] == [False, False, False, True]
    spliced = body[:-1] + b',"kv_transfer_params":' + json.dumps(prefill_params()).encode() + b"}"
    assert hashlib.sha256(b"".join(b.body for b in bodies)).digest() == hashlib.sha256(spliced).digest()


LENGTHS = {"grows": (chat("Hi"), 1), "shrinks": (chat("Hi", kv_transfer_params={"pad": "x" * 1000}), -1)}


@pytest.mark.parametrize("case", LENGTHS)
async def test_005_content_length_is_set_in_buffered_mode_only(case: str) -> None:
    body, _ = LENGTHS[case]
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    for modes in ALL_MODES:
        envoy = await harness().play(Request(pieces=[body], headers=headers), END, modes)
        assert envoy.upstream.headers
        length = str(len(envoy.upstream.body)) if modes.request == Mode.BUFFERED else None
        assert envoy.upstream.headers.get("content-length") == length


async def test_006_mutated_bodies_differ_in_length_both_ways() -> None:
    """A test of 005 with bodies of one length could not fail."""
    for body, sign in LENGTHS.values():
        envoy = await harness().play(Request(pieces=[body]), END)
        assert (len(envoy.upstream.body) - len(body)) * sign > 0


async def test_009_trailers_end_a_response_behind_its_last_bytes() -> None:
    router = harness()
    envoy = router.envoy(DUPLEX)
    await envoy.request(TURN)
    stream = envoy._stream
    assert isinstance(stream, LocalStream)
    await stream.send(headers_message("response", SSE))
    await stream.send(body_message("response", b"".join(decode_events(params=handle(), done=False))[:-2]))
    await stream.send(trailers_message("response"))
    await stream.half_close()
    answers = await received(stream)
    kinds = [a.WhichOneof("response") for a in answers]
    assert kinds == ["response_headers", "response_body", "response_body", "response_trailers"]
    assert b"".join(b.body for b in streamed(answers, "response_body")) == b"".join(decode_events(done=False))[:-2]
    assert not any(b.end_of_stream for b in streamed(answers, "response_body"))
    assert router.handles == 1


async def test_011_only_raw_value_is_written_and_both_forms_are_read() -> None:
    """What is written is checked by the kit for every message of every test; here, what is read."""
    for form in ("raw_value", "value"):
        router = harness()
        message = request_headers(x_bytes="\xff", modes=Modes())
        if form == "value":
            for header in message.request_headers.headers.headers:
                if header.key != "x-bytes":
                    header.value, header.raw_value = header.raw_value.decode(), b""
        stream = LocalStream(router.service)
        await stream.send(message)
        await stream.receive()
        await stream.send(body_message("request", chat("Hi"), end=True))
        answer = await stream.receive()
        assert answer
        options = answer.request_body.response.header_mutation.set_headers
        assert {o.header.key for o in options} == {"x-request-id", "content-length"}
        assert all(o.header.raw_value and o.header.value == "" for o in options)
        assert all(o.append_action == o.OVERWRITE_IF_EXISTS_OR_ADD for o in options)
        assert len(router.asks) == 1
        stream.cancel()


async def test_012_the_headers_are_answered_once_the_body_is_read() -> None:
    router = harness()
    stream = LocalStream(router.service)
    body = chat("Hi")
    await stream.send(request_headers(modes=DUPLEX))
    await stream.send(body_message("request", body[:10]))
    await asyncio.sleep(0.01)
    assert stream._received.empty()
    await stream.send(body_message("request", body[10:], end=True))
    headers, first = await stream.receive(), await stream.receive()
    assert headers
    assert headers.request_headers.response.clear_route_cache
    metadata = headers.dynamic_metadata.fields["kvreturn"].struct_value.fields
    assert metadata["decode_node"].string_value == DECODE
    assert first
    assert first.HasField("request_body")
    assert not first.request_body.response.HasField("header_mutation")
    stream.cancel()


@pytest.mark.parametrize(("policy", "status"), [("fallback", 200), ("error", 504)])
async def test_015_a_node_that_never_answers_is_given_up_in_time(policy: str, status: int) -> None:
    hung = FakePrefill(hangs)
    async with hung, live(hung, prefill={"via": "direct", "timeout": 1, "on_failure": policy}) as router:
        begun = time.monotonic()
        envoy = await router.play(TURN, END, DUPLEX)
        assert time.monotonic() - begun < 1.5
        assert envoy.client.status == status
        assert policy == "error" or sent_params(envoy.upstream.body) is None


async def test_015_a_handler_that_raises_is_an_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def raises(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Exchange, "_request_body", raises)
    begun = time.monotonic()
    envoy = await harness().play(TURN, END, DUPLEX)
    assert time.monotonic() - begun < 0.2
    assert envoy.client.status == 500


async def test_017_a_failure_in_mid_response_lets_the_rest_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(text: bytes) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(capture, "strip_body", raises)
    events = decode_events("a b c d e f g", params=handle())
    events.insert(2, events.pop(-2))  # the third of ten is the one that has to be parsed
    plain = decode_events("a b c d e f g")
    plain.insert(2, plain.pop(-2))
    assert len(events) == 10
    for modes in ALL_MODES:
        router = harness()
        envoy = await router.play(TURN, Response(events), modes)
        assert envoy.client.body == b"".join(plain)
        assert not envoy.answered
        assert router.metric("capture_failures_total") == 1
        assert router.handles == 0


async def test_018_no_mode_is_overridden_where_full_duplex_is_configured() -> None:
    requests = [TURN, Request("/v1/models", method="GET"), Request("/upload", [b"x"], headers={"content-type": "a/b"})]
    for modes in ALL_MODES:
        for request in requests:
            envoy = await harness().play(request, END, modes)
            assert not (modes.duplex and any(a.HasField("mode_override") for a in envoy.answers))


async def test_019_an_empty_response_is_ended() -> None:
    router = harness()
    envoy = router.envoy(DUPLEX)
    await envoy.request(TURN)
    stream = envoy._stream
    await stream.send(headers_message("response", {":status": "204"}))
    await stream.receive()
    await stream.send(body_message("response", b"", end=True))
    answer = await asyncio.wait_for(stream.receive(), 0.05)
    assert answer
    (body,) = streamed([answer], "response_body")
    assert (body.body, body.end_of_stream) == (b"", True)
    stream.cancel()


async def test_021_a_request_without_a_body_is_answered_at_once() -> None:
    for modes in ALL_MODES:
        router = harness()
        stream = LocalStream(router.service)
        await stream.send(request_headers(Request("/v1/models", method="GET"), modes=modes))
        answer = await asyncio.wait_for(stream.receive(), 0.05)
        assert answer
        assert answer.HasField("request_headers")
        assert (router.asks, router.records) == ([], 0)
        stream.cancel()


@pytest.mark.parametrize("status", [200, 400])
async def test_023_compressed_responses(status: int) -> None:
    headers = {"content-type": "application/json", "accept-encoding": "gzip, br"}
    body = b"".join(decode_events(params=handle()))
    packed = gzip.compress(body)
    pieces = [packed[:7], packed[7:20], packed[20:]]
    for modes in ALL_MODES:
        router = harness()
        response = Response(pieces, status, {"content-type": "text/event-stream", "content-encoding": "gzip"})
        envoy = await router.play(Request(pieces=TURN.pieces, headers=headers), response, modes)
        assert envoy.upstream.headers
        assert "accept-encoding" not in envoy.upstream.headers
        assert envoy.client.headers
        assert "content-encoding" not in envoy.client.headers
        assert envoy.client.body == PLAIN


async def test_024_a_body_over_the_limit_is_refused() -> None:
    for modes in ALL_MODES:
        router = harness(limits={"request_bytes": 1 << 20})
        body = b"x" * 1_048_577
        pieces = [body[i : i + 65_536] for i in range(0, len(body), 65_536)]
        envoy = await router.play(Request(pieces=pieces), END, modes)
        assert envoy.client.status == 413
        assert router.asks == []
        assert router.service.running == set()


async def test_025_the_limit_is_checked_as_the_body_grows() -> None:
    stream = LocalStream(harness(limits={"request_bytes": 1 << 20}).service)
    await stream.send(request_headers(modes=DUPLEX))
    for _ in range(5):
        await stream.send(body_message("request", b"x" * 200_000))
    await asyncio.sleep(0.01)
    assert stream._received.empty()
    await stream.send(body_message("request", b"x" * 200_000))
    answer = await stream.receive()
    assert answer
    assert answer.immediate_response.status.code == 413


async def test_028_forbidden_headers_are_never_touched() -> None:
    """The kit fails on any of them, for every message of every test; here, where a client sends all of them."""
    headers = {"content-type": "application/json", "x-envoy-upstream-alt-stat-name": "x", "host": "llm.example"}
    for modes in ALL_MODES:
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/models"):
            envoy = await harness().play(Request(path, [chat("Hi", input="Hi")], headers=headers), END, modes)
            assert envoy.upstream.headers
            assert headers.keys() <= envoy.upstream.headers.keys()
            assert envoy.upstream.headers[":authority"] == "llm.example"


async def test_029_a_reset_after_the_last_answer_is_a_good_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    router = harness()
    envoy = router.envoy()
    await envoy.request(TURN)
    await envoy.respond(END)
    stream = envoy._stream
    assert isinstance(stream, LocalStream)
    stream.cancel()
    await asyncio.wait([stream.task])
    assert router.handles == 1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "error=" not in caplog.text
    assert router.metric("turns_incomplete_total") == 0


async def test_030_a_stream_that_ends_before_the_terminal_event_leaves_nothing() -> None:
    for modes in ALL_MODES:
        router = harness()
        envoy = router.envoy(modes)
        await envoy.request(TURN)
        stream = envoy._stream
        assert isinstance(stream, LocalStream)
        await stream.send(headers_message("response", SSE))
        for event in decode_events("a b c d e f g", params=handle())[:2]:
            await stream.send(body_message("response", event))
        await asyncio.sleep(0)
        await stream.receive()
        stream.cancel()
        await asyncio.wait([stream.task])
        assert router.records == 0
        assert router.metric("turns_incomplete_total") == 1
        assert router.metric("turn_errors_total", type="incomplete") == 1
