"""Requests that are made to hurt: deep, huge, or slow to look at. Each is answered, soon, and none by an exception."""

import contextlib
import json
import time
import zlib
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest

from kvreturn.core.api import API, APIS, Chat
from kvreturn.core.identity import find_session
from kvreturn.core.jsontext import JSONTextError, ObjectText
from kvreturn.core.policy import Policy
from kvreturn.core.ports import Ask, Forward, Refuse, Taken
from kvreturn.core.refusal import strip_refusal
from kvreturn.core.turn import Turn
from kvreturn.server.intake import is_json, scrubbed, stored_response
from kvreturn.server.response import Inflater
from support.turns import SCOPE, Judge, p_reply, tokenized

DEPTHS = (100, 400, 498, 950, 975, 985, 990, 995, 1000, 100_000)
NUMBERS = (
    b"9" * 4_000,
    b"9" * 5_000,
    b"9" * 1_000_000,
    b"1e99999",
    b"-1e400",
    b"NaN",
    b"-Infinity",
    b"0." + b"1" * 9_999,
)
# Where the client can put a value of its own, by API.
PLACES = {
    "chat": [
        b'"messages":[{"role":"user","content":%s}]',
        b'"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]}]',
    ],
    "messages": [
        b'"system":%s,"messages":[{"role":"user","content":"x"}]',
        b'"messages":[{"role":"assistant","content":[{"type":"tool_use","input":%s}]}]',
    ],
    "responses": [b'"input":[{"type":"function_call","arguments":%s}]', b'"input":"x","instructions":%s'],
    "completions": [b'"prompt":%s', b'"prompt":"x","suffix":%s'],
}
ANYWHERE = [b'"%s":VALUE,' % name for name in (b"metadata", b"cache_salt", b"model", b"n", b"conversation", b"zzz")]
POLICIES = [Policy(proof="connector", salts=True), Policy(proof="trusted"), Policy(proof="router", returns="eager")]


def decide(api: API, policy: Policy, body: bytes) -> Forward | Refuse:
    turn = Turn(api, SCOPE, lambda _: policy, Judge(), partial(find_session, {}))
    steps = turn.request(body)
    try:
        effect = next(steps)
        while True:
            tokenize = isinstance(effect, Ask) and effect.path == "/tokenize"
            reply = tokenized(range(200)) if tokenize else p_reply()
            effect = steps.send(reply if isinstance(effect, Ask) else Taken())
    except StopIteration as stop:
        decision: Forward | Refuse = stop.value
        return decision


def bodies(api: API, value: bytes) -> list[bytes]:
    first = PLACES[api.name][0].replace(b"%s", b'"x"')
    inside = [place.replace(b"%s", value) for place in PLACES[api.name]]
    return [b"{" + text + b"}" for text in [*inside, *(a.replace(b"VALUE", value) + first for a in ANYWHERE)]]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.proof)
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_however_deep_and_however_large_numbers_are(api: API, policy: Policy) -> None:
    shapes: list[Callable[[int], bytes]] = [lambda n: b"[" * n + b"]" * n, lambda n: b'{"a":' * n + b"1" + b"}" * n]
    deep = [shape(n) for shape, n in product(shapes, DEPTHS)]
    quoted = [json.dumps(text.decode()).encode() for text in deep]  # JSON in a text, as tool arguments are
    for value in [*deep, *quoted, *NUMBERS, *(b"[%s]" % n for n in NUMBERS)]:
        for body in bodies(api, value):
            decision = decide(api, policy, body)
            assert isinstance(decision, Forward) or decision.status == 400


def user(text: bytes) -> ObjectText:
    return ObjectText(b'{"metadata":{"user_id":"%s"}}' % text)


N = 100_000
EVIL: list[tuple[str, Callable[[], object]]] = [
    *((f"body {text[:8]!r}", partial(ObjectText, text)) for text in (
        b'{"' + b"\\\\" * N,
        b'{"' + b"\\u0061" * N + b'":1}',
        b"{" + b" " * N,
        b'{"a"' + b" " * N,
        b'{"a":1' + b" " * N,
        b'{"a":1,' * N,
        b"{" + b'"":1,' * 9_000 + b'"x":1}',
        b'{"a":"' + b'\\"' * N,
    )),
    *((f"refusal {text[:8]!r}", partial(strip_refusal, text, Chat(), 400)) for text in (
        b"kv_transfer_params': {" * 5_000,
        b"kv_transfer_params" + b"' :" * N,
        b"kv_transfer_params: {" + b'\\"' * N,
        b"{" * N,
        b"kvreturn-salt-" * 9_000,
    )),
    *((f"path {text[:4]}", partial(stored_response, {":path": f"/v1/responses/{text}"})) for text in (
        "/" * N, "a/" * N, "%2f" * N, "/%" * N,
    )),
    *((f"type {text[:9]}", partial(is_json, {"content-type": f"application/{text}"})) for text in (
        "+" * N, "a+" * N, "a" * N,
    )),
    *((f"form {kind[-9:]}", partial(scrubbed, body, {"content-type": kind})) for kind, body in (
        ("multipart/form-data; " + "charset=" * N, b""),
        ("multipart/form-data; charset" + " " * N, b""),
        ("multipart/form-data", b"\\u00" * N),
        ("application/x-www-form-urlencoded", b"%5C" * N),
    )),
    *((f"user {text[:9]!r}", partial(find_session, {}, user(text))) for text in (
        b"user_a_account_" + b"_session_" * 55,
        b"user_a_account_" + b"_session_a" * 49 + b"!",
        b"[" * 60_000,
    )),
]  # fmt: skip


@pytest.mark.parametrize("look", [e[1] for e in EVIL], ids=[e[0] for e in EVIL])
def test_no_text_is_slow_to_look_at(look: Callable[[], object]) -> None:
    """Ten times as fast on an idle machine; what backtracks would take hours."""
    begun = time.process_time()
    with contextlib.suppress(JSONTextError):
        look()
    assert time.process_time() - begun < 2


# --- responses that say they are compressed ---


def test_a_decompression_bomb_is_given_up() -> None:
    bomb = zlib.compress(b"\0" * (8 << 20), wbits=31)
    assert len(bomb) < 10_000
    assert len(Inflater(8 << 20).decode(bomb)) == 8 << 20
    with pytest.raises(zlib.error, match="more than 1048576 bytes"):
        Inflater(1 << 20).decode(bomb)


def test_a_bomb_of_many_small_members_is_given_up() -> None:
    member = zlib.compress(b"", wbits=31)
    assert Inflater(1 << 20).decode(member * 60) == b""
    with pytest.raises(zlib.error, match="64 members"):
        Inflater(1 << 20).decode(member * 100_000)
    half = zlib.compress(b"\0" * (600 << 10), wbits=31)
    with pytest.raises(zlib.error, match="more than"):
        Inflater(1 << 20).decode(half * 2)
