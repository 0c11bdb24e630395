import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core import jsontext
from kvreturn.core.jsontext import JSONTextError, ObjectText, drop_nested, loads

SPACE = st.text(alphabet=" \t\n\r", max_size=3)
NAMES = st.sampled_from(["a", "b", "kv_transfer_params", "", 'qu"ote', "back\\slash", "é", "😀", "\x7f", "\ud800"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud83d", '"', "\\", '\\"', "}", "{", "\\u007d"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)


@st.composite
def literals(draw: st.DrawFn, text: str) -> str:
    """A JSON string literal of `text`, some of its characters written as escapes."""
    out = []
    for c in text:
        must = c in '"\\' or c < " " or "\ud800" <= c <= "\udfff"
        if must or draw(st.booleans()):
            units = c.encode("utf-16-be", "surrogatepass")
            out.append("".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2)))
        else:
            out.append(c)
    return '"' + "".join(out) + '"'


@st.composite
def objects(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, bytes]]]:
    """The text of an object, and its members: names decoded, values raw. Names may repeat, spaces stand anywhere."""
    members = []
    text = draw(SPACE) + "{" + draw(SPACE)
    for i, name in enumerate(draw(st.lists(NAMES, max_size=5))):
        value = json.dumps(draw(VALUES), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # no raw lone surrogates
        text += ("," + draw(SPACE) if i else "") + draw(literals(name)) + draw(SPACE) + ":" + draw(SPACE)
        text += value + draw(SPACE)
        members.append((name, value.encode()))
    return (text + "}" + draw(SPACE)).encode(), members


def same(a: Any, b: Any) -> bool:  # noqa: ANN401 - JSON
    """Equality that tells 1 from True and from 1.0, and takes NaN for equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


@pytest.fixture(params=["fast", "slow"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which scanner finds the members."""
    if request.param == "slow":
        monkeypatch.setattr(jsontext, "_fast", jsontext._slow)
    return str(request.param)


# --- finding members ---


@given(objects())
def test_members_are_found_with_their_decoded_names_and_raw_values(case: tuple[bytes, list[tuple[str, bytes]]]) -> None:
    text, members = case
    found = ObjectText(text).members
    assert [(m.name, text[m.value : m.end]) for m in found] == members


@given(objects())
def test_the_fast_and_the_slow_scanner_agree(case: tuple[bytes, list[tuple[str, bytes]]]) -> None:
    text, _ = case
    slow = jsontext._slow(text)
    try:
        fast = jsontext._fast(text)
    except Exception:  # noqa: BLE001 - it may give up, for whatever reason, but never be wrong
        return
    assert fast == slow


@given(objects())
def test_get_and_load_give_the_last_of_several_members_as_the_standard_library_does(
    case: tuple[bytes, list[tuple[str, bytes]]],
) -> None:
    text, members = case
    body, expected = ObjectText(text), json.loads(text)
    assert {name: loads(raw) for name, raw in members}.keys() == expected.keys()
    for name, value in expected.items():
        assert name in body
        assert same(body.load(name), value)
        assert same(json.loads(body.get(name) or b""), value)
    assert "absent" not in body
    assert body.get("absent") is None
    assert body.load("absent") is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (b"{}", []),
        (b" \t\r\n{ \n} \n", []),
        (b'{"a":1}', ["a"]),
        (b'{"\\u0061":1}', ["a"]),
        (b'{"\\"":1}', ['"']),
        (b'{"\\\\":1}', ["\\"]),
        (b'{"a":"}","b":"\\"}"}', ["a", "b"]),
        (b'{"a":{"a":{"a":[]}},"b":[{"b":{}}]}', ["a", "b"]),
        (b'{"a":NaN,"b":-Infinity}', ["a", "b"]),
        (b'{"a":"\\ud800"}', ["a"]),
        (b'{"\\ud83d":1}', ["\ud83d"]),
        (b'{"a":1,"a":12,"a":1}', ["a", "a", "a"]),  # the last value is a prefix of one before
        (b'{"a":123456789012345678901234567890,"b":1e400,"c":-0.0}', ["a", "b", "c"]),
        ('{"é":"\U0001f600"}'.encode(), ["é"]),
    ],
)
def test_members_of_valid_objects(path: str, text: bytes, names: list[str]) -> None:
    del path
    assert [m.name for m in ObjectText(text).members] == names


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"a"',
        b"{",
        b"}",
        b'{"a"}',
        b'{"a":}',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}',
        b'{,"a":1}',
        b'{"a":1 "b":2}',
        b'{"a":1}}',
        b'{"a":1}{"b":2}',
        b'{"a":1}\x00',
        b"{a:1}",
        b"{'a':1}",
        b'{"a":01}',
        b'{"a":1.}',
        b'{"a":.5}',
        b'{"a":+1}',
        b'{"a":tru}',
        b'{"a":nullx}',
        b'{"a":[1,]}',
        b'{"a":"\\q"}',
        b'{"a":"\\u12"}',
        b'{"a":"\n"}',
        b'{"a\n":1}',
        b'{"a\x00":1}',
        b'{"a\\\n":1}',
        b'{"\\q":1}',
        b'{"a\\":1}',
        b'{\x0b"a":1}',
        b'{"a":\xa01}',
        b'{"\xff":1}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',  # a surrogate in UTF-8
        b'\xef\xbb\xbf{"a":1}',  # byte order mark
        '{"a":1}'.encode("utf-16"),
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
)
def test_what_is_not_exactly_one_object_is_refused(path: str, text: bytes) -> None:
    del path
    with pytest.raises(JSONTextError):
        ObjectText(text)


