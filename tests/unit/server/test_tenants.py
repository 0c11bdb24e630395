"""Whose conversations are whose: nobody gets another one's handle, whatever the messages are."""

import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from kvreturn.core.api import APIS
from kvreturn.core.fingerprint import keyed_hash
from kvreturn.core.ports import Record, Reply, Taken
from kvreturn.store.memory import MemoryStore
from support.events import message_events, response_events
from support.extproc import Request, Response
from support.harness import DECODE, Harness, harness, settings
from support.nodes import carried_handle, chat, connector, decode_events, handle
from support.turns import compact

END = Response(decode_events(params=handle()), node=DECODE)

# What the two turns of one conversation are sent with; the configured tenant header; whether they are one tenant's.
PAIRS = [
    ({}, {}, None, True),
    ({"authorization": "Bearer a"}, {"authorization": "Bearer a"}, None, True),
    ({"authorization": "Bearer a"}, {"authorization": "Bearer b"}, None, False),
    ({"authorization": "Bearer a"}, {}, None, False),
    ({"x-api-key": "a"}, {"x-api-key": "b"}, None, False),
    ({"api-key": "a"}, {"x-api-key": "a"}, None, False),
    ({"authorization": "a", "x-api-key": "b"}, {"authorization": "b", "x-api-key": "a"}, None, False),
    ({"x-tenant": "a"}, {"x-tenant": "b"}, None, True),  # no tenant header is configured
    ({"x-tenant": "a"}, {"x-tenant": "b"}, "X-Tenant", False),
    ({"x-tenant": "a", "authorization": "1"}, {"x-tenant": "a", "authorization": "2"}, "X-Tenant", True),
    ({"x-session-id": "s"}, {"x-session-id": "s", "authorization": "b"}, None, False),  # an id is no credential
]


@pytest.mark.parametrize(("first", "second", "tenant_header", "shared"), PAIRS)
async def test_a_handle_is_found_by_its_tenant_only(
    first: dict[str, str], second: dict[str, str], tenant_header: str | None, *, shared: bool
) -> None:
    router = harness(tenant_header=tenant_header)
    kind = {"content-type": "application/json"}
    await router.play(Request(pieces=[chat("Hi")], headers={**kind, **first}), END)
    await router.play(Request(pieces=[chat("Hi", "Good morning", "And?")], headers={**kind, **second}), END)
    assert carried_handle(router.asks[1].body) == (handle() if shared else None)
    assert router.handles == (1 if shared else 2)  # the other one's is still there


# --- two tenants, the same history, the same ids ---

JSON = {"content-type": "application/json"}
USER, ANSWER, NEXT = "word " * 60, "Good morning", "And?"
TALK = [{"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": NEXT}]
# Members of a first and of a second turn, and how D streams its answer.
SPOKEN: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "chat": ({"messages": TALK[:1]}, {"messages": TALK}, decode_events),
    "messages": ({"messages": TALK[:1]}, {"messages": TALK}, message_events),
    "responses": ({"input": TALK[:1]}, {"input": TALK}, response_events),
    "completions": ({"prompt": USER * 2}, {"prompt": USER * 2 + ANSWER + NEXT}, None),
}
IDENTITIES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {}),
    ({"x-claude-code-session-id": "s"}, {"metadata": {"user_id": '{"session_id":"s"}'}}),
    ({"session-id": "s", "thread-id": "t"}, {"prompt_cache_key": "s"}),
    ({"x-session-affinity": "s", "x-litellm-session-id": "s", "helicone-session-id": "s"}, {"litellm_session_id": "s"}),
    ({"x-session-id": "s", "x-conversation-id": "s"}, {"conversation_id": "s", "metadata": {"session_id": "s"}}),
]
TENANTS = [("authorization", None), ("x-api-key", None), ("api-key", None), ("x-tenant", "x-tenant")]


