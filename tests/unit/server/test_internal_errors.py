"""Something raises inside: the client gets an error or the rest of its answer, never silence, never the handle."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import grpc
import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from kvreturn.core.capture import StreamCapture
from kvreturn.core.turn import Turn
from kvreturn.server import service
from kvreturn.server.record import TurnRecord
from kvreturn.server.request import RequestSide
from kvreturn.server.response import ResponseSide
from kvreturn.server.world import World
from support.extproc import (
    ALL_MODES,
    Kind,
    Mode,
    Modes,
    Request,
    Response,
    body_message,
    headers_message,
    trailers_message,
)
from support.harness import DECODE, Harness, harness
from support.nodes import COLD, StubPrefill, chat, decode_body, decode_events, handle, prefill_body
from support.streams import LocalStream

TURN = Request(pieces=[chat("Hi")])
KINDS: tuple[Kind, ...] = ("request", "response")
EVENTS = decode_events("a b c d e f g", params=handle())  # ten events


def fails(error: BaseException) -> Callable[..., Any]:
    def method(*_: object, **__: object) -> None:
        raise error

    return method


REQUEST_PHASE: list[tuple[type, str]] = [
    (World, "scope"),
    (RequestSide, "open"),
    (RequestSide, "add"),
    (RequestSide, "forward"),
    (Turn, "request"),
    (StubPrefill, "ask"),
    (TurnRecord, "forwarded"),
]


@pytest.mark.parametrize(
    "error", [RuntimeError("planted"), asyncio.CancelledError()], ids=["raises", "cancelled inside"]
)
@pytest.mark.parametrize(("owner", "method"), REQUEST_PHASE, ids=[f"{o.__name__}.{m}" for o, m in REQUEST_PHASE])
async def test_fr125_a_failure_before_the_response_is_a_500(
    owner: type, method: str, error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cancellation that nobody asked for would otherwise leave Envoy waiting (grpc#29248)."""
    monkeypatch.setattr(owner, method, fails(error))
    for modes in ALL_MODES:
        router = harness()
        begun = asyncio.get_running_loop().time()
        envoy = await router.play(TURN, Response(EVENTS), modes)
        assert asyncio.get_running_loop().time() - begun < 2.0  # and not for ever
        assert envoy.client.status == 500
        assert envoy.client.headers
        assert envoy.client.headers["content-type"] == "application/json"
        assert json.loads(envoy.client.body)["error"] == {
            "message": "kvreturn: internal error",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        assert router.records == 0
        if owner is not World:  # that one makes the turn
            assert router.outcomes().get("cancelled", 0) == 0
    assert "an exchange failed" in caplog.text


async def test_a_failure_while_response_headers_are_read_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnRecord, "responded", fails(RuntimeError("planted")))
    for modes in ALL_MODES:
        envoy = await harness().play(TURN, Response(EVENTS), modes)
        assert envoy.client.status == 500
        assert b"internal error" in envoy.client.body