@given(st.binary(max_size=12) | st.text(alphabet='{}[]":,\\u0aeE+-.1 nult', max_size=14).map(str.encode))
def test_an_object_is_accepted_exactly_where_the_standard_library_finds_one(text: bytes) -> None:
    try:
        expected = isinstance(json.loads(text.decode()), dict)
    except ValueError:
        expected = False
    try:
        ObjectText(text)
        accepted = True
    except JSONTextError:
        accepted = False
    assert accepted == expected


def test_errors_name_the_place_and_stay_short() -> None:
    with pytest.raises(JSONTextError, match=r"not JSON: .*\(char 5\)"):
        ObjectText(b'{"a":x}' + b" " * 10_000)
    with pytest.raises(JSONTextError, match="not JSON: neither a member nor the end of the object at byte 6"):
        ObjectText(b'{"a":1 "b":2}')
    with pytest.raises(JSONTextError, match="nested too deeply"):
        ObjectText(b'{"a":' + b"[" * 100_000)
    with pytest.raises(JSONTextError) as info:
        ObjectText(b'{"a":' + b"9" * 100_000 + b"x}")
    assert len(str(info.value)) <= 200


# --- editing ---


@given(objects(), st.sets(NAMES, max_size=4), st.dictionaries(NAMES, VALUES, max_size=3), st.booleans())
def test_edit_equals_the_same_edit_of_a_dict(
    case: tuple[bytes, list[tuple[str, bytes]]],
    drop: set[str],
    put: dict[str, Any],
    slow: bool,  # noqa: FBT001
) -> None:
    text, members = case
    body = ObjectText(text)
    if slow:
        body.members = jsontext._slow(text)
    raw = {k: json.dumps(v).encode() for k, v in put.items()}
    edited = body.edit(drop=drop, put=raw)
    assert body.edited(drop, raw).text == edited
    assert body.edited(drop, raw).members == ObjectText(edited).members
    expected = json.loads(text)
    for name in drop:
        expected.pop(name, None)
    expected |= put
    result = json.loads(edited)
    assert result.keys() == expected.keys()
    assert all(same(result[k], json.loads(json.dumps(v))) for k, v in expected.items())
    # Members that were not touched are there byte for byte, in their order.
    kept = [(n, v) for n, v in members if n not in drop and n not in put]
    found = [(m.name, edited[m.value : m.end]) for m in ObjectText(edited).members]
    assert [m for m in found if m[0] not in put] == kept
    assert all([n for n, _ in found].count(name) == 1 for name in put)


