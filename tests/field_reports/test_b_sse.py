"""Section B of the field reports: server-sent events and responses. One test by number and case."""

import json
import time
from typing import Any

import pytest

from kvreturn.core.api import Chat
from kvreturn.core.api.base import Usage
from kvreturn.core.capture import StreamCapture
from support import corpus, cuts
from support.official import client_of
from support.turns import Drive, Json, compact, d_handle, request

HANDLE = d_handle(161)
RAW = compact(HANDLE)


def event(obj: Json | bytes) -> bytes:
    return b"data: " + (obj if isinstance(obj, bytes) else compact(obj)) + b"\n\n"


def chunk(content: str | None = None, finish: str | None = None, **more: Any) -> Json:  # noqa: ANN401 - JSON
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}], **more}


def run(*pieces: bytes, limit: int = 4 << 20) -> tuple[bytes, StreamCapture]:
    capture = StreamCapture(Chat().answer(), limit)
    return b"".join(capture.decode(p) for p in pieces) + capture.flush(), capture


THREE = event(chunk("你好 🌍")) + event(chunk("!")) + event(chunk(None, "stop", kv_transfer_params=HANDLE))
THREE_LEFT = event(chunk("你好 🌍")) + event(chunk("!")) + event(chunk(None, "stop"))
DONE = event(b"[DONE]")


def test_fr33_event_split_at_every_byte() -> None:
    for pieces in cuts.in_two(THREE):
        out, capture = run(*pieces)
        assert out == THREE_LEFT
        assert capture.handle == RAW


def test_fr34_a_character_split_over_pieces() -> None:
    text = THREE.replace(b"\\u4f60\\u597d \\ud83c\\udf0d", "你好 🌍".encode())
    at = text.index(b"\xf0\x9f") + 2
    out, _ = run(text[:at], text[at:])
    assert "你好 🌍".encode() in out
    assert "\ufffd" not in out.decode()
    assert out == text.replace(b',"kv_transfer_params":' + RAW, b"")


@pytest.mark.parametrize("line_end", [b"\r\n", b"\r"])
def test_fr35_other_line_ends_cut_inside_the_blank_line(line_end: bytes) -> None:
    text, left = (t.replace(b"\n", line_end) for t in (THREE + DONE, THREE_LEFT + DONE))
    for at in range(len(text)):
        if text[at : at + 1] in b"\r\n":
            capture = StreamCapture(Chat().answer(), 1 << 20)
            out = capture.decode(text[:at])
            assert len(out) + capture._decoder.pending <= at
            assert capture._decoder.pending <= len(event(chunk(None, "stop", kv_transfer_params=HANDLE))) + 8
            assert out + capture.decode(text[at:]) + capture.flush() == left
            assert capture.handle == RAW


def test_fr36_no_space_after_the_colon() -> None:
    out, capture = run(b'data:{"choices":[],"kv_transfer_params":{"remote_engine_id":"e"}}\n\n' + DONE)
    assert capture.handle == b'{"remote_engine_id":"e"}'
    assert out == DONE
    out, _ = run(b'data:{"choices":[1],"kv_transfer_params":{"remote_engine_id":"e"}}\n\n')
    assert out == b'data:{"choices":[1]}\n\n'


def test_fr37_comments_pass_and_are_no_data() -> None:
    text = event(chunk("a")) + b": OPENROUTER PROCESSING\n\n" + event(chunk(None, "stop")) + b":\n\n"
    out, capture = run(*cuts.singly(text))
    assert out == text
    assert capture.failed is None
    assert capture._answer.finish_reasons == {0: "stop"}


def test_fr38_an_event_that_is_dropped_takes_its_blank_line_along() -> None:
    alone = event({"id": "c", "object": "chat.completion.chunk", "choices": [], "kv_transfer_params": HANDLE})
    for line_end in (b"\n", b"\r\n"):
        text = (event(chunk("Hi", "stop")) + alone + DONE).replace(b"\n", line_end)
        expected = (event(chunk("Hi", "stop")) + DONE).replace(b"\n", line_end)
        for pieces in cuts.in_two(text):
            assert run(*pieces)[0] == expected
        with client_of(expected) as client:
            stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
            assert [c.choices[0].delta.content for c in stream] == ["Hi"]


