"""Both lanes give the client the same bytes for the same pieces of an answer.

And at the same moments, up to the event with the handle: from there on the fast lane holds all back until the end.
"""

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreturn.core.api import Chat, Messages, Responses
from kvreturn.core.capture import StreamCapture
from support import corpus, cuts
from support.events import message_events, response_events
from support.lanes import End, FastLane
from support.turns import compact, d_handle

Pieces = Sequence[bytes]
Lane = Callable[[Pieces, int], list[bytes]]
HANDLE = d_handle(161)
HIDDEN = b',"kv_transfer_params":' + compact(HANDLE)
_BIG = 1 << 20


def portable(pieces: Pieces, limit: int = _BIG) -> list[bytes]:
    """What goes on at each piece, and at the end, through the router."""
    capture = StreamCapture(Chat().answer(), limit)
    return [*(capture.decode(p) for p in pieces if p), capture.flush()]


def fast(pieces: Pieces, limit: int = _BIG, by: End = "empty") -> list[bytes]:
    """The same through the scripts. Envoy has no empty pieces but the last."""
    lane = FastLane(limit=limit)
    lane.play([p for p in pieces if p], by=by)
    assert lane.errors == []
    assert lane.taken_on
    assert lane.told == b"".join(pieces)  # whatever the client gets, the router is told all
    assert [c.last for c in lane.calls] == [False] * (len(lane.calls) - 1) + [True]
    return lane.out


def check_equal(pieces: Pieces, limit: int = _BIG) -> None:
    """What goes on is the same, and only what is behind a handle waits in the fast lane."""
    expected, out = portable(pieces, limit), fast(pieces, limit)
    assert b"".join(out) == b"".join(expected)
    if out != expected:
        held = next(i for i, (a, b) in enumerate(zip(out, expected, strict=True)) if a != b)
        assert not any(out[held:-1])
        assert b"_transfer_params" in b"".join([p for p in pieces if p][: held + 1])
    if any(pieces):
        assert b"".join(fast(pieces, limit, by="last")) == b"".join(expected)


def chat(**more: object) -> bytes:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    return b"data: %b\n\n" % compact(
        {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more}
    )


