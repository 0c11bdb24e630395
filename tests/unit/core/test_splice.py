"""What differs between two bodies: always enough to make the one of the other, and little where little differs."""

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core.splice import Piece, pieces

BODY = b"".join(b"%d," % i for i in range(2000))  # 8 KB, no part of which is like another


def made(old: bytes, of: Sequence[Piece]) -> bytes:
    """The new body."""
    assert all(isinstance(p, bytes) or 0 <= p[0] < p[1] <= len(old) for p in of)
    assert b"" not in of
    return b"".join(p if isinstance(p, bytes) else old[p[0] : p[1]] for p in of)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"", b"", []),
        (b"abc", b"", []),
        (b"", b"abc", [b"abc"]),
        (b"abc", b"abc", [(0, 3)]),
        (b"abc", b"xyz", [b"xyz"]),
        (b"abc", b"abcd", [(0, 3), b"d"]),
        (b"abc", b"ab", [(0, 2)]),
        (b"abc", b"bc", [(1, 3)]),
        (b"abc", b"axc", [(0, 1), b"x", (2, 3)]),
        (b"aaa", b"aa", [(0, 2)]),  # what is alike at both ends is taken once
        (b"aa", b"aaa", [(0, 2), b"a"]),
        (BODY, b"{" + BODY, [b"{", (0, len(BODY))]),
        (BODY, BODY[:1000] + BODY[1500:], [(0, 1000), (1500, len(BODY))]),
        (BODY, BODY[:1000] + b"new" + BODY[1000:], [(0, 1000), b"new", (1000, len(BODY))]),
        (
            BODY,
            BODY[:10] + b"new" + BODY[10:3000] + BODY[3900:7000] + b"x" * 4000 + BODY[7000:],
            [(0, 10), b"new", (10, 3000), (3900, 7000), b"x" * 4000, (7000, len(BODY))],
        ),
    ],
)  # fmt: skip
def test_what_differs(old: bytes, new: bytes, expected: Sequence[Piece]) -> None:
    assert pieces(old, new) == expected
    assert made(old, expected) == new


_ANY = st.lists(
    st.one_of(st.binary(max_size=50), st.sampled_from([b"a" * 40, b"ab" * 30, BODY[:100], BODY[-6000:]]))
).map(b"".join)


@given(old=_ANY, new=_ANY)
def test_any_body_can_be_made_of_any_other(old: bytes, new: bytes) -> None:
    assert made(old, pieces(old, new)) == new


@given(
    old=_ANY,
    edits=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 5000), st.binary(max_size=90)), max_size=20),
)
def test_any_edits_are_found_or_given_up(old: bytes, edits: list[tuple[int, int, bytes]]) -> None:
    new = old
    for at, size, put in edits:
        new = new[:at] + put + new[at + size :]
    assert made(old, pieces(old, new)) == new


_LONG = random.Random(6).randbytes(3 << 16)


@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("off", [-2, -1, 0, 1])
def test_an_edit_is_found_at_the_edge_of_a_block_too(block: int, off: int) -> None:
    at = min((block << 16) + off, len(_LONG))
    assert pieces(_LONG, _LONG[:at] + b"new" + _LONG[at:])[:2] == [(0, at), b"new"]


def test_of_a_megabyte_only_the_edited_members_are_new() -> None:
    rng = random.Random(5)
    text = [{"role": "user", "content": f"{rng.random()} {i}"} for i in range(20_000)]
    old = json.dumps({"kv_transfer_params": {"a": 1}, "messages": text, "seed": 5, "metadata": {"b": 1}}).encode()
    handle = {"remote_block_ids": [rng.randrange(10**6) for _ in range(300)]}
    new = json.dumps({"messages": text, "seed": 5, "metadata": {}, "kv_transfer_params": handle}).encode()
    assert len(old) > 1_000_000
    out = pieces(old, new)
    assert made(old, out) == new
    assert sum(len(p) for p in out if isinstance(p, bytes)) < len(json.dumps(handle)) + 100
