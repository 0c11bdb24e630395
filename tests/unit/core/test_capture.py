import json
import random
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core import capture as module
from kvreturn.core.api import Chat, Completions
from kvreturn.core.capture import BodyCapture, StreamCapture, open_capture, strip_body
from kvreturn.core.jsontext import JSONTextError
from support import corpus, cuts
from support.official import client_of
from support.turns import Json, compact, d_handle

HANDLE = d_handle(161)
RAW = compact(HANDLE)
MEMBER = b',"kv_transfer_params":' + RAW
DONE = b"data: [DONE]\n\n"


def chunk(content: str | None = None, finish: str | None = None, **more: Any) -> Json:  # noqa: ANN401 - JSON
    delta = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]} | more


def event(obj: Json | bytes) -> bytes:
    return b"data: " + (obj if isinstance(obj, bytes) else compact(obj)) + b"\n\n"


USAGE = {"id": "c", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}}
TEXT = event(chunk("")) + event(chunk('He said: "kv_transfer_params"')) + event(chunk(" {你好 🌍}"))
FINISH = event(chunk(finish="stop"))
# The handle on the finish chunk, on the usage chunk, and in an event of its own, in whatever order; and what is left.
PLACES: dict[str, tuple[bytes, bytes]] = {
    "on the finish chunk": (
        TEXT + event(chunk(finish="stop", kv_transfer_params=HANDLE)) + event(USAGE) + DONE,
        TEXT + FINISH + event(USAGE) + DONE,
    ),
    "in the middle of the finish chunk": (
        TEXT + event({"kv_transfer_params": HANDLE, **chunk(finish="stop")}) + DONE,
        TEXT + FINISH + DONE,
    ),
    "on the usage chunk": (
        TEXT + FINISH + event(USAGE | {"kv_transfer_params": HANDLE}) + DONE,
        TEXT + FINISH + event(USAGE) + DONE,
    ),
    "in its own event": (
        TEXT + FINISH + event(USAGE) + event({"id": "c", "choices": [], "kv_transfer_params": HANDLE}) + DONE,
        TEXT + FINISH + event(USAGE) + DONE,
    ),
    "in its own event, without choices": (
        TEXT + FINISH + event({"kv_transfer_params": HANDLE}) + DONE,
        TEXT + FINISH + DONE,
    ),
    "in its own event, before a comment": (
        TEXT
        + FINISH
        + b": keep-alive\n\n"
        + event({"kv_transfer_params": HANDLE, "usage": None})
        + b": end\n\n"
        + DONE,
        TEXT + FINISH + b": keep-alive\n\n: end\n\n" + DONE,
    ),
    "in its own event, with more blank lines behind it": (
        TEXT + FINISH + event({"kv_transfer_params": HANDLE}) + b"\n\n\n" + DONE,
        TEXT + FINISH + DONE,
    ),
    "at the very end": (
        TEXT + FINISH + event({"kv_transfer_params": HANDLE}),
        TEXT + FINISH,
    ),
}
FORMS = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}


def streaming(limit: int = 1 << 20) -> StreamCapture:
    return StreamCapture(Chat().answer(), limit)


def run(pieces: Sequence[bytes], limit: int = 1 << 20) -> tuple[bytes, StreamCapture]:
    capture = streaming(limit)
    return b"".join(capture.decode(p) for p in pieces) + capture.flush(), capture


# --- where the handle may be ---