TEXT = chat(text='你好 🌍 {\\" }') + chat(text='"kv_transfer_params": {}')
DONE = b"data: [DONE]\n\n"
_PARAMS = b'"kv_transfer_params":' + compact(HANDLE)
# A stream, and what the client gets of it, worked out by hand.
STREAMS: dict[str, tuple[bytes, bytes]] = {
    "no handle": (TEXT + DONE, TEXT + DONE),
    "on the finish chunk": (TEXT + chat(kv_transfer_params=HANDLE) + DONE, TEXT + chat() + DONE),
    "first of its members": (b"data: {" + _PARAMS + b',"choices":[1]}\n\n', b'data: {"choices":[1]}\n\n'),
    "alone in its event": (TEXT + b"data: {" + _PARAMS + b"}\n\n" + DONE, TEXT + DONE),
    "twice": (b'data: {"a":1,%b,%b}\n\n' % (_PARAMS, _PARAMS), b'data: {"a":1}\n\n'),
    "null": (b'data: {"a":1,"kv_transfer_params":null}\n\n', b'data: {"a":1}\n\n'),
    "the encoder's": (b'data: {"a":1,"ec_transfer_params":{"b":{}}}\n\n', b'data: {"a":1}\n\n'),
    "in a response": (b'data: {"response":{"a":1,%b}}\n\n' % _PARAMS, b'data: {"response":{"a":1}}\n\n'),
    "in a message": (b'data: {"message": {%b , "a":1}}\n\n' % _PARAMS, b'data: {"message": {"a":1}}\n\n'),
    "in another object": (b'data: {"b":{"a":1,%b}}\n\n' % _PARAMS, b'data: {"b":{"a":1,%b}}\n\n' % _PARAMS),
    "in an array": (b'data: {"b":[{"a":1,%b}]}\n\n' % _PARAMS, b'data: {"b":[{"a":1,%b}]}\n\n' % _PARAMS),
    "in a text": (b'data: {"b":"\\"kv_transfer_params\\":{}"}\n\n', b'data: {"b":"\\"kv_transfer_params\\":{}"}\n\n'),
    "with spaces": (b'data: { "a" : 1 , "kv_transfer_params" : { } }\n\n', b'data: { "a" : 1 }\n\n'),
    "over several lines": (
        b'event: x\nid: 1\ndata: {"a":1,\ndata: "kv_transfer_params":{}}\nretry: 1\n\n',
        b'event: x\nid: 1\ndata: {"a":1}\nretry: 1\n\n',
    ),
    "line ends of two bytes": (
        b'data: {"a":1%b}\r\n\r\ndata: b\r\n\r\n' % HIDDEN,
        b'data: {"a":1}\r\n\r\ndata: b\r\n\r\n',
    ),
    "CR alone": (b'data: {"a":1%b}\r\rdata: b\r\r' % HIDDEN, b'data: {"a":1}\r\rdata: b\r\r'),
    "no space behind data": (b'data:{"a":1%b}\n\n' % HIDDEN, b'data:{"a":1}\n\n'),
    "no blank line at the end": (b'data: {"a":1%b}' % HIDDEN, b'data: {"a":1}'),
    "no line end but one": (b'data: {"a":1%b}\n' % HIDDEN, b'data: {"a":1}\n'),
    "a mark leads": (b'\xef\xbb\xbfdata: {"a":1%b}\n\n' % HIDDEN, b'\xef\xbb\xbfdata: {"a":1}\n\n'),
    "comments": (b': ping\n\n: x\ndata: {"a":1%b}\n\n: y\n\n' % HIDDEN, b': ping\n\n: x\ndata: {"a":1}\n\n: y\n\n'),
    "JSON that is no event": (b'{"a":1%b}\n\n' % HIDDEN, b'{"a":1}\n\n'),
    "broken JSON": (b'data: {"a":1%b,}\n\n' % HIDDEN, b'data: {"a":1,}\n\n'),
    "bytes that are no text": (b'data: {"a":"\xff"%b}\n\n' % HIDDEN, b'data: {"a":"\xff"}\n\n'),
    "a bracket too many": (b'data: }{"a":1%b}\n\n' % HIDDEN, b'data: }{"a":1}\n\n'),
    "half a surrogate, so that nobody can say that nothing is left": (
        b'data: {"id":"\xed\xa0\x80"%b}\n\n' % HIDDEN,
        b'data: {"id":"\xed\xa0\x80"}\n\n',
    ),
    "bytes too few": (b'data: {"id":"\xe2\x82"%b}\n\n' % HIDDEN, b'data: {"id":"\xe2\x82"}\n\n'),
    "a form too long": (b'data: {"id":"\xc0\xaf"%b}\n\n' % HIDDEN, b'data: {"id":"\xc0\xaf"}\n\n'),
    "characters of every length": (b'data: {"id":"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"%b}\n\n' % HIDDEN, b""),
    "more blank lines": (b"\n\n\ndata: {%b}\n\n\n\ndata: b\n\n" % _PARAMS, b"\n\n\ndata: b\n\n"),
    "numbers and words": (
        b'data: {"a":[-0.5e+3,1E9,NaN,-Infinity,true,false,null,"\\u00e9\\n\\/"]%b}\n\n' % HIDDEN,
        b'data: {"a":[-0.5e+3,1E9,NaN,-Infinity,true,false,null,"\\u00e9\\n\\/"]}\n\n',
    ),
    "a name with escapes": (
        b'data: {"a":1,"kv\\u005ftransfer_params":{},"kv_transfer_params":{}}\n\n',
        b'data: {"a":1}\n\n',
    ),
    "nothing": (b"", b""),
}


@pytest.mark.parametrize("lane", [portable, fast])
@pytest.mark.parametrize(("text", "expected"), STREAMS.values(), ids=STREAMS)
def test_what_a_client_gets_of_a_stream(lane: Lane, text: bytes, expected: bytes) -> None:
    for pieces in [[text], cuts.singly(text), cuts.by(7, text)]:
        assert b"".join(lane(pieces, _BIG)) == expected


