"""Section D of the field reports: session identity.

An id finds nothing by itself here: design.md has the messages find the predecessor, and tokens prove it. So where a
report speaks of the key of a conversation, the id's own key is shown, and where it says `cold`, that nothing is shared.
"""

import json
from typing import Any

import pytest

from kvreturn.core.api import APIS
from kvreturn.core.fingerprint import Scope
from kvreturn.core.identity import find_session
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.ports import Record
from support.extproc import Request, Response
from support.harness import DECODE, harness
from support.nodes import carried_handle, chat, decode_events, handle
from support.turns import compact

JSON = {"content-type": "application/json"}
END = Response(decode_events(params=handle()), node=DECODE)
UUID = "3f2a9a52-8e0c-4b52-9c2f-0a1b2c3d4e5f"


def found(headers: dict[str, str] | None = None, own: str | None = None, **members: Any) -> tuple[str, str] | None:  # noqa: ANN401
    """Source and id of a request's session."""
    session = find_session(headers or {}, ObjectText(compact(members)), own)
    return (session.source, session.id) if session else None


FR92: list[tuple[dict[str, str], dict[str, Any], tuple[str, str] | None]] = [
    ({}, {}, None),
    ({"x-claude-code-session-id": "c", "session-id": "s"}, {}, ("x-claude-code-session-id", "c")),
    ({"session-id": "s"}, {"metadata": {"user_id": '{"session_id":"m"}'}}, ("metadata.user_id", "m")),
    ({"session-id": "s", "x-session-affinity": "a"}, {}, ("session-id", "s")),
    ({"session-id": "s", "thread-id": "t"}, {"prompt_cache_key": "s"}, ("session-id", "s t")),
    ({"session_id": "s", "thread-id": "t"}, {}, ("session_id", "s t")),
    ({"thread-id": "t"}, {}, None),
    ({"x-opencode-session": "o", "x-session-id": "x"}, {}, ("x-opencode-session", "o")),
    ({"x-litellm-session-id": "l", "x-session-id": "x"}, {}, ("x-litellm-session-id", "l")),
    ({"x-litellm-trace-id": "l"}, {"litellm_trace_id": "l"}, None),
    ({"x-session-id": "x", "x-conversation-id": "y"}, {}, ("x-session-id", "x")),
    ({"x-conversation-id": "y", "helicone-session-id": "h"}, {}, ("x-conversation-id", "y")),
    ({"helicone-session-id": "h", "helicone-session-path": "/a"}, {}, ("helicone-session-id", "h")),
    ({}, {"litellm_session_id": "l", "session_id": "s"}, ("litellm_session_id", "l")),
    ({}, {"session_id": "s", "conversation_id": "c"}, ("session_id", "s")),
    ({}, {"conversation_id": "c", "metadata": {"session_id": "m"}}, ("conversation_id", "c")),
    ({}, {"metadata": {"conversation_id": "c", "session_id": "m"}}, ("metadata.session_id", "m")),
    ({}, {"metadata": {"conversation_id": "c"}}, ("metadata.conversation_id", "c")),
    ({}, {"litellm_metadata": {"session_id": "m"}}, ("litellm_metadata.session_id", "m")),
    ({}, {"conversation": "conv_1", "prompt_cache_key": "k"}, ("conversation", "conv_1")),
    ({}, {"conversation": {"id": "conv_1"}}, ("conversation", "conv_1")),
    ({}, {"prompt_cache_key": "k"}, ("prompt_cache_key", "k")),
    ({}, {"user": "u", "safety_identifier": "u", "metadata": {"user_id": "u"}}, None),
    ({"authorization": "Bearer s", "x-request-id": "r", "x-client-request-id": "t"}, {"request_id": "r"}, None),
    ({}, {"previous_response_id": "resp_1"}, None),  # names a response, whose node is known by that
    ({}, {"session_id": 7, "conversation_id": ["c"], "metadata": "m", "conversation": {"id": 3}}, None),
    ({"x-session-id": ""}, {"session_id": "", "prompt_cache_key": "k"}, ("prompt_cache_key", "k")),
]


@pytest.mark.parametrize(("headers", "members", "expected"), FR92)
def test_fr92_one_documented_order(
    headers: dict[str, str], members: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    assert found(headers, **members) == expected


def test_fr92_ones_own_header_goes_first() -> None:
    assert found({"x-chat": "mine", "x-claude-code-session-id": "c"}, own="X-Chat") == ("X-Chat", "mine")
    assert found({"x-claude-code-session-id": "c"}, own="X-Chat") == ("x-claude-code-session-id", "c")


FR93: list[tuple[dict[str, str], Any]] = [
    ({"x-claude-code-session-id": UUID}, "user_x"),
    ({}, json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID})),
    ({}, {"device_id": "d", "session_id": UUID}),
    ({}, f"user_{'0a' * 32}_account__session_{UUID}"),
    ({}, f"user_{'0a' * 32}_account_1b-2c_session_{UUID}"),
]