@pytest.mark.parametrize(
    ("text", "drop", "put", "expected"),
    [
        # One member, first, middle, last; the comma that goes is the one before, or the one behind the first.
        (b'{"a":1}', ["a"], {}, b"{}"),
        (b'{ "a" : 1 }', ["a"], {}, b"{  }"),
        (b'{"a":1, "b":2, "c":3}', ["a"], {}, b'{"b":2, "c":3}'),
        (b'{"a":1, "b":2, "c":3}', ["b"], {}, b'{"a":1, "c":3}'),
        (b'{"a":1, "b":2, "c":3}', ["c"], {}, b'{"a":1, "b":2}'),
        (b'{"a":1, "b":2, "c":3}', ["a", "b"], {}, b'{"c":3}'),
        (b'{"a":1, "b":2, "c":3}', ["b", "c"], {}, b'{"a":1}'),
        (b'{"a":1, "b":2, "c":3}', ["a", "c"], {}, b'{"b":2}'),
        (b'{"a":1, "b":2, "c":3}', ["a", "b", "c"], {}, b"{}"),
        # Replaced in place, added at the end.
        (b'{"a":1, "b":2}', [], {"a": b"9"}, b'{"a":9, "b":2}'),
        (b'{"a":1, "b":2}', [], {"b": b"9"}, b'{"a":1, "b":9}'),
        (b'{"a":1, "b":2}', [], {"c": b"9"}, b'{"a":1, "b":2,"c":9}'),
        (b"{}", [], {"c": b"9"}, b'{"c":9}'),
        (b"{ }", [], {"c": b"9", "d": b"8"}, b'{"c":9,"d":8 }'),
        # Both: every place of the dropped one against every place of the put one.
        (b'{"a":1,"b":2,"c":3}', ["a"], {"b": b"9"}, b'{"b":9,"c":3}'),
        (b'{"a":1,"b":2,"c":3}', ["a"], {"c": b"9"}, b'{"b":2,"c":9}'),
        (b'{"a":1,"b":2,"c":3}', ["b"], {"a": b"9"}, b'{"a":9,"c":3}'),
        (b'{"a":1,"b":2,"c":3}', ["b"], {"c": b"9"}, b'{"a":1,"c":9}'),
        (b'{"a":1,"b":2,"c":3}', ["c"], {"a": b"9"}, b'{"a":9,"b":2}'),
        (b'{"a":1,"b":2,"c":3}', ["c"], {"b": b"9"}, b'{"a":1,"b":9}'),
        (b'{"a":1,"b":2,"c":3}', ["c"], {"d": b"9"}, b'{"a":1,"b":2,"d":9}'),
        (b'{"a":1,"b":2,"c":3}', ["a", "b", "c"], {"d": b"9"}, b'{"d":9}'),
        (b'{"a":1,"b":2}', ["a"], {"a": b"9"}, b'{"b":2,"a":9}'),
        # Several of one name.
        (b'{"a":1,"b":2,"a":3}', ["a"], {}, b'{"b":2}'),
        (b'{"a":1,"b":2,"a":3}', [], {"a": b"9"}, b'{"b":2,"a":9}'),
        (b'{"a":1,"a":2,"a":3}', [], {"a": b"9"}, b'{"a":9}'),
        # Names with escapes.
        (b'{"\\u0061":1,"b":2}', ["a"], {}, b'{"b":2}'),
        (b'{"b":2,"\\u0061":1}', [], {"a": b"9"}, b'{"b":2,"\\u0061":9}'),
        (b"{}", [], {'"\n': b"1"}, b'{"\\"\\n":1}'),
        # All else stays as it was, however it was written.
        (b'{"a":1.50e+1 ,\r\n\t"m":"\\u00e9\\/", "x":[ 1,2 ]\n}\n', ["a"], {}, b'{"m":"\\u00e9\\/", "x":[ 1,2 ]\n}\n'),
    ],
)
def test_edit_by_hand(path: str, text: bytes, drop: list[str], put: dict[str, bytes], expected: bytes) -> None:
    del path
    assert ObjectText(text).edit(drop=drop, put=put) == expected
    edited = ObjectText(text).edited(drop, put)
    assert (edited.text, edited.members) == (expected, ObjectText(expected).members)