@pytest.mark.parametrize("text", [t for t, _ in STREAMS.values()], ids=STREAMS)
def test_each_piece_gives_the_same_in_both_lanes_wherever_it_is_cut(text: bytes) -> None:
    for limit in (_BIG, 40):  # with the latter, most events are too large to be kept
        for pieces in [*cuts.in_two(text)][:: max(1, len(text) // 12)]:
            check_equal(pieces, limit)
        for size in (1, 16):
            check_equal(cuts.by(size, text), limit)


@pytest.mark.parametrize("recording", [*corpus.files("data/streams/*.sse"), *corpus.files("samples/sse_*.txt")])
def test_recorded_streams(recording: object) -> None:
    text = recording.read_bytes()  # type: ignore[attr-defined] # a path
    handed = text.replace(b'"choices":[]', b'"choices":[]' + HIDDEN) + chat(kv_transfer_params=HANDLE)
    for pieces, limit in (([text], _BIG), (cuts.by(211, text), _BIG), (cuts.by(97, handed), _BIG), ([handed], 300)):
        check_equal(pieces, limit)


@pytest.mark.parametrize(
    "text",
    [b"".join(response_events(params=HANDLE)), b"".join(message_events(params=HANDLE))],
    ids=[Responses.name, Messages.name],
)
def test_streams_of_the_other_apis(text: bytes) -> None:
    for pieces in ([text], cuts.by(64, text), cuts.by(500, text)):
        check_equal(pieces)
        assert b"remote_block_ids" not in b"".join(fast(pieces))


# Fragments that matter to either lane, in any order: most of what comes out is no JSON, and no proper event.
_FRAGMENTS = [
    *(b"data: ", b"data:", b"\n", b"\n\n", b"\r\n", b"\r", b"\r\n\r\n", b": c", b"event: e", b"id"),
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b'"a"', b'"a":1', b"1", b"null", b" ", b"\xc3\xa9", b"\xff"),
    *(b'"kv_transfer_params"', b'"kv_transfer_params":', b'"ec_transfer_params":{}', b'"response":{', b'"message":'),
    *(b'"choices":[]', b'"usage":{"a":1}', b'{"kv_transfer_params":{"x":"}"}}', b'"id":"c"', b"kv_transfer", HIDDEN),
    *(b'data: {"a":1,"kv_transfer_params":{"b":[1]}}', b'data: {"kv_transfer_params":{}}\n\n', b"[DONE]"),
]
_ANY = st.lists(st.sampled_from(_FRAGMENTS), max_size=24).map(b"".join)


@given(text=_ANY, offsets=st.lists(st.integers(0, 400), max_size=8), limit=st.sampled_from([20, 60, _BIG]))
def test_whatever_comes_both_lanes_give_the_same(text: bytes, offsets: list[int], limit: int) -> None:
    pieces = cuts.at(offsets, text)
    check_equal(pieces, limit)


_NAMES = st.sampled_from(
    ["kv_transfer_params", "ec_transfer_params", "response", "message", "choices", "id", "a", "", "é", 'q"\\']
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=30)
@given(
    objects=st.lists(st.dictionaries(_NAMES, _VALUES, min_size=1, max_size=5), min_size=1, max_size=4),
    spaced=st.booleans(),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n\n", "\r\n\r\n", "\n\r\n", "\r\r"]),
    offsets=st.lists(st.integers(0, 2000), max_size=8),
)
def test_events_of_any_json(
    objects: list[dict[str, object]],
    spaced: bool,  # noqa: FBT001 - Hypothesis passes it by name
    ascii_only: bool,  # noqa: FBT001
    end: str,
    offsets: list[int],
) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    lines = [json.dumps(o, separators=separators, ensure_ascii=ascii_only) for o in objects]
    text = "".join(f"data: {line}{end}" for line in lines).encode("utf-8", "surrogatepass")
    pieces = cuts.at(offsets, text)
    check_equal(pieces)
