"""The fast lane's packed answers: worked out by hand, and whatever the script makes of a stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core.packed import unpack
from support.lanes import packed

TOKEN = 'data: {{"choices":[{{"index":0,"delta":{{"content":"{}"}},"finish_reason":null}}]}}\n\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", b""),
        (b"raw 3\nabc", b"abc"),
        (b"raw 0\n", b""),
        (b"raw 6\nraw 3\nraw 1\n\n", b"raw 3\n\n"),
        (b"run 1 2 1\n<>\nx", b"<x>\n"),
        (b"run 1 2 3\n<>\nx\ny", b"<x>\n<y>\n"),
        (b"run 1 2 2\n<>\n\n\n", b"<>\n<>\n<>\n"),
        (b"run 1 2 0\n<>\n", b"<>\n"),
        (b"raw 1\na" + b"run 1 1 1\n<>b" + b"raw 1\nc", b"a<b>c"),
    ],
    ids=repr,
)
def test_records_are_put_together(text: bytes, expected: bytes) -> None:
    assert unpack(text) == expected


@pytest.mark.parametrize(
    "text",
    [b"x", b"raw\n", b"raw 3\nab", b"run 1 2\n<>\n", b"run 1 2 9\n<>\nx", b"raw 1\nab", b"raw -1\n", b"raw 99\n"],
    ids=repr,
)
def test_what_is_no_such_text_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        unpack(text)


def test_of_tokens_only_their_middles_are_kept() -> None:
    pieces = [TOKEN.format(f" token {i}").encode() for i in range(1000)]
    text = packed(pieces)
    assert unpack(text) == b"".join(pieces)
    assert len(text) < 1000 * len("token 999\n") + 6 * len(pieces[0])


def test_pieces_of_two_forms_in_turn_are_kept_whole_or_not_but_never_wrong() -> None:
    pieces = [(TOKEN.format(i) if i % 2 else f"event: ping\ndata: {i}\n\n").encode() for i in range(50)]
    assert unpack(packed(pieces)) == b"".join(pieces)


_PIECES = st.one_of(
    st.builds(TOKEN.format, st.text(max_size=4)).map(str.encode),
    st.binary(min_size=1, max_size=80),
    st.sampled_from([b"a" * 60, b"a" * 61, b"a" * 120, b"a" * 59 + b"\n", b"\n\n", b"a" * 50 + b"\n" + b"a" * 50]),
)


@given(st.lists(_PIECES, max_size=30), st.sets(st.integers(0, 30)))
def test_whatever_passes_comes_back_in_order(pieces: list[bytes], takes: set[int]) -> None:
    assert unpack(packed(pieces, takes)) == b"".join(pieces)
