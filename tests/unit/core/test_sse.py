import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core.sse import Event, SSEDecoder, event_data, event_end, split_events
from support import cuts

LF = (
    b": hello\n\n"
    b'data: {"a": "\xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x8c\x8d"}\n\n'
    b"event: x\nid: 7\ndata:first\ndata: second\n\n"
    b"retry: 10\n\n\n"
    b"data\n\n"
    b"data: [DONE]\n\n"
)
FORMS = {
    "lf": LF,
    "crlf": LF.replace(b"\n", b"\r\n"),
    "cr": LF.replace(b"\n", b"\r"),
    "mixed": b"data: 1\r\n\ndata: 2\n\r\ndata: 3\r\rdata: 4\n\rdata: 5\r\n\rdata: 6\r\r\ndata: 7\n\n\ndata: 8\r\n\r\n",
    "no final newline": LF + b"data: tail",
    "half a blank line": LF.replace(b"\n", b"\r\n") + b"data: tail\r\n\r",
    "leading blank lines": b"\n\r\n" + LF,
    "only line ends": b"\n\r\r\n\n",
    "empty": b"",
}
TEXTS = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"data: x", b"data:", b":", b"id", b"\xc3\xa9"]), max_size=20)


def run(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    decoder = SSEDecoder()
    out = [decoder.decode(p) for p in pieces]
    return out, decoder.flush()


def dispatched(text: bytes) -> list[tuple[bytes, bytes]]:
    """What a client makes of a stream, by WHATWG's rules: names and data, of events that end in a blank line."""
    events, data, name = [], None, b""
    *lines, _ = re.split(rb"\r\n|\r|\n", text)
    for line in lines:
        field, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if not line:
            if data is not None:
                events.append((name, data[:-1]))
            data, name = None, b""
        elif field == b"data":
            data = (data or b"") + value + b"\n"
        elif field == b"event":
            name = value
    return events


def complete(text: bytes) -> int:
    """How many bytes of a text end with a blank line: line by line, an end of line each time."""
    ends, at, length = 0, 0, 0
    for line in re.split(rb"(\r\n|\r|\n)", text):
        at += len(line)
        if line in {b"\r\n", b"\r", b"\n"}:
            if not length and at > len(line):
                ends = at
            length = 0
        else:
            length += len(line)
    return ends


# --- SSEDecoder ---


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_no_byte_is_lost_or_moved_wherever_the_stream_is_cut(text: bytes) -> None:
    for pieces in [*map(list, cuts.in_two(text)), cuts.singly(text), cuts.by(3, text), [text, b""], [b"", text]]:
        out, rest = run(pieces)
        assert b"".join(out) + rest == text


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_an_event_goes_on_as_soon_as_its_blank_line_is_there(text: bytes) -> None:
    decoder, passed, held = SSEDecoder(), b"", b""
    for byte in cuts.singly(text):
        out = decoder.decode(byte)
        held += byte
        if out:
            passed, held = passed + out, held[len(out) :]
        assert decoder.pending == len(held)
        # All that is held back is one event that has begun, or line ends that might belong to the next.
        assert len(dispatched(passed)) == len(dispatched(passed + held))


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_what_goes_on_ends_with_a_blank_line(text: bytes) -> None:
    for pieces in cuts.in_two(text):
        for out in run(list(pieces))[0]:
            assert not out.strip(b"\r\n") or re.search(rb"(\r\n|[^\r]\n|\r)(\r\n|\r|\n)\Z", out)


@given(TEXTS, st.lists(st.integers(0, 100), max_size=6))
def test_the_fast_path_agrees_with_the_slow_one(parts: list[bytes], offsets: list[int]) -> None:
    text = b"".join(parts)
    quick, slow = SSEDecoder(), SSEDecoder()
    quick_out = b"".join(quick.decode(p) for p in cuts.at(offsets, text))
    slow_out = b"".join(slow.decode(p) for p in cuts.singly(text))  # a single byte never ends in two line ends
    # Blank lines behind an event may go with it or wait: that is all they may differ in.
    assert (quick_out + quick.flush(), slow_out + slow.flush()) == (text, text)
    assert quick_out.rstrip(b"\r\n") == slow_out.rstrip(b"\r\n")
    assert dispatched(quick_out) == dispatched(slow_out)


@given(TEXTS, st.lists(st.integers(0, 100), max_size=6))
def test_all_complete_events_go_on(parts: list[bytes], offsets: list[int]) -> None:
    text = b"".join(parts)
    out, _ = run(cuts.at(offsets, text))
    assert dispatched(b"".join(out)) == dispatched(text)


def test_a_line_feed_behind_a_blank_lines_carriage_return_begins_no_event() -> None:
    decoder = SSEDecoder()
    assert decoder.decode(b"data: 1\r\n\r") == b"data: 1\r\n\r"
    assert decoder.decode(b"\n") == b"\n"
    assert decoder.pending == 0
    assert decoder.decode(b"data: 2\r\n\r") == b"data: 2\r\n\r"
    assert decoder.decode(b"data: 3\r\n\r\n") == b"data: 3\r\n\r\n"
    assert decoder.decode(b"data: 4\r\n\r") == b"data: 4\r\n\r"
    assert decoder.decode(b"\ndata: 5\n\n") == b"\ndata: 5\n\n"


def test_flush_gives_the_rest_once() -> None:
    decoder = SSEDecoder()
    assert decoder.decode(b"data: 1\n") == b""
    assert decoder.pending == 8
    assert decoder.flush() == b"data: 1\n"
    assert decoder.flush() == b""
    assert decoder.pending == 0


def one_event(size: int, line_end: bytes) -> bytes:
    return b": x" + line_end + b"data: " + b"x" * size + line_end * 2


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("piece", [16 << 10, 256])
def test_a_4_mib_event_takes_time_in_proportion_to_its_length(line_end: bytes, piece: int) -> None:
    def seconds(size: int) -> float:
        pieces = cuts.by(piece, one_event(size, line_end))
        begun = time.process_time()
        out, rest = run(pieces)
        spent = time.process_time() - begun
        assert sum(map(len, out)) == sum(map(len, pieces))
        assert rest == b""
        return spent

    small, large = min(seconds(1 << 19) for _ in range(3)), min(seconds(1 << 22) for _ in range(2))
    # 8 times the bytes: quadratic would be 64 times the time. The floor keeps the clock's grain out of it.
    assert large < 24 * max(small, 0.002)


# --- split_events ---


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_events_add_up_to_the_text(text: bytes) -> None:
    assert b"".join(e.raw for e in split_events(text)) == text


@given(TEXTS)
def test_events_are_what_a_client_dispatches(parts: list[bytes]) -> None:
    text = b"".join(parts)
    events = split_events(text)
    assert b"".join(e.raw for e in events) == text
    ended = [e for e in events if e.data is not None and complete(e.raw) == len(e.raw)]
    assert [(e.name, e.data) for e in ended] == dispatched(text)


def test_fields_of_events() -> None:
    assert split_events(LF) == [
        Event(b": hello\n\n", None),
        Event(b'data: {"a": "\xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x8c\x8d"}\n\n', '{"a": "你好 🌍"}'.encode()),
        Event(b"event: x\nid: 7\ndata:first\ndata: second\n\n", b"first\nsecond", b"x"),
        Event(b"retry: 10\n\n\n", None),
        Event(b"data\n\n", b""),
        Event(b"data: [DONE]\n\n", b"[DONE]"),
    ]
    assert split_events(b"") == []


@pytest.mark.parametrize(
    ("line", "data"),
    [
        (b"data: x", b"x"),
        (b"data:x", b"x"),
        (b"data:  x", b" x"),
        (b"data:\tx", b"\tx"),
        (b"data: x ", b"x "),
        (b"data:", b""),
        (b"data", b""),
        (b"data: a:b", b"a:b"),
        (b"Data: x", None),
        (b" data: x", None),
        (b"data : x", None),
        (b"datas: x", None),
        (b":data: x", None),
        (b"\xef\xbb\xbfdata: x", b"x"),  # the byte order mark that may lead a stream
    ],
)
def test_which_lines_are_data(line: bytes, data: bytes | None) -> None:
    for end in (b"\n\n", b"\r\n\r\n", b"\r\r", b"", b"\n"):
        assert [e.data for e in split_events(line + end)] == [data]


def test_line_ends_that_lead_are_no_part_of_an_event() -> None:
    # They are what is left of the event before; if this one is dropped, they stay.
    assert [e.raw for e in split_events(b"\ndata: 1\n\n")] == [b"\n", b"data: 1\n\n"]
    assert [e.raw for e in split_events(b"\r\n\n\rdata: 1\r\r\ndata: 2")] == [b"\r\n\n\r", b"data: 1\r\r\n", b"data: 2"]


# --- Event.with_data ---


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"data: old\n\n", b"data: new\n\n"),
        (b"data:old\n\n", b"data:new\n\n"),
        (b"data:  old\r\n\r\n", b"data: new\r\n\r\n"),
        (b"data: old", b"data: new"),
        (b"data: old\n", b"data: new\n"),
        (b"data: old\r\r", b"data: new\r\r"),
        (b": c\nevent: e\ndata: old\nid: 1\n\n", b": c\nevent: e\ndata: new\nid: 1\n\n"),
        (b"data: o\r\ndata: l\r\nid: 1\r\ndata:d\r\n\r\n", b"data: new\r\nid: 1\r\n\r\n"),
        (b"data: o\ndata: ld", b"data: new\n"),
        (b"data: old\n\n\n", b"data: new\n\n\n"),
    ],
)
def test_with_data_changes_the_data_lines_only(raw: bytes, expected: bytes) -> None:
    (event,) = split_events(raw)
    assert event.with_data(b"new") == expected