@pytest.mark.parametrize("line_end", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_the_handle_is_taken_wherever_it_is_and_however_it_is_cut(place: tuple[bytes, bytes], line_end: bytes) -> None:
    text, expected = (t.replace(b"\n", line_end) for t in place)
    for pieces in [[text], *map(list, cuts.in_two(text)), cuts.singly(text), cuts.by(7, text)]:
        out, capture = run(pieces)
        assert out == expected
        assert capture.handle == RAW
        assert (capture.failed, capture.oversize) == (None, False)
    answer: Any = capture._answer
    assert "".join(answer.content) == 'He said: "kv_transfer_params" {你好 🌍}'


def test_the_answer_is_complete_when_the_response_has_ended() -> None:
    for text, expected in PLACES.values():
        _, capture = run([text])
        answer: Any = capture._answer
        assert "".join(answer.content) == 'He said: "kv_transfer_params" {你好 🌍}'
        assert answer.finish_reasons == {0: "stop"}
        if event(USAGE) in expected:
            assert (answer.usage.prompt, answer.usage.completion) == (9, 3)


def test_it_is_there_the_moment_its_event_is_complete() -> None:
    capture = streaming()
    text = TEXT + event(chunk(finish="stop", kv_transfer_params=HANDLE))
    capture.decode(text[:-1])
    assert capture.handle is None
    assert capture.decode(text[-1:]) == FINISH
    assert capture.handle == RAW
    assert capture._answer.finish_reasons == {}
    capture.collect()
    assert capture._answer.finish_reasons == {0: "stop"}


def test_the_official_client_reads_what_is_left_without_an_error() -> None:
    for text, expected in PLACES.values():
        out, _ = run([text])
        assert out == expected
        with client_of(out) as client:
            stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
            chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices).startswith("He said")
        assert all("kv_transfer_params" not in (c.model_extra or {}) for c in chunks)


# --- forms of events ---


@pytest.mark.parametrize(
    ("text", "expected", "handle"),
    [
        (b'data:{"choices":[1],"kv_transfer_params":{"a":1}}\n\n', b'data:{"choices":[1]}\n\n', b'{"a":1}'),
        (b'data: {"kv_transfer_params":\ndata: {"a":1},"choices":[1]}\n\n', b'data: {"choices":[1]}\n\n', b'{"a":1}'),
        (
            b'data: {"choices":[1],\r\ndata:"kv_transfer_params":{\r\ndata: "a":1}}\r\n\r\n',
            b'data: {"choices":[1]}\r\n\r\n',
            b'{\n"a":1}',
        ),
        (
            b'id: 7\nevent: x\ndata: {"kv_transfer_params":{"a":1},"choices":[1]}\nretry: 5\n\n',
            b'id: 7\nevent: x\ndata: {"choices":[1]}\nretry: 5\n\n',
            b'{"a":1}',
        ),
        (b': c\ndata: {"choices":[1],"kv_transfer_params":{"a":1}}\n\n', b': c\ndata: {"choices":[1]}\n\n', b'{"a":1}'),
        (b'data: {"choices":[1],"kv_transfer_params":{"a":1}}', b'data: {"choices":[1]}', b'{"a":1}'),
        (b'data: {"choices":[1],"kv_transfer_params":{"a":1}}\n', b'data: {"choices":[1]}\n', b'{"a":1}'),
        (
            b'\xef\xbb\xbfdata: {"choices":[1],"kv_transfer_params":{"a":1}}\n\n',
            b'\xef\xbb\xbfdata: {"choices":[1]}\n\n',
            b'{"a":1}',
        ),
        (b'data: {"choices":[1] , "kv_transfer_params" : {"a":1} }\n\n', b'data: {"choices":[1] }\n\n', b'{"a":1}'),
        (b'data: {"choices":[1],"kv_transfer_params":null}\n\n', b'data: {"choices":[1]}\n\n', None),
        (
            b'data: {"choices":[1],"kv_transfer_params":"x","ec_transfer_params":{"b":2}}\n\n',
            b'data: {"choices":[1]}\n\n',
            None,
        ),
        (
            b'data: {"choices":[1],"kv_transfer_params":{"a":1},"kv_transfer_params":{"b":2}}\n\n',
            b'data: {"choices":[1]}\n\n',
            b'{"b":2}',
        ),
        (
            b"event: response.completed\n"
            + event({"type": "response.completed", "response": {"id": "r1", "kv_transfer_params": {"a": 1}}}),
            b"event: response.completed\n" + event({"type": "response.completed", "response": {"id": "r1"}}),
            b'{"a":1}',
        ),
        (
            b'event: message_stop\ndata: {"type":"message_stop","kv_transfer_params":{"a":1}}\n\n',
            b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
            b'{"a":1}',
        ),
    ],
)
def test_forms_of_events(text: bytes, expected: bytes, handle: bytes | None) -> None:
    for pieces in [[text], *map(list, cuts.in_two(text)), cuts.singly(text)]:
        out, capture = run(pieces)
        assert out == expected
        assert capture.handle == handle