class Spy(MemoryStore):
    """Remembers which keys were put and which were looked for."""

    def __init__(self, inner: MemoryStore) -> None:
        vars(self).update(vars(inner))
        self.kept: set[bytes] = set()
        self.sought: set[bytes] = set()

    async def put(self, keys: Sequence[bytes], record: Record, conversation: bytes | None = None) -> bytes:
        self.kept |= set(keys)
        return await super().put(keys, record, conversation)

    async def take(self, keys: Sequence[bytes]) -> Taken:
        self.sought |= set(keys)
        return await super().take(keys)

    def forget(self) -> None:
        self.kept, self.sought = set(), set()


def spied(router: Harness) -> Spy:
    assert isinstance(router.world.store, MemoryStore)
    router.world.store = router.world.guard._store = spy = Spy(router.world.store)
    return spy


async def talk(router: Harness, api: str, headers: Mapping[str, str], members: Mapping[str, Any]) -> None:
    """Two turns of one conversation."""
    path = next(a.path for a in APIS if a.name == api)
    *turns, events = SPOKEN[api]
    for turn in turns:
        body = compact({"model": "m", "stream": events is not None, **turn, **members})
        pieces = events(params=handle()) if events else [COMPLETION]
        kind = "text/event-stream" if events else "application/json"
        answer = Response(pieces, headers={"content-type": kind}, node=DECODE)
        await router.play(Request(path, [body], headers={**JSON, **headers}), answer)


COMPLETION = compact(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [{"index": 0, "text": ANSWER, "finish_reason": "stop"}],
        "kv_transfer_params": handle(),
    }
)


@pytest.mark.parametrize(("name", "tenant_header"), TENANTS)
@pytest.mark.parametrize("api", SPOKEN)
async def test_no_key_of_one_tenant_is_ever_looked_for_by_another(
    api: str, name: str, tenant_header: str | None
) -> None:
    for ids, members in IDENTITIES:
        router = harness(tenant_header=tenant_header)
        spy = spied(router)
        seen = []
        for tenant in ("alice", "bob"):
            await talk(router, api, {name: tenant, **ids}, members)
            seen.append((spy.kept, spy.sought))
            spy.forget()
        assert router.outcomes() == {"first_turn": 2, "hit": 2}  # each its own
        (kept_a, sought_a), (kept_b, sought_b) = seen
        assert kept_a
        assert not {k for k in kept_a & kept_b if k[:1] != b"a"}  # that there is a response of this id, is anybody's
        assert not kept_a & sought_b
        assert not kept_b & sought_a


async def test_a_turn_without_the_configured_tenant_header_is_refused() -> None:
    """It came past the auth filter; all such together would be one tenant."""
    for path, shape in (("/v1/chat/completions", "PermissionDenied"), ("/v1/messages", "permission_error")):
        for headers in ({}, {"x-tenant": ""}, {"authorization": "Bearer a"}):
            router = harness(tenant_header="X-Tenant")
            envoy = await router.play(Request(path, [chat("Hi")], headers={**JSON, **headers}), END)
            assert (envoy.client.status, router.asks) == (403, [])
            error = json.loads(envoy.client.body)["error"]
            assert error["type"] == shape
            assert "X-Tenant" in error["message"]
            assert router.metric("requests_refused_total", why="tenant") == 1
            assert router.outcomes() == {"rejected": 1}
    models = await harness(tenant_header="x-tenant").play(Request("/v1/models", method="GET"), Response([b"{}"]))
    assert models.client.status == 200  # no conversation is in there
    stored = await harness(tenant_header="x-tenant").play(Request("/v1/responses/r", method="GET"), Response([b"{}"]))
    assert stored.client.status == 403


# --- cache_salt ---


def salts(router: Harness, upstream: bytes) -> set[Any]:
    """What both legs were salted with."""
    return {json.loads(body).get("cache_salt") for body in (router.asks[-1].body, upstream)}


async def salted(router: Harness, tenant: str, *contents: str, **members: Any) -> Any:  # noqa: ANN401 - JSON
    headers = {**JSON, "authorization": f"Bearer {tenant}"}
    answer = Response(decode_events(params=handle()), node=DECODE)
    envoy = await router.play(Request(pieces=[chat(*contents, **members)], headers=headers), answer)
    (salt,) = salts(router, envoy.upstream.body)
    return salt