def test_with_data_keeps_json_on_one_line() -> None:
    (event,) = split_events(b"data: {\ndata: }\n\n")
    assert event.with_data(b'{\n"a":\r\n1}') == b'data: { "a":  1}\n\n'


# --- event_end ---


def rest_of_event(text: bytes) -> Iterator[tuple[bytes, bytes, int | None]]:
    end = len(split_events(text)[0].raw)
    if complete(text[:end]) < end:
        end = 0
    for before, data in cuts.in_two(text):
        if not end or not complete(before):
            yield before, data, end - len(before) if end else None


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r", b"\n\r\n", b"\r\n\n", b"\n", b"\r\n", b""])
def test_event_end_finds_the_end_wherever_the_event_is_cut(end: bytes) -> None:
    tails = [b"", b"data: 2\n\n", b":"] if complete(b"x" + end) else [b"", b"x", b"data: 2"]
    for tail in tails:
        for before, data, expected in rest_of_event(b": c\r\ndata: 1" + end + tail):
            assert event_end(before[-3:], data) == expected
            assert event_end(before, data) == expected


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (b'data: {"a": 1}\n\ndata: [DONE]\n\n', [b'{"a": 1}', b"[DONE]"]),
        (b"data: a\n\n\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\ndata: b\n\ndata\n\n", [b"a\nb", b""]),
        (b": ping\n\nevent: x\ndata:a\n\n", [b"a"]),
        (b"data: a\r\n\r\ndata: b\n\n", [b"a", b"b"]),
        (b"\n\n", []),
    ],
)
def test_the_data_of_events(text: bytes, data: list[bytes]) -> None:
    assert list(event_data(text)) == data


@given(
    st.lists(
        st.sampled_from([b"\n\n", b"\n", b"\r", b"data: x", b"data: ", b"data:", b" ", b"data: data: y"]), max_size=12
    )
)
def test_the_quick_way_to_the_data_is_no_other_way(pieces: list[bytes]) -> None:
    text = b"".join(pieces)
    assert list(event_data(text)) == [event.data for event in split_events(text) if event.data is not None]