UNTOUCHED = {
    "model text": event(chunk('{"kv_transfer_params": {"remote_host": "x"}}')),
    "a string that is the name": event(chunk("kv_transfer_params")),
    "tool arguments": event(chunk(tool_calls=[{"function": {"arguments": '{"kv_transfer_params":{}}'}}])),
    "deep inside": event({"choices": [{"index": 0, "delta": {"kv_transfer_params": {"a": 1}}}]}),
    "a comment": b': {"kv_transfer_params":{"a":1}}\n\n',
    "another field": b'event: "kv_transfer_params"\ndata: {"choices":[1]}\n\n',
    "no JSON": b'data: the word "kv_transfer_params"\n\n',
    "a list": b'data: ["kv_transfer_params"]\n\n',
    "done": DONE,
    "empty data": b"data:\n\ndata\n\ndata: \n\n",
    "comments": b": OPENROUTER PROCESSING\n\n:\n\n: ping\r\n\r\n",
    "blank lines": b"\n\n\r\n\r\n\n",
    "nothing": b"",
    "no final newline": TEXT + b"data: [DONE]",
    "odd spacing": b'data:  { "choices" : [ 1.50 , "\\u00e9" ] , "usage":null}  \n\n',
    "broken JSON": b'data: {"choices":[{]\n\n',
    "broken JSON with the name in it": b'data: {"choices":[{"kv_transfer_params"]\n\n',
    "an error": event({"error": {"code": 500, "message": "x"}}) + DONE,
    "ping": b'event: ping\ndata: {"type": "ping"}\n\n',
    "empty object": b"data: {}\n\n",
    "nothing said, but by D": event({"choices": []}),
}


@pytest.mark.parametrize("text", UNTOUCHED.values(), ids=UNTOUCHED)
def test_all_else_passes_byte_for_byte(text: bytes) -> None:
    whole = TEXT + text + FINISH
    for pieces in [[text], *map(list, cuts.in_two(text)), cuts.singly(text), [whole], *map(list, cuts.in_two(whole))]:
        out, capture = run(pieces)
        assert out == b"".join(pieces)
        assert (capture.handle, capture.failed, capture.oversize) == (None, None, False)


@pytest.mark.parametrize(
    ("broken", "left"),
    [
        (b'data: {"choices":[{]\n\n', b'data: {"choices":[{]\n\n'),
        (b'data: {"a":"cut off\n\n', b'data: {"a":"cut off\n\n'),
        (b'data: {"kv_transfer_params":{"a":1}, "b":"cut off\n\n', b'data: { "b":"cut off\n\n'),
        (b'data: {"b":1, "kv_transfer_params":{"a":1}} garbage\n\n', b'data: {"b":1} garbage\n\n'),
        (b'data: {"b":1, "kv_transfer_params":{"a":1\n\n', b'data: {"b":1\n\n'),
        (b'data: {"x":[1,2,{"kv_transfer_params"\r\n\r\n', b'data: {"x":[1,2,{"kv_transfer_params"\r\n\r\n'),
        (b'data: \xff{"kv_transfer_params":{"a":1}\n\n', b"data: \xff{\n\n"),
    ],
)
def test_broken_json_in_the_middle_hides_nothing_that_follows(broken: bytes, left: bytes) -> None:
    text = TEXT + broken + event(chunk(finish="stop", kv_transfer_params=HANDLE)) + DONE
    for pieces in [[text], *map(list, cuts.in_two(text)), cuts.singly(text)]:
        out, capture = run(pieces)
        assert out == TEXT + left + FINISH + DONE
        assert capture.handle == RAW
        assert capture.failed is None


@pytest.mark.parametrize(
    ("tail", "left"),
    [
        (b'data: {"a":1, "kv_transfer_params":{"b":', b'data: {"a":1'),
        (b'data: {"a":1, "kv_tr', b'data: {"a":1, "kv_tr'),
        (b'data: {"kv_transfer_params":{"b":1},"c":"d', b'data: {"c":"d'),
    ],
)
def test_what_a_stream_breaks_off_with_is_neither_lost_nor_leaked(tail: bytes, left: bytes) -> None:
    for pieces in [[TEXT + tail], *map(list, cuts.in_two(TEXT + tail))]:
        out, capture = run(pieces)
        assert out == TEXT + left
        assert capture.handle is None