def test_an_edit_without_effect_gives_the_same_bytes() -> None:
    text = b' {"a" :\t1,"a":2 , "b":NaN}\r\n'
    assert ObjectText(text).edit(drop=["absent"]) == text
    assert ObjectText(text).without([]) == text
    assert ObjectText(text).map_values(["a", "b", "absent"], lambda raw: raw) == text


def test_map_values_reaches_all_members_of_the_name() -> None:
    text = b'{"a": 1, "b": 2, "a": 3}'
    assert ObjectText(text).map_values(["a"], lambda raw: b"<" + raw + b">") == b'{"a": <1>, "b": 2, "a": <3>}'


def test_a_large_body_is_edited_without_reading_its_values() -> None:
    body = b'{"messages":[' + b",".join([b'{"role":"user","content":"\\ud83d \xc3\xa9"}'] * 60_000) + b'],"n":2}'
    assert len(body) > 1 << 21
    assert ObjectText(body).edit(put={"n": b"1"}) == body.replace(b'"n":2', b'"n":1')


# --- loads and drop_nested ---


@pytest.mark.parametrize(
    "text",
    [
        b"NaN",
        b"[Infinity,-Infinity]",
        b'"\\ud800"',
        b'{"a":1,"a":2}',
        b"123456789012345678901234567890",
        b"-9223372036854775809",
        b"1e400",
        b"9007199254740993.0",
        b"0.1e-7",
        b"-0.0",
        b" [ true , null ]\n",
    ],
)
def test_loads_gives_what_the_standard_library_gives(text: bytes) -> None:
    for form in (bytes, bytearray, memoryview):
        assert same(loads(form(text)), json.loads(text))


@pytest.mark.parametrize("text", [b"", b"{", b"[1,]", b"1 2", b"\xff", b"'a'", b"[" * 100_000, b"1" * 5000])
def test_loads_refuses_what_the_standard_library_refuses(text: bytes) -> None:
    with pytest.raises(JSONTextError):
        loads(text)


@given(VALUES, st.sets(NAMES, max_size=3))
def test_drop_nested_equals_dropping_from_the_decoded_value(value: Any, names: set[str]) -> None:  # noqa: ANN401 - JSON
    def prune(v: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(v, dict):
            return {k: prune(x) for k, x in v.items() if k not in names}
        return [prune(x) for x in v] if isinstance(v, list) else v

    raw = json.dumps(value, indent=1).encode()
    dropped = drop_nested(raw, names)
    assert same(json.loads(dropped), json.loads(json.dumps(prune(value))))
    if same(prune(value), value):
        assert dropped == raw


def test_drop_nested_gives_text_that_an_object_may_hold_whatever_it_held() -> None:
    raw = b'{"k":1,"lone":"\\ud800","n":NaN,"big":123456789012345678901234567890,"\xc3\xa9":"\xf0\x9f\x98\x80"}'
    clean = drop_nested(raw, ["k"])
    value = ObjectText(b'{"metadata":' + clean + b"}").load("metadata")
    assert value.pop("n") != value.get("n")
    assert value == {"lone": "\ud800", "big": 123456789012345678901234567890, "é": "😀"}


@pytest.mark.parametrize("make", [lambda d: b"[" * d + b'{"k":1}' + b"]" * d, lambda d: b'{"a":' * d + b"1" + b"}" * d])
def test_drop_nested_refuses_what_is_too_deep_at_any_depth(make: Callable[[int], bytes]) -> None:
    refusals = []
    for depth in range(100, 2000, 7):
        try:
            assert b'"k"' not in drop_nested(make(depth), ["k"])
        except JSONTextError as e:
            refusals.append(str(e))
    assert set(refusals) == {"nested too deeply"}