async def test_a_failure_while_an_event_is_read_leaves_the_rest_of_the_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is left is a slower stripper, so that the handle does not pass."""
    monkeypatch.setattr(StreamCapture, "_event", fails(RuntimeError("planted")))
    for modes in ALL_MODES:
        router = harness()
        envoy = await router.play(TURN, Response(EVENTS, node=DECODE), modes)
        assert envoy.client.body == b"".join(decode_events("a b c d e f g"))
        assert envoy.client.ended
        assert router.handles == 0
        assert router.metric("capture_failures_total") == 1
    assert "planted" not in caplog.text


async def test_a_failure_while_a_turn_is_settled_leaves_the_rest_of_the_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Turn, "settle", fails(RuntimeError("planted")))
    for modes in ALL_MODES:
        router = harness()
        envoy = await router.play(TURN, Response(EVENTS, node=DECODE), modes)
        assert envoy.client.body == b"".join(decode_events("a b c d e f g"))
        assert router.records == 0
        assert router.metric("capture_failures_total") == 1
    assert caplog.text.count("could not settle a turn") == len(ALL_MODES)


async def test_a_failure_behind_the_first_byte_cuts_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """No immediate response then (envoy#23652): Envoy resets the client's stream on an error."""
    for modes in ALL_MODES:
        router = harness()
        envoy = router.envoy(modes)
        await envoy.request(TURN)
        with monkeypatch.context() as patch:
            patch.setattr(ResponseSide, "body", fails(RuntimeError("planted")))
            await envoy.respond(Response(EVENTS))
        assert envoy.failed is grpc.StatusCode.INTERNAL
        assert envoy.client.status == 200
        assert not envoy.client.ended
        assert router.records == 0
        assert router.metric("turns_incomplete_total") == 1


STORE: list[tuple[str, Callable[..., Any]]] = [
    ("RuntimeError", fails(RuntimeError("planted"))),
    ("timeout", lambda *_: asyncio.sleep(3600)),
]


@pytest.mark.parametrize(("kind", "broken"), STORE, ids=[s[0] for s in STORE])
@pytest.mark.parametrize("method", ["take", "put"])
async def test_a_store_that_fails_makes_turns_cold_and_nothing_else(
    method: str,
    kind: str,
    broken: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rule 4."""
    router: Harness = harness(store={"deadline": 0.2})  # the default may be over before a busy machine looks
    monkeypatch.setattr(router.world.store, method, broken)
    begun = asyncio.get_running_loop().time()
    with caplog.at_level(logging.WARNING):
        first = await router.turn("Hi")
        second = await router.turn("Hi", "Good morning", "And?")
    assert asyncio.get_running_loop().time() - begun < 2.0  # and not for ever
    assert first.client.status == second.client.status == 200
    assert second.client.body == b"".join(decode_events())
    lost = {"take": {"store_unavailable": 2}, "put": {"first_turn": 1, "not_a_continuation": 1}}
    assert router.outcomes() == lost[method]
    assert router.metric("store_errors_total", operation=method, kind=kind) == 2
    assert f"store {method} failed: {kind}" in caplog.text
    assert "planted" not in caplog.text  # a store's error may tell an address with a password


MESSAGES = [
    *(
        headers_message("request", {":method": method, ":path": path}, end=end)
        for method in ("POST", "GET")
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
        for end in (False, True)
    ),
    *(
        headers_message("response", {":status": status, "content-type": content_type}, end=end, node=node)
        for status in ("200", "400", "204", "")
        for content_type in ("text/event-stream", "application/json", "")
        for end, node in ((False, DECODE), (True, "nonsense"))
    ),
    *(
        body_message(kind, data, end=end)
        for kind in KINDS
        for data in (
            b"",
            b"{}",
            *TURN.pieces,
            TURN.pieces[0][:20],
            *EVENTS[-3:],
            decode_body(params=handle()),
            chat("Hi", kv_transfer_params=COLD),
            prefill_body(),
            b"x" * 999,
        )
        for end in (False, True)
    ),
    *(trailers_message(kind) for kind in KINDS),
]


@hypothesis.settings(max_examples=300, deadline=None)
@given(
    first=st.sampled_from(MESSAGES),
    rest=st.lists(st.sampled_from(MESSAGES), max_size=10),
    modes=st.builds(Modes, st.sampled_from(Mode.values()), st.sampled_from(Mode.values()), st.booleans()),
    role=st.sampled_from(["gateway", "prefill", "decode"]),
)
def test_no_order_of_messages_makes_it_raise(
    *, first: pb.ProcessingRequest, rest: list[pb.ProcessingRequest], modes: Modes, role: str
) -> None:
    """Whatever Envoy, a newer Envoy or something else sends: no exception, and an end."""

    async def play() -> None:
        router = harness(limits={"request_bytes": 900, "event_bytes": 300, "response_bytes": 400})
        opening = pb.ProcessingRequest()
        opening.CopyFrom(first)
        opening.protocol_config.CopyFrom(modes.config())
        stream = LocalStream(router.service, role)
        for message in (opening, *rest):
            await stream.send(message)
        await stream.half_close()
        with mock.patch.object(service.log, "exception", side_effect=AssertionError):
            while await asyncio.wait_for(stream.receive(), 1):
                pass
        assert router.metric("live_streams") == 0

    asyncio.run(play())