async def test_each_tenants_turns_have_a_salt_of_their_own() -> None:
    assert await salted(harness(), "alice", "Hi") is None
    router, replica = harness(tenant_cache_salt=True), harness(tenant_cache_salt=True)
    alice = await salted(router, "alice", "Hi")
    # Worked out by hand, from what the secret and the tenant are.
    key = hmac.digest(b"a secret of these tests", b"fingerprints", "sha256")
    tenant = b"credential\0" + keyed_hash(key, b"bearer alice\0\0")
    assert alice == "kvreturn-salt-" + keyed_hash(key, tenant + b"\0salt\0").hex()
    assert await salted(replica, "alice", "Hi") == alice
    assert await salted(router, "bob", "Hi") != alice
    assert len(alice) <= 128  # vLLM 0.32.0 takes no longer ones, nor any of @ / \ NUL
    assert not set(alice) & set("@/\\\0")


async def test_a_clients_own_salt_still_tells_its_requests_apart_but_reaches_nobody_elses() -> None:
    router = harness(tenant_cache_salt=True)
    alice = await salted(router, "alice", "Hi")
    mine = await salted(router, "alice", "Hi", cache_salt="x")
    assert len({alice, mine, await salted(router, "alice", "Hi", cache_salt="y")}) == 3
    assert await salted(router, "alice", "Hi", cache_salt="x") == mine
    assert await salted(router, "bob", "Hi", cache_salt=alice) != alice
    assert await salted(router, "alice", "Hi", cache_salt=None) == alice


@pytest.mark.parametrize("value", ["", 5, {}, [], True])
async def test_a_salt_that_is_none_is_refused_as_the_node_would(value: object) -> None:
    router = harness(tenant_cache_salt=True)
    envoy = await router.play(Request(pieces=[chat("Hi", cache_salt=value)]), END)
    assert (envoy.client.status, router.asks) == (400, [])
    assert "cache_salt" in json.loads(envoy.client.body)["error"]["message"]


@pytest.mark.parametrize("api", SPOKEN)
async def test_salted_conversations_go_on_on_every_api(api: str) -> None:
    router = harness(tenant_cache_salt=True)
    await talk(router, api, {"authorization": "Bearer alice"}, {})
    assert router.outcomes() == {"first_turn": 1, "hit": 1}
    assert len({json.loads(ask.body)["cache_salt"] for ask in router.asks}) == 1


@pytest.mark.parametrize("whose", ["P", "D"])
async def test_no_refusal_shows_the_salt(whose: str) -> None:
    def quoting(body: bytes) -> bytes:
        return compact({"error": {"message": f"1 validation error: 'input': {json.loads(body)}"}})

    def refusing(body: bytes) -> Reply:
        return Reply("10.0.0.1:8100", 400, quoting(body))

    router = harness(refusing if whose == "P" else connector, tenant_cache_salt=True)
    envoy = await router.play(
        Request(pieces=[chat("Hi")]), lambda passed: Response([quoting(passed.body)], 400, JSON, node=DECODE)
    )
    assert envoy.client.status == 400
    assert b"'cache_salt': '...'" in envoy.client.body
    assert b"kvreturn-salt" not in envoy.client.body


def test_salts_need_a_secret() -> None:
    with pytest.raises(ValidationError, match="tenant_cache_salt needs `secret`"):
        settings(tenant_cache_salt=True, secret="")


def test_a_credential_is_the_same_however_its_scheme_is_written() -> None:
    scope = harness().world.scope
    same = [scope({"authorization": text}) for text in ("Bearer Key", "bearer  Key", " BEARER Key ")]
    assert same[0] == same[1] == same[2]
    assert scope({"authorization": "Bearer key"}) != same[0]
    assert scope({"x-api-key": "Key"}) != scope({"x-api-key": "key"})