USAGE = {"id": "c", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


@pytest.mark.parametrize(
    "text",
    [
        event(chunk(None, "stop", kv_transfer_params=HANDLE)) + event(USAGE),
        event(chunk(None, "stop")) + event(USAGE | {"kv_transfer_params": HANDLE}),
        event(chunk(None, "stop")) + event(USAGE) + event({"choices": [], "kv_transfer_params": HANDLE}),
    ],
    ids=["finish", "usage", "own event"],
)
def test_fr39_handle_and_usage_are_found_wherever_they_are(text: bytes) -> None:
    out, capture = run(event(chunk("Hi")), text, DONE)
    assert out == event(chunk("Hi")) + event(chunk(None, "stop")) + event(USAGE) + DONE
    assert capture.handle == RAW
    assert (capture._answer.usage.prompt, capture._answer.usage.completion) == (9, 2)


def test_fr40_a_terminal_chunk_may_hold_the_last_delta() -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    last = {"id": "c", "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    out, capture = run(event(last | {"kv_transfer_params": HANDLE}) + DONE)
    assert out == event(last) + DONE
    assert capture.handle == RAW
    # A handle on a chunk whose finish reason is null is one all the same.
    assert run(event(chunk("x", kv_transfer_params=HANDLE)))[1].handle == RAW


@pytest.mark.parametrize("before", [b"", event(chunk("H"))])
def test_fr41_an_error_event_leaves_nothing_in_the_store(before: bytes) -> None:
    text = before + event({"error": {"code": 500, "message": "x"}}) + DONE
    drive = Drive(request("Hello", stream=True))
    put, out, _ = drive.respond(text, stream=True)
    assert out == text
    assert put is None
    assert drive.turn.answer.error == "500"


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete", "response.failed"])
def test_fr42_the_handle_of_a_responses_event_is_one_level_down(kind: str) -> None:
    def text(more: Json) -> bytes:
        obj = {"type": kind, "response": {"id": "r1", "status": "x", **more}, "sequence_number": 9}
        return f"event: {kind}\n".encode() + event(obj)

    with_it, without = text({"kv_transfer_params": HANDLE}), text({})
    for pieces in cuts.in_two(with_it):
        out, capture = run(*pieces)
        assert out == without
        assert capture.handle == RAW


@pytest.mark.parametrize("path", corpus.files("data/streams/messages_*.sse"))
def test_fr43_events_of_the_messages_api_keep_together(path: Any) -> None:  # noqa: ANN401 - a path
    text = path.read_bytes()
    pinged = text.replace(b"event: message_delta", b'event: ping\ndata: {"type": "ping"}\n\nevent: message_delta')
    assert run(*cuts.by(64, pinged))[0] == pinged
    at = text.rindex(b'"message_stop"') + len(b'"message_stop"')
    out, capture = run(*cuts.by(64, text[:at] + b',"kv_transfer_params":' + RAW + text[at:]))
    assert out == text
    assert capture.handle == RAW


def test_fr44_usage_is_merged_count_by_count() -> None:
    # Shown in OpenAI's names; the Messages API brings others.
    usage = Usage()
    usage.read({"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 100}})
    usage.read({"completion_tokens": 7})
    assert (usage.prompt, usage.cached, usage.completion) == (20, 100, 7)


def test_fr45_very_long_lists_of_blocks() -> None:
    handle = compact(d_handle(161, proof=False, remote_block_ids=[list(range(24_576))]))
    text = event(chunk(None, "stop"))[:-3] + b',"kv_transfer_params":' + handle + b"}\n\n"
    begun = time.process_time()
    out, capture = run(*cuts.by(16 << 10, text))
    assert time.process_time() - begun < 0.2  # 50 ms proposed; a shared machine is given more
    assert out == event(chunk(None, "stop"))
    assert capture.handle == handle


def test_fr45_an_event_of_5_mib_under_a_limit_of_4() -> None:
    # Policy: it passes as it comes, less the handle, which is lost.
    filler = b',"x":"' + b"y" * (5 << 20) + b'"'
    text = event(chunk(None, "stop"))[:-3] + b',"kv_transfer_params":' + RAW + filler + b"}\n\n"
    out, capture = run(*cuts.by(64 << 10, text), DONE)
    assert out == event(chunk(None, "stop"))[:-3] + filler + b"}\n\n" + DONE
    assert capture.oversize
    assert capture.handle is None


def test_fr46_a_complete_event_goes_on_before_the_next_message() -> None:
    capture = StreamCapture(Chat().answer(), 1 << 20)
    text = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
    assert len(text) == 58
    assert capture.decode(text) == text
    assert capture.decode(text[:30]) == b""
    assert capture.decode(text[30:]) == text


def test_fr47_no_final_newline() -> None:
    text = event(chunk("a", "stop")) + b"data: [DONE]"
    assert run(text)[0] == text
    tail = b'data: {"choices":[1],"kv_transfer_params":' + RAW + b"}"
    out, capture = run(tail)
    assert out == b'data: {"choices":[1]}'
    assert capture.handle == RAW


def test_fr48_malformed_json_passes_and_the_handle_behind_it_is_found() -> None:
    broken = b'data: {"choices":[{]\n\n' + event({"usage": "many", "choices": [{"index": "x"}]})
    out, capture = run(broken, THREE)
    assert out == broken + THREE_LEFT
    assert capture.handle == RAW
    assert capture.failed is None


def test_fr49_several_data_lines() -> None:
    _, capture = run(b'data: {"kv_transfer_params":\ndata: {"a":1}}\n\n')
    assert capture.handle == b'{"a":1}'
    out, capture = run(b'id: 1\ndata: {"choices":[1],"kv_transfer_params":\ndata: {"a":1}}\nretry: 2\n\n')
    assert out == b'id: 1\ndata: {"choices":[1]}\nretry: 2\n\n'
    assert json.loads(capture.handle or b"") == {"a": 1}


def test_fr52_a_status_of_200_is_no_success() -> None:
    failed = event({"type": "response.failed", "response": {"id": "r1", "error": {"code": "server_error"}}})
    for text in (failed, event(chunk("a")) + event({"error": {"type": "InternalServerError"}})):
        drive = Drive(request("Hello", stream=True))
        put, out, _ = drive.respond(text, stream=True)
        assert out == text
        assert put is None