def test_nothing_waits_but_an_incomplete_event() -> None:
    capture, text = streaming(), TEXT + FINISH + DONE
    sent = b""
    for byte in cuts.singly(text):
        sent += byte
        capture.decode(byte)
        complete = sent.rfind(b"\n\n") + 2 if b"\n\n" in sent else 0
        assert capture._decoder.pending == len(sent) - complete
    assert streaming().decode(event(chunk("x"))) == event(chunk("x"))


SECRET = b'{"remote_block_ids":[[1,2]],"remote_host":"SECRET","k":{"a":[1,{"b":"}"}]}}'
LINES = st.lists(
    st.sampled_from(
        [
            b': comment "x{',
            b"event: x",
            b"data: [DONE]",
            b'data: {"a":"b',
            b'data: {"choices":[{]',
            b'data:{"choices":[],"kv_transfer_params":' + SECRET + b"}",
            b'data: {"choices":[{"delta":{"content":"\\"kv_transfer_params {"}}] , "kv_transfer_params" : '
            + SECRET
            + b',"z":1}',
            b'data: {"choices":[{"delta":{"content":"Hi"}}]}',
        ]
    ),
    max_size=6,
)


@given(
    LINES,
    st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=1, max_size=3),
    st.lists(st.integers(0, 900), max_size=8),
)
def test_no_cut_and_no_limit_lets_a_handle_through(lines: list[bytes], ends: list[bytes], offsets: list[int]) -> None:
    blank = [end * (2 + i % 3) for i, end in enumerate(ends)]
    text = b"".join(line + blank[i % len(blank)] for i, line in enumerate(lines))
    expected, whole = run([text])
    assert b"SECRET" not in expected
    out, capture = run(cuts.at(offsets, text))
    assert (out, capture.handle) == (expected, whole.handle)
    for limit in (5, 60, 150):
        out, capture = run(cuts.at(offsets, text), limit)
        assert b"SECRET" not in out
        assert capture.failed is None


# --- real streams ---

STREAMS = [*corpus.files("data/streams/*.sse"), *corpus.files("samples/sse_*.txt")]


def without_member(text: bytes) -> tuple[bytes, bytes | None]:
    """A sample less its handle, which our sketch of a plugin writes last in the event."""
    start = text.find(b',"kv_transfer_params":{')
    if start < 0:
        return text, None
    end = text.index(b"\n\n", start) - 1
    assert text[end : end + 1] == b"}"
    return text[:start] + text[end:], text[start + len(b',"kv_transfer_params":') : end]


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_real_streams_pass_byte_for_byte_less_the_member(path: Path, line_end: bytes) -> None:
    text = path.read_bytes().replace(b"\n", line_end)
    expected, handle = without_member(path.read_bytes())
    expected = expected.replace(b"\n", line_end)
    rng = random.Random(path.name)
    ways = [[text], cuts.by(16 << 10, text), *(cuts.randomly(rng, text, mean) for mean in (2, 7, 100, 300, 3000))]
    if len(text) < 3000 and line_end == b"\n":
        ways += map(list, cuts.in_two(text))
    for pieces in ways:
        out, capture = run(pieces)
        assert out == expected
        assert capture.handle == handle
        assert (capture.failed, capture.oversize) == (None, False)


@pytest.mark.parametrize("path", STREAMS)
def test_a_handle_put_into_a_real_stream_is_taken_out_again(path: Path) -> None:
    text, _ = without_member(path.read_bytes())
    for spot in [m for m in (b"}\n\ndata: [DONE]", b"}\n\n") if m in text]:
        at = len(text[: text.rindex(spot)].rstrip())
        for member in (MEMBER, b', "kv_transfer_params" : ' + RAW):
            with_it = text[:at] + member + text[at:]
            rng = random.Random(path.name)
            for mean in (5, 60, 1000):
                out, capture = run(cuts.randomly(rng, with_it, mean))
                assert out == text
                assert capture.handle == RAW


# --- large events ---


def large(blocks: int) -> tuple[bytes, bytes]:
    handle = compact(d_handle(161, proof=False, remote_block_ids=[list(range(blocks))]))
    text = event(chunk(finish="stop"))[:-3] + b',"kv_transfer_params":' + handle + b"}\n\n"
    return text, handle


