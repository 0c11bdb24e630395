"""Every limit: what the client is told, in the shape of its API, what is counted, and that room comes back."""

import asyncio
import json
from typing import Any

import pytest

from support.extproc import ALL_MODES, Modes, Request, Response
from support.harness import DECODE, Harness, harness
from support.nodes import chat, decode_events, handle
from support.turns import compact

END = Response(decode_events(params=handle()), node=DECODE)
JSON = {"content-type": "application/json"}
# A turn of each API, and the members of an error of that API.
TURNS: list[tuple[str, dict[str, Any], set[str]]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}] * 3},
        {"message", "type", "param", "code"},
    ),
    ("/v1/completions", {"prompt": "Hi"}, {"message", "type", "param", "code"}),
    ("/v1/responses", {"input": [{"role": "user", "content": "Hi"}] * 3}, {"message", "type", "param", "code"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}] * 3}, {"message", "type"}),
]


def turn(path: str, members: dict[str, Any], **headers: str) -> Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request(path, [compact({"model": "m", **members})], headers={**JSON, **named})


async def refused(router: Harness, request: Request, shape: set[str], modes: Modes | None = None) -> tuple[int, str]:
    """Status and message of a refusal that nothing has gone on of."""
    envoy = router.envoy(modes)
    await envoy.play(request, END)
    assert envoy.answered
    assert envoy.upstream.body == b""
    error = json.loads(envoy.client.body)["error"]
    assert set(error) == shape
    return envoy.client.status, error["message"]


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
@pytest.mark.parametrize(("path", "members", "shape"), TURNS)
async def test_headers(path: str, members: dict[str, Any], shape: set[str], modes: Modes) -> None:
    router = harness(limits={"header_bytes": 2000})
    status, message = await refused(router, turn(path, members, x_long="y" * 2000), shape, modes)
    assert status == 431
    assert "limits.header_bytes" in message
    assert router.metric("requests_refused_total", why="headers") == 1
    assert (await router.play(turn(path, members, x_long="y" * 1000), Response([b"{}"]), modes)).client.status == 200


@pytest.mark.parametrize(("path", "members", "shape"), [t for t in TURNS if "prompt" not in t[1]])
async def test_history(path: str, members: dict[str, Any], shape: set[str]) -> None:
    router = harness(limits={"history": 2})
    status, message = await refused(router, turn(path, members), shape)
    assert status == 413
    assert "3 objects; at most 2 are taken (limits.history)" in message
    assert router.metric("requests_refused_total", why="history") == 1
    assert router.asks == []


@pytest.mark.parametrize(("path", "members", "shape"), TURNS)
@pytest.mark.parametrize("limit", ["live_turns", "live_turns_per_tenant"])
async def test_live_turns(path: str, members: dict[str, Any], shape: set[str], limit: str) -> None:
    status, why = {"live_turns": (503, "turns"), "live_turns_per_tenant": (429, "tenant_turns")}[limit]
    router = harness(limits={limit: 2})
    running = [router.envoy() for _ in range(2)]
    for envoy in running:
        assert await envoy.request(turn(path, members))
    assert router.metric("live_turns") == 2
    assert (await refused(router, turn(path, members), shape))[0] == status
    assert router.metric("requests_refused_total", why=why) == 1
    other = router.envoy()
    await other.play(turn(path, members, authorization="Bearer another"), Response([b"{}"]))
    assert other.client.status == (503 if limit == "live_turns" else 200)
    for envoy in running:
        await envoy.respond(Response([b"{}"]))
        await envoy.finish()
    assert router.metric("live_turns") == 0
    again = await router.play(turn(path, members), Response([b"{}"]))
    assert again.client.status == 200


async def test_a_refusal_for_want_of_room_says_when_to_come_back() -> None:
    router = harness(limits={"live_turns_per_tenant": 1})
    running = router.envoy()
    await running.request(turn(*TURNS[0][:2]))
    envoy = router.envoy()
    await envoy.play(turn(*TURNS[0][:2]), END)
    assert envoy.client.headers
    assert envoy.client.headers["retry-after"] == "1"
    assert router.outcomes() == {"rejected": 1}
    await running.respond(END)
    await running.finish()


async def test_turns_that_are_refused_or_cancelled_leave_room() -> None:
    router = harness(limits={"live_turns": 1})
    for _ in range(3):
        envoy = router.envoy()
        await envoy.request(turn(*TURNS[0][:2]))
        envoy._stream.cancel()
        await asyncio.gather(*router.service.running, return_exceptions=True)
        await router.play(Request(pieces=[b"{}"]), END)
        await router.play(Request("/v1/models", method="GET"), END)
    assert router.metric("live_turns") == 0
    assert router.metric("requests_refused_total", why="turns") == 0


async def test_sessions_of_a_tenant() -> None:
    router = harness(limits={"sessions_per_tenant": 2})

    async def conversation(n: int, tenant: str, *more: str) -> None:
        headers = {**JSON, "authorization": f"Bearer {tenant}"}
        await router.play(Request(pieces=[chat(f"question {n}", *more)], headers=headers), END)

    await conversation(0, "bob")
    for n in range(5):
        await conversation(n, "alice")
    assert router.handles == 3
    assert router.metric("sessions_over_limit_total") == 3
    await conversation(0, "bob", "Good morning", "And?")
    await conversation(0, "alice", "Good morning", "And?")
    assert router.outcomes() == {"first_turn": 6, "hit": 1, "over_limit": 1}


async def test_turns_of_one_conversation_count_once() -> None:
    router = harness(limits={"sessions_per_tenant": 1})
    talk = ["Hi"]
    for _ in range(5):
        await router.turn(*talk)
        talk += ["Good morning", "And?"]
    assert router.outcomes() == {"first_turn": 1, "hit": 4}
    assert router.metric("sessions_over_limit_total") == 0
