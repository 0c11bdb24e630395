"""Conversations that are over before their time: who may say so, what D frees then, and what the next turn finds."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp.test_utils import TestClient, TestServer

from kvreturn.core.ports import Ask, Reply
from kvreturn.server.admin import admin_app
from support.events import message_events
from support.extproc import Request, Response
from support.harness import DECODE, Harness, harness
from support.nodes import chat, connector, decode_events, handle
from support.turns import compact

JSON = {"content-type": "application/json"}
ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
PATH = "/kvreturn/sessions"
ONE = {"records": 1, "handles": 1, "freed": 1}


async def turn(router: Harness, *contents: str, session: str | None = None, **headers: str) -> None:
    """A chat turn of Alice's that ends well, and leaves a handle."""
    named = {"x-session-id": session} if session else {}
    request = Request(pieces=[chat(*contents)], headers={**JSON, **ALICE, **named, **headers})
    await router.play(request, Response(decode_events(params=handle()), node=DECODE))


@contextlib.asynccontextmanager
async def admin(router: Harness) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(admin_app(router.world, "127.0.0.1"))) as client:
        yield client


async def delete(
    router: Harness, path: str, body: bytes | None = None, headers: Mapping[str, str] = ALICE
) -> tuple[int, Any]:
    async with admin(router) as client:
        answer = await client.delete(path, data=body, headers={"x-kvreturn": "1", **headers})
        return answer.status, await answer.json()


def freed(router: Harness) -> list[Ask]:
    """What P was asked to have freed: in our connector's way, or in a stock P's as long as nobody knows what it is."""
    asks = [a for a in router.asks if a.path == "/v1/completions"]
    assert all(b"kvreturn-frees-blocks" in a.body or b'"free":true' in a.body for a in asks)
    assert all(b"chatcmpl-d" in a.body for a in asks)
    return asks


@pytest.mark.parametrize("name", ["s1", "a thread with a space", "a/b?c=d%20&é", "x" * 512])
async def test_a_session_ends_with_all_its_branches_and_of_all_models(name: str) -> None:
    router = harness()
    session = {"session_id": name}  # a member, which takes what no header does
    for body in (chat("Hi", **session), chat("Ho", **session), chat("Hi", model="n", **session)):
        request = Request(pieces=[body], headers={**JSON, **ALICE})
        await router.play(request, Response(decode_events(params=handle()), node=DECODE))
    await turn(router, "Hi", session="another")
    assert await delete(router, f"{PATH}/{quote(name, safe='')}") == (200, {"records": 3, "handles": 3, "freed": 3})
    assert len(freed(router)) == 3
    assert router.handles == 1
    status, body = await delete(router, f"{PATH}/{quote(name, safe='')}")
    assert (status, body["error"]["type"]) == (404, "NotFoundError")
    assert len(freed(router)) == 3
    await turn(router, "Hi", "Good morning", "And?", session="another")
    assert router.outcomes() == {"first_turn": 4, "hit": 1}


async def test_nodes_get_the_owners_credential() -> None:
    router = harness()
    await turn(router, "Hi", session="s")
    await delete(router, f"{PATH}/s")
    assert router.stub.headers[-1]["authorization"] == "Bearer alice"


async def test_what_d_was_not_told_is_not_said_to_be_freed() -> None:
    """Whoever ended it need not try again: nobody can use the handle, and D has a TTL."""
    router = harness(lambda body: Reply(None) if b"kvreturn-frees-blocks" in body else connector(body))
    await turn(router, "Hi", session="s")
    assert await delete(router, f"{PATH}/s") == (200, {"records": 1, "handles": 1, "freed": 0})
    assert router.handles == 0


TENANTS: list[tuple[str | None, dict[str, str], int]] = [
    (None, ALICE, 200),
    (None, {"authorization": "bearer  alice"}, 200),
    (None, BOB, 404),
    (None, {}, 404),
    ("x-tenant", {"x-tenant": "a", **BOB}, 200),
    ("x-tenant", {"x-tenant": "b", **ALICE}, 404),
    ("x-tenant", ALICE, 403),
]


@pytest.mark.parametrize(("header", "asker", "expected"), TENANTS)
async def test_nobody_ends_another_ones_conversation(header: str | None, asker: dict[str, str], expected: int) -> None:
    router = harness(tenant_header=header)
    await turn(router, "Hi", session="s", **{"x-tenant": "a"})
    by_id = await delete(router, f"{PATH}/s", headers=asker)
    assert by_id[0] == expected
    assert router.handles == (0 if expected == 200 else 1)
    await turn(router, "Ho", **{"x-tenant": "a"})
    by_body = await delete(router, PATH, chat("Ho"), headers=asker)
    assert by_body[0] == expected


BODIES: list[tuple[bytes, Mapping[str, str], int]] = [
    (chat("Hi", "Good morning", "And?"), {}, 200),  # the last request
    (chat("Hi", "Good morning", "And?", "Good morning"), {}, 200),  # with its answer
    (b" " + chat("Hi", "Good morning", "And?", temperature=0.5), {}, 200),  # what shapes no prompt may differ
    (chat("Hi"), {}, 404),  # its predecessor left a handle too, which this turn took
    (chat("Hi", "Good morning", "And"), {}, 404),
    (chat("Hi", "Good morning", "And?", model="n"), {}, 404),
    (chat("Hi", "Good morning", "And?"), {"x-session-id": "s"}, 404),  # an equal one, but not this session's
]