@pytest.mark.parametrize("size", [16 << 10, 4096, 100])
def test_fr45_25k_block_ids_are_captured_and_stripped(size: int) -> None:
    text, handle = large(24_576)
    assert 130_000 < len(text) < 160_000
    pieces = cuts.by(size, TEXT + text + DONE)
    begun = time.process_time()
    out, capture = run(pieces, limit=4 << 20)
    spent = time.process_time() - begun
    assert out == TEXT + FINISH + DONE
    assert capture.handle == handle
    assert spent < 0.2


@pytest.mark.parametrize("line_end", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("size", [16 << 10, 1000, 37])
def test_fr45_an_event_over_the_limit_passes_without_its_handle(line_end: bytes, size: int) -> None:
    text, _ = large(4000)
    before, after = TEXT, event(chunk("after")) + event(chunk(None, "stop", kv_transfer_params=HANDLE)) + DONE
    stream = (before + text + after).replace(b"\n", line_end)
    out, capture = run(cuts.by(size, stream), limit=2000)
    assert out == (before + FINISH + event(chunk("after")) + FINISH + DONE).replace(b"\n", line_end)
    assert capture.oversize
    assert capture.handle == RAW  # of a later event: an event over the limit does not end the capture


def test_an_event_over_the_limit_does_not_count_when_it_is_there_at_once() -> None:
    # It is in memory anyway; the limit is for what has to be held back.
    text, handle = large(4000)
    out, capture = run([text], limit=2000)
    assert (out, capture.handle, capture.oversize) == (FINISH, handle, False)


def test_an_event_over_the_limit_that_breaks_off_loses_only_the_handle() -> None:
    text, _ = large(4000)
    out, capture = run(cuts.by(1000, TEXT + text[:-100]), limit=2000)
    assert out == TEXT + FINISH[:-3]
    assert (capture.handle, capture.oversize, capture.failed) == (None, True, None)


def test_memory_is_bounded_by_the_limit() -> None:
    capture = streaming(limit=16 << 10)
    piece = b"[" + b"1234567," * 500 + b"],"
    capture.decode(b'data: {"choices":[1],"kv_transfer_params":{"remote_block_ids":[')
    tracemalloc.start()
    try:
        out = sum(len(capture.decode(piece)) for _ in range(60))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert capture.oversize
    assert out < 64
    assert peak < 8 * (16 << 10)


def test_a_long_stream_keeps_only_what_was_not_yet_collected() -> None:
    capture = streaming()
    piece = event(chunk("x" * 1000))
    for _ in range(1000):
        capture.decode(piece)
        assert sum(map(len, capture._unread)) < 1 << 17
    capture.flush()
    answer: Any = capture._answer
    assert len("".join(answer.content)) == 1_000_000
    assert capture._unread == []


# --- errors of our own ---


@pytest.mark.parametrize("size", [1, 7, 50, 1 << 16])
def test_fr17_when_the_rewriter_fails_the_rest_passes_without_any_handle(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    calls = 0

    def fails(_: bytes) -> tuple[bytes, bytes | None]:
        nonlocal calls
        calls += 1
        raise RuntimeError("bug")

    monkeypatch.setattr(module, "strip_body", fails)
    stream = b"".join(event(chunk(str(i))) for i in range(2))
    stream += event(chunk("kv_transfer_params"))  # the 3rd of 10 makes it look closer
    stream += b"".join(event(chunk(str(i), kv_transfer_params=HANDLE)) for i in range(3, 10))
    expected = stream.replace(MEMBER, b"")
    out, capture = run(cuts.by(size, stream))
    assert out == expected
    assert isinstance(capture.failed, RuntimeError)
    assert capture.handle is None
    assert calls == 1


@pytest.mark.parametrize("size", [1, 50, 1 << 20])
@pytest.mark.parametrize("tail", [b"", b'data: {"a":1, "kv', b"data: [DONE]"])
def test_a_collector_that_fails_does_not_hold_up_the_stream(
    monkeypatch: pytest.MonkeyPatch, size: int, tail: bytes
) -> None:
    capture = streaming()

    def fails(obj: object, *, stream: bool) -> None:
        raise TypeError(f"{obj} {stream}")

    monkeypatch.setattr(type(capture._answer), "read", fails)
    stream = (
        b"".join(event(chunk("x" * 1000)) for _ in range(100))
        + event(chunk(finish="stop", kv_transfer_params=HANDLE))
        + tail
    )
    out = b"".join(capture.decode(p) for p in cuts.by(size, stream))
    capture.collect()
    out += capture.flush()
    assert out == stream.replace(MEMBER, b"")
    assert isinstance(capture.failed, TypeError)
    assert capture.handle is None


def test_a_handle_is_not_kept_when_what_follows_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = streaming()
    capture.decode(event(chunk(finish="stop", kv_transfer_params=HANDLE)))
    monkeypatch.setattr(module, "strip_body", lambda _: 1 / 0)
    text = event(chunk("kv_transfer_params")) + b'data: {"half'
    assert capture.decode(text) + capture.flush() == text
    assert capture.handle is None
    assert isinstance(capture.failed, ZeroDivisionError)


# --- JSON bodies ---


def body(**more: Any) -> Json:  # noqa: ANN401 - JSON
    message = {"role": "assistant", "content": 'a "}" and \\ {'}
    return {
        "id": "c",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9},
    } | more


def run_body(pieces: Sequence[bytes], limit: int = 1 << 20) -> tuple[list[bytes], bytes, BodyCapture]:
    capture = BodyCapture(Chat().answer(), limit)
    out = [capture.decode(p) for p in pieces]
    return out, capture.flush(), capture


@pytest.mark.parametrize("end", [b"", b"\n", b" \r\n "])
def test_a_body_is_stripped_and_read_however_it_is_cut(end: bytes) -> None:
    text, expected = compact(body(kv_transfer_params=HANDLE)) + end, compact(body()) + end
    for pieces in [[text], *map(list, cuts.in_two(text)), cuts.singly(text), [text, b""], [b"", text]]:
        out, rest, capture = run_body(pieces)
        assert b"".join(out) + rest == expected
        assert capture.handle == RAW
        assert capture._answer.finish_reasons == {0: "stop"}
        assert capture._answer.usage.prompt == 9
        capture.collect()


def test_a_body_goes_on_as_soon_as_it_is_whole() -> None:
    # If trailers end the response, nothing can be sent any more when that is known.
    text = compact(body(kv_transfer_params=HANDLE))
    for pieces in cuts.in_two(text):
        out, rest, _ = run_body(pieces)
        assert b"".join(out) == compact(body())
        assert rest == b""


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"[]",
        b'[{"kv":1}]',
        b'"text"',
        b"<html>{}</html>",
        b"Internal Server Error",
        b"null",
        b"{}",
        b' { "a" : 1.50 }\n',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,"b',
        b'{"a":1, "kv',
        b'{"a":1}}',
        b'{"a":1}{"b":2}',
        b'{"a":1} x',
        b"{",
        b'{"a":}',
        b"\xff\xfe",
        b'{"error":{"code":400,"message":"x"}}',
    ],
)
def test_a_body_without_a_handle_passes_byte_for_byte(text: bytes) -> None:
    for pieces in [[text], *map(list, cuts.in_two(text)), cuts.singly(text)]:
        out, rest, capture = run_body(pieces)
        assert b"".join(out) + rest == text
        assert (capture.handle, capture.failed, capture.oversize) == (None, None, False)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (b'{"a":1,"kv_transfer_params":{"b":', b'{"a":1'),
        (b'{"a":1,"kv_transfer_params":{"b":1},"c":2', b'{"a":1,"c":2'),
        (b'{"kv_transfer_params":{"b":1} x}', b"{}"),
    ],
)
def test_a_broken_body_leaks_nothing(text: bytes, left: bytes) -> None:
    for pieces in [[text], *map(list, cuts.in_two(text)), cuts.singly(text)]:
        out, rest, capture = run_body(pieces)
        assert b"".join(out) + rest == left
        assert capture.handle is None