@pytest.mark.parametrize(("headers", "user_id"), FR93)
def test_fr93_all_forms_of_claude_code_are_one_session(headers: dict[str, str], user_id: object) -> None:
    session = found(headers, metadata={"user_id": user_id})
    assert session
    assert session[1] == UUID


@pytest.mark.parametrize(
    "user_id",
    [
        '{"session_id":',
        "{}",
        '{"session_id":{"a":1}}',
        "[1]",
        "user_1",
        "a_session_b",
        "user__account__session_",
        3,
        None,
    ],
)
def test_fr93_what_is_malformed_is_no_session(user_id: object) -> None:
    assert found(metadata={"user_id": user_id}) is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [({"session-id": "A", "session_id": "B"}, "A"), ({"session_id": "B"}, "B"), ({"session-id": "A"}, "A")],
)
def test_fr94_codex_with_a_hyphen_or_an_underscore(headers: dict[str, str], expected: str) -> None:
    session = found(headers)
    assert session
    assert session[1] == expected


async def test_fr95_the_first_message_alone_identifies_nothing() -> None:
    router = harness()
    await router.turn("CLAUDE.md")
    await router.play(Request(pieces=[chat("CLAUDE.md", "another answer", "And?")]), END)
    carried = carried_handle(router.asks[1].body)
    assert carried is not None  # attached to be proven: P compares tokens, and reads what they have in common
    await router.play(Request(pieces=[chat("CLAUDE.md, edited", "Good morning", "And?")]), END)
    assert carried_handle(router.asks[2].body) is None


async def test_fr96_a_credential_is_no_session() -> None:
    router = harness()
    headers = {**JSON, "authorization": "Bearer agent"}
    for text in ("Hi", "something else"):
        await router.play(Request(pieces=[chat(text)], headers=headers), END)
    assert router.outcomes() == {"first_turn": 2}
    assert router.records == router.handles == 2  # none of a session


async def test_fr97_an_id_of_another_tenant_finds_nothing_and_is_stored_nowhere() -> None:
    router = harness()
    session = {**JSON, "x-session-id": "alices-session"}
    alice, mallory = {**session, "authorization": "Bearer alice"}, {**session, "authorization": "Bearer mallory"}
    await router.play(Request(pieces=[chat("Hi")], headers=alice), END)
    await router.play(Request(pieces=[chat("Hi", "Good morning", "And?")], headers=mallory), END)
    assert carried_handle(router.asks[1].body) is None
    assert router.outcomes() == {"first_turn": 1, "not_a_continuation": 1}
    assert router.handles == 2
    keys = list(router.world.store._index)  # type: ignore[attr-defined] # a MemoryStore
    assert len(keys) > 4
    assert all(len(key) == 17 and b"alice" not in key for key in keys)


def test_fr97_keys_of_sessions_are_those_of_one_tenant_and_one_model() -> None:
    scopes = [Scope(key, tenant) for key in (b"k", b"l") for tenant in (b"a", b"b")]
    keys = {scope.session_key(model, "s") for scope in scopes for model in ("m", "n")}
    assert len(keys) == 8


def test_fr98_opencode() -> None:
    assert found({"x-session-affinity": "s1"}) == ("x-session-affinity", "s1")


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
async def test_fr99_the_same_id_on_all_apis(api: Any) -> None:  # noqa: ANN401 - an API
    spoken: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": "Hi"}]},
        "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
        "responses": {"input": "Hi"},
        "completions": {"prompt": "Hi " * 200},
    }
    router = harness(pools={"prefill": ["10.0.0.1:8100", "10.0.0.3:8100"], "decode": [DECODE]})
    seen = router.world.scope({}).session_key("m", "s1")
    await router.world.store.put([seen], Record(60.0, decode_node=DECODE, prefill_node="10.0.0.3:8100"))
    body = compact({"model": "m", **spoken[api.name], "metadata": {"session_id": "s1"}})
    await router.play(Request(api.path, [body], headers=JSON), Response([b"{}"], headers=JSON, node=DECODE))
    assert [ask.prefer for ask in router.asks] == ["10.0.0.3:8100"]


async def test_fr100_a_new_id_for_each_request_neither_helps_nor_harms() -> None:
    router = harness(store={"max_entries": 10})
    for n in range(30):
        headers = {**JSON, "x-session-id": f"uuid-{n}"}
        await router.play(Request(pieces=[chat(f"question {n}")], headers=headers), END)
    assert router.outcomes() == {"first_turn": 30}
    assert router.records == 10


@pytest.mark.parametrize("value", ["x" * 513, "é" * 257, "a\tb", "a\0b", "\u2028", "\ud800" * 513])
def test_fr102_ids_that_are_too_long_or_odd_are_none(value: str) -> None:
    assert found(session_id=value) is None
    assert found({"x-session-id": value}, session_id="well") == ("session_id", "well")


def test_fr102_keys_are_short_whatever_the_id_is() -> None:
    assert found(session_id="x" * 512) == ("session_id", "x" * 512)
    assert len(Scope(b"k", b"t").session_key("m", "x" * 512)) == 17
