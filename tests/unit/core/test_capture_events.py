"""Handles in the streams of `/v1/responses` and `/v1/messages`, and in what goes by another name."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core.api import API, Messages, Responses
from kvreturn.core.capture import Capture, open_capture
from support import cuts
from support.events import event, message_events, response_events, response_object, without_params
from support.turns import compact, d_handle

HANDLE = d_handle(161)
RAW = compact(HANDLE)
SSE = "text/event-stream; charset=utf-8"


def run(api: API, pieces: list[bytes], content_type: str = SSE, limit: int = 1 << 20) -> tuple[bytes, Capture, Any]:
    answer = api.answer()
    capture = open_capture(content_type, answer, event_bytes=limit, response_bytes=limit)
    return b"".join(capture.decode(p) for p in pieces) + capture.flush(), capture, answer


# A stream with the handle in some place, and what the client gets.
started = {"type": "message_start", "message": {"id": "x", "usage": {"input_tokens": 9}, "kv_transfer_params": HANDLE}}
PLACES: dict[str, tuple[API, bytes, bytes]] = {
    "responses": (
        Responses(),
        b"".join(response_events(params=HANDLE)),
        without_params(b"".join(response_events())),
    ),
    "messages": (Messages(), b"".join(message_events(params=HANDLE)), b"".join(message_events())),
    "in the message of the first event": (
        Messages(),
        b"".join([event(started), *message_events()]),
        b"".join(
            [event({"type": "message_start", "message": {"id": "x", "usage": {"input_tokens": 9}}}), *message_events()]
        ),
    ),
    "on another event": (
        Messages(),
        b"".join([*message_events(), event({"type": "message_delta", "kv_transfer_params": HANDLE, "usage": {}})]),
        b"".join([*message_events(), event({"type": "message_delta", "usage": {}})]),
    ),
}


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize(("api", "text", "expected"), PLACES.values(), ids=PLACES)
def test_fr42_fr43_the_handle_is_taken_wherever_it_is(api: API, text: bytes, expected: bytes, line_end: bytes) -> None:
    text, expected = (t.replace(b"\n", line_end) for t in (text, expected))
    for pieces in [[text], cuts.singly(text), cuts.by(97, text)]:
        out, capture, answer = run(api, pieces)
        assert out == expected
        assert (capture.handle, capture.failed, capture.oversize) == (RAW, None, False)
        assert answer.finish_reasons


@given(st.sampled_from([PLACES["responses"], PLACES["messages"]]), st.lists(st.integers(0, 4000), max_size=12))
def test_no_cut_lets_a_handle_through_or_changes_the_answer(
    place: tuple[API, bytes, bytes], offsets: list[int]
) -> None:
    api, text, expected = place
    out, capture, answer = run(api, cuts.at(offsets, text))
    assert (out, capture.handle) == (expected, RAW)
    _, _, whole = run(api, [text])
    assert answer == whole


@given(st.sampled_from([PLACES["responses"], PLACES["messages"]]), st.lists(st.integers(0, 4000), max_size=4))
def test_over_the_limit_it_is_stripped_all_the_same(place: tuple[API, bytes, bytes], offsets: list[int]) -> None:
    api, text, expected = place
    out, capture, _ = run(api, cuts.at(offsets, text), limit=40)
    assert b"remote_engine_id" not in out
    assert out == expected or capture.oversize


@pytest.mark.parametrize("stream", [response_events, message_events])
def test_a_stream_without_a_handle_and_with_pings_passes_byte_for_byte(stream: Callable[[], list[bytes]]) -> None:
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    text = without_params(ping.join(stream()))
    api = Responses() if stream is response_events else Messages()
    for pieces in [[text], cuts.singly(text)]:
        assert run(api, pieces)[0] == text


# --- bodies, and what goes by another name ---

BODY = compact(response_object("Good morning", params=HANDLE))
MISNAMED: dict[str, tuple[str, bytes]] = {
    "events as JSON": ("application/json", b"".join(response_events(params=HANDLE))),
    "events as text": ("text/plain", b"".join(message_events(params=HANDLE))),
    "events as nothing": ("", b": comment\n\n" + b"".join(response_events(params=HANDLE))),
    "JSON as events": (SSE, BODY),
    "JSON as events, with a line's end": (SSE, b"\n" + BODY + b"\n"),
    "a list of objects": ("application/json", b"[" + BODY + b"," + BODY + b"]"),
    "lines of objects": ("application/x-ndjson", BODY + b"\n" + BODY + b"\n"),
}


@pytest.mark.parametrize(("content_type", "text"), MISNAMED.values(), ids=MISNAMED)
def test_a_wrong_content_type_hides_no_handle(content_type: str, text: bytes) -> None:
    for pieces in [[text], cuts.singly(text), cuts.by(61, text)]:
        out, _, _ = run(Responses(), pieces, content_type)
        assert b"kv_transfer_params" not in out
        assert b" morning" in out
        assert b"remote_engine_id" not in out


def test_a_whole_response_is_taken_out_of_its_body() -> None:
    for pieces in [[BODY], *map(list, cuts.in_two(BODY))]:
        out, capture, answer = run(Responses(), pieces, "application/json")
        assert out == without_params(compact(response_object("Good morning")))
        assert (capture.handle, answer.id, answer.finish_reasons) == (RAW, "resp_1", {0: "completed"})
