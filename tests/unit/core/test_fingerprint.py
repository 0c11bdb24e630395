import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core.fingerprint import Scope, Trail, canonical, keyed_hash, segments

SCOPE = Scope(b"k" * 32, b"tenant")
ITEMS = [b"one", b"two", b"three"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def shuffled(value: Any) -> Any:  # noqa: ANN401 - JSON
    """The same value, members in the opposite order."""
    if isinstance(value, dict):
        return {k: shuffled(value[k]) for k in reversed(value)}
    return [shuffled(v) for v in value] if isinstance(value, list) else value


# --- canonical ---


@given(JSON)
def test_canonical_is_json_of_the_same_value_whatever_the_order_of_members(value: Any) -> None:  # noqa: ANN401 - JSON
    assert canonical(value) == canonical(shuffled(value))
    assert canonical(json.loads(canonical(value))) == canonical(value)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (1, "1"),
        (None, "null"),
        ("", None),
        ([], {}),
        (["a", "b"], ["a,b"]),
        (["a"], "a"),
        ({"a": 1}, {"a": {"a": 1}}),
        ("\ud800", "\\ud800"),
        ("\ud800", "\ufffd"),
        ("\ud800", "?"),
        (2**70, float(2**70)),
    ],
)
def test_canonical_tells_values_apart(a: object, b: object) -> None:
    assert canonical(a) != canonical(b)


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, [2**64], -(2**70), {"a": ["\ud83d", 10**30]}])
def test_canonical_takes_whatever_json_can_hold(value: object) -> None:
    assert json.loads(canonical(value)) == value


# --- trails ---


def test_a_trail_has_a_digest_for_each_prefix() -> None:
    trail = SCOPE.trail(["chat"], ITEMS)
    assert trail.depth == 3
    assert len(set(trail.digests)) == 4
    for i in range(4):
        assert SCOPE.trail(["chat"], ITEMS[:i]).digests == trail.digests[: i + 1]
        assert SCOPE.trail(["chat"], ITEMS[:i]).extend(ITEMS[i:]) == trail


@pytest.mark.parametrize(
    "other",
    [
        Scope(b"l" * 32, b"tenant").trail(["chat"], ITEMS),
        Scope(b"k" * 32, b"tenant2").trail(["chat"], ITEMS),
        Scope(b"k" * 32, b"").trail(["chat"], ITEMS),
        Scope(b"", b"tenant").trail(["chat"], ITEMS),
        SCOPE.trail(["completions"], ITEMS),
        SCOPE.trail([], ITEMS),
        SCOPE.trail(["chat"], [b"onetwo", b"three"]),
        SCOPE.trail(["chat"], [b"on", b"etwo", b"three"]),
        SCOPE.trail(["chat"], [b"two", b"one", b"three"]),
        SCOPE.trail(["chat"], [b"", b"one", b"two", b"three"]),
    ],
    ids=["key", "tenant", "no tenant", "no key", "api", "root", "joined", "split", "order", "empty item"],
)
def test_nothing_of_another_scope_or_prompt_is_ever_found(other: Trail) -> None:
    mine = SCOPE.trail(["chat"], ITEMS)
    assert not set(mine.candidates()) & {other.turn_key(), other.prompt_key()}
    assert not set(other.candidates()) & {mine.turn_key(), mine.prompt_key()}


def test_tenant_and_root_cannot_be_confused() -> None:
    a = Scope(b"", b"t").trail(["x"], [b"i"])
    b = Scope(b"", b't\0["x"]').trail([], [b"i"])
    assert not set(a.candidates()) & set(b.candidates())


def test_the_nearest_predecessor_comes_first_and_a_whole_turn_before_a_prompt() -> None:
    trail = SCOPE.trail(["chat"], ITEMS)
    prefixes = [SCOPE.trail(["chat"], ITEMS[:i]) for i in (3, 2, 1)]
    assert trail.candidates() == [k for p in prefixes for k in (p.turn_key(), p.prompt_key())]


def test_the_root_alone_is_no_place_to_store_or_to_look() -> None:
    # Nothing but an API's name and a model would be equal: all conversations would meet there.
    empty = SCOPE.trail(["chat"], [])
    assert (empty.candidates(), empty.turn_key(), empty.prompt_key()) == ([], None, None)


def test_a_turn_is_found_by_the_prompt_that_holds_its_answer_and_by_its_own_prompt() -> None:
    prompt = SCOPE.trail(["chat"], ITEMS[:1])
    turn = prompt.extend([b"answer"])
    following = SCOPE.trail(["chat"], [*ITEMS[:1], b"answer", b"question"])
    edited = SCOPE.trail(["chat"], [*ITEMS[:1], b"another answer", b"question"])
    assert turn.turn_key() in following.candidates()
    assert turn.turn_key() not in edited.candidates()
    assert prompt.prompt_key() in edited.candidates()
    assert prompt.prompt_key() != prompt.turn_key()


@given(st.lists(st.binary(max_size=4), max_size=6), st.lists(st.binary(max_size=4), max_size=6))
def test_two_prompts_share_exactly_their_common_prefixes(a: list[bytes], b: list[bytes]) -> None:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    trail, other = SCOPE.trail(0, a), SCOPE.trail(0, b)
    assert len(set(trail.digests) & set(other.digests)) == shared + 1


def test_keys_do_not_tell_what_they_stand_for() -> None:
    trail = SCOPE.trail(["chat"], [b"a secret question"])
    assert all(b"secret" not in k and len(k) == 17 for k in trail.candidates())
    assert len(keyed_hash(b"k", b"sk-secret")) == 16
    assert keyed_hash(b"k", b"sk-secret") != keyed_hash(b"l", b"sk-secret")
    assert keyed_hash(b"k", b"a") != keyed_hash(b"k", b"b")


# --- segments ---


@pytest.mark.parametrize(
    ("data", "items"),
    [(b"", []), (b"abc", []), (b"abcd", [b"abcd"]), (b"abcdefg", [b"abcd"]), (b"abcdefgh", [b"abcd", b"efgh"])],
)
def test_segments_leave_out_what_is_not_whole(data: bytes, items: list[bytes]) -> None:
    assert segments(data, 4) == items


def test_a_sessions_own_turns_go_first_and_another_ones_equal_prompt_stays() -> None:
    session = SCOPE.session_key("m", "s")
    prefixes = [SCOPE.trail(["m"], [b"a", b"b", b"c"][:n]) for n in (3, 2, 1)]
    whole = prefixes[0]
    expected = []
    for prefix in prefixes:
        turn, prompt = prefix.turn_key(), prefix.prompt_key()
        assert turn
        assert prompt
        expected += [*prefix.places(turn, session), *prefix.places(prompt, session)]
    expected.remove(whole.prompt_key() or b"")
    assert whole.candidates(session) == expected
    assert len(set(expected)) == 11
    assert not set(whole.candidates(SCOPE.session_key("m", "t"))) & {
        whole.places(k, session)[0] for k in whole.candidates()
    }
    assert SCOPE.trail(["m"], []).candidates(session) == []


def test_far_back_sessions_make_no_difference() -> None:
    trail = SCOPE.trail(["m"], [b"%d" % n for n in range(50)])
    assert len(trail.candidates(b"session")) == 100 + 2 * 8 - 1
    assert trail.candidates(b"session")[-84:] == trail.candidates()[-84:]
