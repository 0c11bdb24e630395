"""Fuzz targets: JSON texts and server-sent events, as they are taken apart and put together again."""

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from fuzz.strategies import SECRET, bounded, cuts, holding, names, nested, objects, texts, values
from kvreturn.core.api import APIS
from kvreturn.core.capture import HIDDEN, open_capture, strip_body
from kvreturn.core.fingerprint import canonical
from kvreturn.core.jsontext import JSONTextError, ObjectText, drop_nested, loads
from kvreturn.core.scrub import scrub_body
from kvreturn.core.sse import SSEDecoder, split_events
from kvreturn.core.strip import MemberStripper
from support.cuts import at


def parsed(text: bytes) -> Any:  # noqa: ANN401 - JSON
    """As Python's own parser has it, which vLLM uses; an error where that gives one."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as e:
        return e


def same(a: Any, b: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether two values are equal; NaN is itself here."""
    return json.dumps(a) == json.dumps(b)


@bounded
@given(texts(objects), st.sets(names, max_size=3), st.dictionaries(names, texts(), max_size=3))
def test_members_of_an_object_are_dropped_and_set(text: bytes, drop: set[str], put: dict[str, bytes]) -> None:
    if isinstance(parsed(text), Exception):  # lone surrogates have no form in UTF-8
        return
    put = {k: v for k, v in put.items() if k not in drop and not isinstance(parsed(v), Exception)}
    edited = ObjectText(text).edit(drop, put)
    expected = {k: v for k, v in parsed(text).items() if k not in drop} | {k: parsed(v) for k, v in put.items()}
    assert same(parsed(edited), expected)


@bounded
@given(st.binary(max_size=60) | texts() | nested())
@example(b'{"a":1,"a":2}')
def test_what_is_an_object_is_what_python_takes_for_one(text: bytes) -> None:
    expected = parsed(text)
    try:
        body = ObjectText(text)
    except JSONTextError:
        assert not isinstance(expected, dict) or len(text) > 800, "refused, and is no object of a usual depth"
        return
    if isinstance(expected, dict):
        assert {m.name for m in body.members} == set(expected)


@bounded
@given(nested() | texts())
def test_a_value_has_a_canonical_form_or_is_refused(text: bytes) -> None:
    try:
        value = loads(text)
    except JSONTextError:
        return
    assert isinstance(canonical(value), bytes)


def holds(value: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether transfer parameters are in it, at any depth."""
    if isinstance(value, Mapping):
        return any(name in HIDDEN or holds(v) for name, v in value.items())
    return isinstance(value, list) and any(holds(v) for v in value)


hiding = st.recursive(
    values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.sampled_from(HIDDEN), inner, max_size=4),
    max_leaves=8,
)
containers = ("vllm_xargs", "extra_args", "sampling_params", "extra_body", "metadata")


@bounded
@given(texts(st.dictionaries(names | st.sampled_from(HIDDEN + containers), hiding, max_size=6)), st.booleans())
def test_transfer_parameters_are_scrubbed_from_a_request(text: bytes, escape: bool) -> None:  # noqa: FBT001
    text = text.replace(b"_", b"\\u005f") if escape else text
    try:
        body = parsed(scrub_body(ObjectText(text)).text)
    except JSONTextError:
        return
    assert not set(HIDDEN) & set(body)
    assert not any(holds(body[name]) for name in containers if name in body)


@bounded
@given(nested(), st.booleans())
def test_no_depth_harms_the_scrubbing(text: bytes, container: bool) -> None:  # noqa: FBT001
    body = b'{"model":"transfer_params","%s":%s}' % (b"metadata" if container else b"x", text)
    try:
        scrub_body(ObjectText(body))
        drop_nested(b'["transfer_params",' + text + b"]", HIDDEN)
    except JSONTextError:
        pass


# --- events ---

lines = st.one_of(
    texts(objects).map(lambda t: b"data: " + t.replace(b"\r", b" ").replace(b"\n", b" ")),
    st.sampled_from(
        [b"", b": a comment", b"event: x", b"data", b"data:[DONE]", b"data: {", b"retry: 5", b"\xef\xbb\xbf"]
    ),
    st.binary(max_size=12),
)
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
streams = st.lists(
    st.builds(lambda line, end, more: line + end * more, lines, ends, st.integers(1, 3)), max_size=8
).map(b"".join)


@bounded
@given(streams, cuts)
def test_events_are_cut_at_their_ends_wherever_the_bytes_were_cut(stream: bytes, offsets: list[int]) -> None:
    decoder = SSEDecoder()
    pieces = [decoder.decode(piece) for piece in at(offsets, stream)] + [decoder.flush()]
    assert b"".join(pieces) == stream
    cut = [event.data for piece in pieces for event in split_events(piece) if event.data is not None]
    assert cut == [event.data for event in split_events(stream) if event.data is not None]


@bounded
@given(streams, cuts, st.sampled_from(APIS), st.integers(20, 400))
def test_what_holds_no_handle_passes_byte_for_byte(stream: bytes, offsets: list[int], api: Any, limit: int) -> None:  # noqa: ANN401 - one of several
    capture = open_capture("text/event-stream", api.answer(), event_bytes=limit, response_bytes=limit)
    out = b"".join([capture.decode(piece) for piece in at(offsets, stream)]) + capture.flush()
    assert out == stream
    assert not capture.handle


@bounded
@given(
    st.lists(holding() | texts(objects), min_size=1, max_size=4),
    cuts,
    ends,
    st.sampled_from(APIS),
    st.sampled_from([30, 300, 1 << 20]),
    st.integers(0, 9),
)
def test_no_handle_is_left_in_a_stream(  # noqa: PLR0917 - drawn
    bodies: list[bytes],
    offsets: list[int],
    end: bytes,
    api: Any,  # noqa: ANN401 - one of several
    limit: int,
    lost: int,
) -> None:
    stream = b"".join(b"data: " + b.replace(b"\r", b" ").replace(b"\n", b" ") + end * 2 for b in bodies)
    stream = stream[: len(stream) - lost]
    capture = open_capture("text/event-stream", api.answer(), event_bytes=limit, response_bytes=limit)
    out = b"".join([capture.decode(piece) for piece in at(offsets, stream)]) + capture.flush()
    assert SECRET.encode() not in out
    assert capture.failed is None


@bounded
@given(holding(), cuts, st.sampled_from(APIS), st.sampled_from([30, 1 << 20]), st.integers(0, 9))
def test_no_handle_is_left_in_a_body(text: bytes, offsets: list[int], api: Any, limit: int, lost: int) -> None:  # noqa: ANN401 - one of several
    text = text[: len(text) - lost]
    capture = open_capture("application/json", api.answer(), event_bytes=limit, response_bytes=limit)
    out = b"".join([capture.decode(piece) for piece in at(offsets, text)]) + capture.flush()
    assert SECRET.encode() not in out
    assert capture.failed is None
    if not lost:
        assert out == strip_body(text)[0] or limit < len(text)


@bounded
@given(holding() | texts(objects), cuts)
def test_stripping_a_passing_text_is_stripping_the_whole(text: bytes, offsets: list[int]) -> None:
    stripper = MemberStripper(HIDDEN)
    out = b"".join([stripper.decode(piece) for piece in at(offsets, text)]) + stripper.flush()
    if not isinstance(parsed(text), Exception):
        assert same(parsed(out), parsed(strip_body(text)[0]))