@pytest.mark.parametrize("path", corpus.files("samples/*_response.json"))
def test_real_bodies(path: Path) -> None:
    pretty = path.read_bytes()
    for text in (pretty, compact(json.loads(pretty))):
        expected = json.loads(text)
        handle = expected.pop("kv_transfer_params")
        assert expected.pop("ec_transfer_params", None) is None
        for pieces in ([text], cuts.by(64, text), cuts.singly(text)):
            out, rest, capture = run_body(pieces)
            assert json.loads(b"".join(out) + rest) == expected
            assert capture.handle is not None
            assert json.loads(capture.handle) == handle
            assert capture.handle in text


def test_a_body_over_the_limit_passes_without_its_handle() -> None:
    text = compact(body(a=["x" * 100] * 100, kv_transfer_params=HANDLE, b="é"))
    for size in (100, 1000):
        out, rest, capture = run_body(cuts.by(size, text), limit=3000)
        assert b"".join(out) + rest == compact(body(a=["x" * 100] * 100, b="é"))
        assert (capture.handle, capture.oversize) == (None, True)
        assert all(out[3000 // size + 1 : -20])  # it streams from there on
    out, rest, capture = run_body(cuts.by(100, text[:-1]), limit=3000)
    assert b"".join(out) + rest == compact(body(a=["x" * 100] * 100, b="é"))[:-1]


def test_a_body_whose_reading_fails_passes_without_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise TypeError("bug")

    text = compact(body(kv_transfer_params=HANDLE))
    for target, name in ((module, "_read"), (module, "strip_body")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fails)
            for pieces in ([text], cuts.by(50, text)):
                out, rest, capture = run_body(pieces)
                assert b"".join(out) + rest == compact(body())
                assert isinstance(capture.failed, TypeError)
                assert capture.handle is None


def test_many_pieces_that_end_in_a_brace_do_not_make_it_slow() -> None:
    element = compact({"token": "x", "logprob": -0.1, "top": {"a": 1}})
    text = compact(body())[:-1] + b',"logprobs":[' + b",".join([element] * 40_000) + b"]}"
    size = len(element) + 1
    first = text.index(element) + len(element)
    pieces = [text[:first], *cuts.by(size * 20, text[first:])]
    assert len([p for p in pieces if p.endswith(b"}")]) > 1900
    begun = time.process_time()
    out, rest, _ = run_body(pieces, limit=16 << 20)
    assert time.process_time() - begun < 1.5
    assert b"".join(out) + rest == text


# --- strip_body and open_capture ---


@pytest.mark.parametrize(
    ("text", "expected", "handle"),
    [
        (b"{}", b"{}", None),
        (b'{"kv_transfer_params":{"a":1}}', b"{}", b'{"a":1}'),
        (b'{"response":{"kv_transfer_params":{"a":1}}}', b'{"response":{}}', b'{"a":1}'),
        (b'{"response":{"kv_transfer_params":{"a":1}},"kv_transfer_params":{"b":2}}', b'{"response":{}}', b'{"b":2}'),
        (b'{"response":{"response":{"kv_transfer_params":{"a":1}}}}', b'{"response":{"response":{}}}', b'{"a":1}'),
        (b'{"response":"kv_transfer_params"}', b'{"response":"kv_transfer_params"}', None),
        (b'{"response":[{"kv_transfer_params":1}]}', b'{"response":[{"kv_transfer_params":1}]}', None),
        (b'{"other":{"kv_transfer_params":{"a":1}}}', b'{"other":{"kv_transfer_params":{"a":1}}}', None),
        (b'{"ec_transfer_params":{"a":1},"x":0}', b'{"x":0}', None),
    ],
)
def test_strip_body(text: bytes, expected: bytes, handle: bytes | None) -> None:
    assert strip_body(text) == (expected, handle)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[DONE]"])
def test_strip_body_wants_an_object(text: bytes) -> None:
    with pytest.raises(JSONTextError):
        strip_body(text)


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        ("text/event-stream", StreamCapture),
        ("text/event-stream; charset=utf-8", StreamCapture),
        ("application/json", BodyCapture),
        ("application/json; charset=utf-8", BodyCapture),
        ("text/plain", BodyCapture),
        ("", BodyCapture),
    ],
)
def test_which_capture_fits(content_type: str, kind: type) -> None:
    capture = open_capture(content_type, Completions().answer(), event_bytes=1, response_bytes=1)
    assert type(capture) is kind