@pytest.mark.parametrize(("body", "headers", "expected"), BODIES)
async def test_without_an_id_a_conversation_is_found_by_its_last_request(
    body: bytes, headers: Mapping[str, str], expected: int
) -> None:
    router = harness()
    await turn(router, "Hi")
    await turn(router, "Hi", "Good morning", "And?")
    assert router.handles == 1
    status, answer = await delete(router, PATH, body, {**ALICE, **headers})
    assert (status, router.handles) == (expected, 0 if expected == 200 else 1)
    if status == 200:
        assert answer == ONE
        assert (await delete(router, PATH, body, {**ALICE, **headers}))[0] == 404
        assert len(freed(router)) == 1


async def test_an_equal_conversation_of_another_session_goes_on() -> None:
    router = harness()
    for session in ("s", "t"):
        await turn(router, "Hi", session=session)
    assert await delete(router, PATH, chat("Hi"), {**ALICE, "x-session-id": "s"}) == (200, ONE)
    assert await delete(router, PATH, chat("Hi"), {**ALICE, "x-session-id": "s"}) != (200, ONE)
    assert await delete(router, f"{PATH}/t") == (200, ONE)


async def test_the_request_may_be_one_of_any_api() -> None:
    router = harness()
    body = compact({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]})
    events = Response(message_events(params=handle()), node=DECODE, headers={"content-type": "text/event-stream"})
    await router.play(Request("/v1/messages", [body], headers={**JSON, **ALICE}), events)
    assert router.handles == 1
    assert (await delete(router, PATH, body))[0] == 404
    assert await delete(router, f"{PATH}?path=/v1/messages", body) == (200, ONE)


WRONG = [
    (PATH, None, 400, "send the body"),
    (PATH, b"[]", 400, "object"),
    (PATH, b"{", 400, ""),
    (PATH, b'{"model":"m"}', 400, "messages"),
    (f"{PATH}?path=/v1/models", chat("Hi"), 400, "path"),
    (f"{PATH}/", None, 404, ""),
    (f"{PATH}?all=yes", None, 400, "send the body"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), WRONG)
async def test_what_is_no_way_to_name_a_conversation(path: str, body: bytes | None, status: int, says: str) -> None:
    router = harness()
    await turn(router, "Hi")
    got, answer = await delete(router, path, body)
    assert got == status
    assert says in answer["error"]["message"]
    assert router.handles == 1


async def test_a_store_that_is_away_is_no_conversation_that_is_unknown() -> None:
    router = harness()
    router.world.guard._open()
    for path, body in ((f"{PATH}/s", None), (PATH, chat("Hi"))):
        status, answer = await delete(router, path, body)
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailable")
    await router.world.guard.aclose()


async def test_an_operator_ends_all_conversations() -> None:
    router = harness()
    for i in range(100):
        await turn(router, f"Hi {i}")
    async with admin(router) as client:
        answer = await client.delete(f"{PATH}?all=true", headers={"x-kvreturn": "1"})
        assert (answer.status, (await answer.json())["state"]) == (202, "running")
        async with asyncio.timeout(5):
            while (clearing := router.world.lifecycle.clearing) and clearing.state == "running":  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
    assert clearing
    assert (clearing.handles, clearing.freed, clearing.state) == (100, 100, "done")
    assert (router.handles, len(freed(router))) == (0, 100)


async def test_what_has_ended_counts_no_longer_as_its_tenants() -> None:
    router = harness()
    await turn(router, "Hi", session="s")
    held = len(router.world.quota)
    assert await delete(router, f"{PATH}/s") == (200, ONE)
    assert len(router.world.quota) == held - 1


GUARDED = [
    ("GET", "/metrics", {"host": "127.0.0.1:9091"}, 200),
    ("GET", "/healthz", {"host": "localhost"}, 200),
    ("GET", "/healthz", {"host": "[::1]:9091"}, 200),
    ("GET", "/metrics", {"host": "evil.example:9091"}, 403),
    ("GET", "/metrics", {"host": "127.0.0.1.evil.example"}, 403),
    ("GET", "/metrics", {"host": "localhost.evil.example"}, 403),
    ("GET", "/metrics", {"host": "["}, 403),
    ("GET", "/metrics", {"host": ""}, 403),
    ("DELETE", f"{PATH}/s", {"x-kvreturn": "1"}, 404),
    ("DELETE", f"{PATH}/s", {}, 403),
    ("DELETE", f"{PATH}/s", {"x-kvreturn": "1", "host": "evil.example"}, 403),
    ("POST", f"{PATH}/s", {"content-type": "text/plain"}, 403),
    ("POST", f"{PATH}/s", {"x-kvreturn": "1"}, 405),
    ("OPTIONS", f"{PATH}/s", {"origin": "http://evil.example", "access-control-request-headers": "x-kvreturn"}, 403),
    ("GET", "/nothing", {}, 404),
]


@pytest.mark.parametrize(("method", "path", "headers", "status"), GUARDED)
async def test_pages_of_other_origins_can_do_nothing_here(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    async with admin(harness()) as client:
        answer = await client.request(method, path, headers=headers)
        assert answer.status == status
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not any(name.lower().startswith("access-control") for name in answer.headers)


async def test_a_port_that_is_not_on_loopback_goes_by_any_name() -> None:
    app = admin_app(harness().world, "0.0.0.0")
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/healthz", headers={"host": "router-1.internal:9091"})).status == 200
