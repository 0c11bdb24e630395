import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core.strip import MemberStripper
from support import cuts

HIDDEN = ("kv", "ec")
NAMES = st.sampled_from(["kv", "ec", "a", "kv2", "k", "", 'q"', "back\\", "{", ",", "response"])
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.sampled_from(["kv", '"kv"', '{"kv":1}', ",", "\\", '\\"', "\n", "]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
SPACED = st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :"), ("\t, ", ": \t")])


def strip(pieces: list[bytes], *, lines: bool = False) -> bytes:
    stripper = MemberStripper(HIDDEN, lines=lines)
    return b"".join(stripper.decode(p) for p in pieces) + stripper.flush()


def pruned(value: Any, depth: int = 1) -> Any:  # noqa: ANN401 - JSON
    """The reference: drops the names from objects that have at most one container around them."""
    if isinstance(value, dict):
        return {k: pruned(v, depth + 1) for k, v in value.items() if depth > 2 or k not in HIDDEN}
    return [pruned(v, depth + 1) for v in value] if isinstance(value, list) else value


@given(VALUES, SPACED, st.sampled_from([None, 1]), st.lists(st.integers(0, 400), max_size=8))
def test_strips_what_dropping_from_the_decoded_value_would(
    value: Any,  # noqa: ANN401 - JSON
    separators: tuple[str, str],
    indent: int | None,
    offsets: list[int],
) -> None:
    text = json.dumps(value, separators=separators, indent=indent).encode()
    stripped = strip(cuts.at(offsets, text))
    assert json.loads(stripped) == pruned(value)
    if pruned(value) == value:
        assert stripped == text


@given(VALUES, SPACED)
def test_cuts_make_no_difference(value: Any, separators: tuple[str, str]) -> None:  # noqa: ANN401 - JSON
    text = json.dumps(value, separators=separators).encode()
    assert strip(cuts.singly(text)) == strip([text])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"kv":1}', b"{}"),
        (b'{"kv":1,"a":2}', b'{"a":2}'),
        (b'{"a":2,"kv":1}', b'{"a":2}'),
        (b'{"a":2,"kv":1,"b":3}', b'{"a":2,"b":3}'),
        (b'{"kv":1,"ec":2}', b"{}"),
        (b'{"kv":1,"a":2,"ec":3}', b'{"a":2}'),
        (b'{"kv":1,"kv":2,"a":3,"kv":4}', b'{"a":3}'),
        (b'{"a":1 , "kv" : {"x":[1,{"kv":"}"}]} , "b":2}', b'{"a":1 , "b":2}'),
        (b'{ "kv" : "\\"," , "a" : "\\"kv\\":1" }', b'{ "a" : "\\"kv\\":1" }'),
        (b'{"response":{"id":1,"kv":{"a":1}},"kv":2}', b'{"response":{"id":1}}'),
        (b'{"a":{"b":{"kv":1}}}', b'{"a":{"b":{"kv":1}}}'),
        (b'{"choices":[{"delta":{"kv":1}}]}', b'{"choices":[{"delta":{"kv":1}}]}'),
        (b'{"a":"kv"}', b'{"a":"kv"}'),
        (b'["kv",{"kv":1}]', b'["kv",{}]'),
        (b"{}", b"{}"),
        (b"{ }", b"{ }"),
        (b"[]", b"[]"),
        (b'"kv"', b'"kv"'),
        (b"1", b"1"),
        (b"", b""),
        (b'{"kv":1}{"kv":2,"a":1} {"a":1,"kv":2}', b'{}{"a":1} {"a":1}'),
    ],
)
def test_strips_by_hand(text: bytes, expected: bytes) -> None:
    for pieces in [[text], *map(list, cuts.in_two(text)), cuts.singly(text)]:
        assert strip(pieces) == expected


def test_counts_what_it_removed() -> None:
    stripper = MemberStripper(HIDDEN)
    stripper.decode(b'{"kv":1,"a":{"ec":2},"b":{"c":{"kv":3}}}')
    assert stripper.removed == 2
    stripper.flush()
    assert stripper.removed == 2


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"b',
        b'{"a":1,',
        b'{"a":1, \n',
        b"{",
        b'{"k',
        b'{"a":"kv',
        b'{"a":1,}',
        b'{"a":1,,"b":2}',
        b"}}]]{",
        b'{[1,"a"]}',
        b'{"a\\',
        b'\\"{"',
        b"not json, at all: {",
        b"\x00\xff\xfe{\x80",
    ],
)
def test_nothing_of_broken_json_is_lost(text: bytes) -> None:
    for lines in (False, True):
        for pieces in [[text], *map(list, cuts.in_two(text)), cuts.singly(text)]:
            assert strip(pieces, lines=lines) == text


@given(st.text(alphabet='{}[]":,\\ nk\n', max_size=30).map(str.encode), st.lists(st.integers(0, 30), max_size=4))
def test_nothing_of_any_text_without_the_names_is_lost(text: bytes, offsets: list[int]) -> None:
    assert strip(cuts.at(offsets, text)) == text
    assert strip(cuts.at(offsets, text), lines=True) == text


# --- lines ---

EVENT = b'data: {"a":1,"kv":{"x":[1]}}'


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(
    "broken",
    [
        b'data: {"a":"cut off',
        b'data: {"a":"cut off\\',
        b'data: {"a":{"b":[{',
        b'data: {"kv":{"x":',
        b'data: {"kv',
        b"data: ]]}}",
        b': a comment with a " and a {',
        b"event: [",
    ],
)
def test_a_line_end_begins_afresh_whatever_was_broken_before(broken: bytes, end: bytes) -> None:
    text = broken + end * 2 + EVENT + end * 2
    kept = broken if b'"kv":' not in broken else b"data: {"
    for pieces in [[text], *map(list, cuts.in_two(text)), cuts.singly(text)]:
        assert strip(pieces, lines=True) == kept + end * 2 + b'data: {"a":1}' + end * 2


def test_without_lines_a_line_end_is_white_space() -> None:
    assert strip([b'{\n"kv":\r\n1\n,\r"a":1}']) == b'{\r"a":1}'


# --- memory and time ---


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b'{"kv":"', b"x" * 1024),
        (b'{"a":"', b"\\u0041" * 170),
        (b'{"kv":[', b"[1,2]," * 170),
        (b'{"', b"n" * 1024),
        (b"{", b" " * 1024),
        (b'{"a":', b"[" * 1024),
        (b"", b'{"a":' * 200),
        (b"", b'{"kv":1}' * 120),
    ],
    ids=["dropped string", "string", "dropped list", "name", "spaces", "lists", "objects", "texts"],
)
def test_memory_does_not_grow_with_the_text(head: bytes, body: bytes) -> None:
    stripper = MemberStripper(HIDDEN)
    stripper.decode(head)
    for _ in range(5):
        stripper.decode(body)
    tracemalloc.start()
    try:
        for _ in range(60):
            stripper.decode(body)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 10_000
