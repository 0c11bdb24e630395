"""Responses that a decode node keeps: who is asked for them, and what the client gets to see."""

import json
from typing import Any

import pytest

from kvreturn.server.intake import stored_response
from kvreturn.server.world import ForeignError
from support.events import message_events, response_events, response_object, without_params
from support.extproc import ALL_MODES, Mode, Modes, Request, Response
from support.harness import Clock, Harness, harness
from support.nodes import handle
from support.turns import compact

D1, D2 = "10.0.0.2:8200", "10.0.0.4:8200"
POOLS = {"prefill": ["10.0.0.1:8100"], "decode": [D1, D2]}
SSE = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}
ALICE, BOB = {**JSON, "authorization": "Bearer alice"}, {**JSON, "authorization": "Bearer bob"}


def create(router: Harness, modes: Modes | None = None, *, stream: bool = True, **more: Any) -> Any:  # noqa: ANN401
    """A turn that node D2 answers, whichever was chosen: Envoy may take another one."""
    body = compact({"model": "m", "input": "Hi", "stream": stream, **more})
    pieces = response_events(params=handle()) if stream else [compact(response_object("Good morning", params=handle()))]
    answer = Response(pieces, headers=SSE if stream else JSON, node=D2)
    return router.play(Request("/v1/responses", [body], headers=ALICE), answer, modes)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1?stream=true&starting_after=3", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses/resp_1/input_items?limit=1", "resp_1"),
        ("/v1/responses/resp_1/", "resp_1"),
        ("/v1/%72esponses/resp%5F1", "resp_1"),
        ("/v1/responses", None),
        ("/v1/responses/", None),
        ("/v1/responses?x=/v1/responses/y", None),
        ("/v1/chat/completions/resp_1", None),
    ],
)
def test_which_requests_are_about_a_stored_response(path: str, expected: str | None) -> None:
    assert stored_response({":path": path, ":method": "GET"}) == expected


ABOUT = [
    pytest.param("GET", "/v1/responses/resp_1", [], id="get"),
    pytest.param("DELETE", "/v1/responses/resp_1", [], id="delete"),
    pytest.param("POST", "/v1/responses/resp_1/cancel", [], id="cancel"),
    pytest.param("POST", "/v1/responses/resp_1/cancel", [b"{", b"}"], id="cancel-json"),
]


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
@pytest.mark.parametrize(("method", "path", "pieces"), ABOUT)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_stored_response_is_asked_for_where_it_is_and_comes_without_the_handle(
    modes: Modes,
    method: str,
    path: str,
    pieces: list[bytes],
    stream: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    router = harness(pools=POOLS)
    await create(router, modes, stream=stream)
    stored = compact(response_object("Good morning", params=handle()))
    request = Request(path, pieces, method, headers={**ALICE, "accept-encoding": "gzip"})
    envoy = await router.play(request, Response([stored[:50], stored[50:]], headers=JSON), modes)
    assert envoy.upstream.node == D2
    assert envoy.upstream.body == b"".join(pieces)
    assert "accept-encoding" not in (envoy.upstream.headers or {})
    assert envoy.client.body == without_params(compact(response_object("Good morning")))
    assert envoy.client.ended
    replayed = await router.play(
        Request(path, pieces, method, headers=ALICE), Response(response_events(params=handle()), headers=SSE), modes
    )
    assert replayed.client.body == without_params(b"".join(response_events()))
    assert router.outcomes() == {"first_turn": 1}


async def test_nobody_finds_another_ones_response() -> None:
    router = harness(pools=POOLS)
    await create(router)
    scopes = [router.world.scope(headers) for headers in (ALICE, BOB)]
    assert await router.world.owner(scopes[0], "resp_1") == D2
    with pytest.raises(ForeignError):
        await router.world.owner(scopes[1], "resp_1")
    assert [await router.world.owner(scope, "resp_2") for scope in scopes] == [None, None]


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
@pytest.mark.parametrize(("method", "path", "pieces"), ABOUT)
async def test_another_ones_response_is_not_asked_for(
    modes: Modes, method: str, path: str, pieces: list[bytes]
) -> None:
    """The node would give it to whoever knows its id."""
    router = harness(pools=POOLS)
    await create(router)
    stored = Response([compact(response_object("Good morning"))], headers=JSON)
    envoy = await router.play(Request(path, pieces, method, headers=BOB), stored, modes)
    assert (envoy.client.status, envoy.answered) == (404, True)
    assert json.loads(envoy.client.body)["error"]["type"] == "NotFoundError"
    assert router.metric("requests_refused_total", why="foreign") == 1
    mine = await router.play(Request(path, pieces, method, headers=ALICE), stored, modes)
    assert mine.client.status == 200


async def test_an_id_cannot_be_chosen() -> None:
    """The node would keep the response in the place of another one with that id."""
    router = harness(pools=POOLS)
    envoy = await create(router, request_id="resp_1", store=True)
    assert [json.loads(body).get("request_id") for body in (envoy.upstream.body, router.asks[0].body)] == [None, None]


async def test_it_is_known_as_soon_as_its_id_has_passed() -> None:
    """A client that leaves a background stream comes back for the rest of it."""
    for modes in ALL_MODES:
        router = harness(pools=POOLS)
        body = compact({"model": "m", "input": "Hi", "stream": True, "background": True})
        envoy = router.envoy(modes)
        await envoy.request(Request("/v1/responses", [body], headers=ALICE))
        await envoy.respond(Response(response_events()[:1], headers=SSE, node=D2))
        assert await router.world.owner(router.world.scope(ALICE), "resp_1") == D2
        envoy._stream.cancel()


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_an_error_has_no_owner_and_shows_no_quoted_parameters(status: int) -> None:
    router = harness(pools=POOLS)
    quoting = compact({"error": {"message": f"'input': {{'kv_transfer_params': {handle()}}}", "code": status}})
    body = compact({"model": "m", "input": "Hi"})
    for pieces in ([quoting], [quoting[:60], quoting[60:]]):
        envoy = await router.play(
            Request("/v1/responses", [body], headers=ALICE), Response(pieces, status, JSON, node=D2)
        )
        message = "'input': {'kv_transfer_params': {...}}"
        assert json.loads(envoy.client.body) == {"error": {"message": message, "code": status}}
    assert router.records == 0


async def test_a_response_that_is_not_stored_has_no_owner() -> None:
    router = harness(pools=POOLS)
    body = compact({"model": "m", "input": "Hi", "stream": True, "store": False})
    await router.play(
        Request("/v1/responses", [body], headers=ALICE), Response(response_events(), headers=SSE, node=D2)
    )
    assert await router.world.owner(router.world.scope(ALICE), "resp_1") is None


async def test_owners_are_forgotten_after_a_day_and_bounded() -> None:
    clock = Clock()
    router = harness(clock=clock, store={"max_entries": 2}, pools=POOLS)
    scope = router.world.scope(ALICE)
    for name in ("a", "b", "c"):
        await router.world.set_owner(scope, name, D1)
    assert [await router.world.owner(scope, name) for name in "abc"] == [None, D1, D1]
    clock.now += 24 * 3600 - 1
    assert await router.world.owner(scope, "c") == D1
    clock.now += 2
    assert await router.world.owner(scope, "c") is None


# --- previous_response_id ---

# In the mode that is left out the node is chosen before the body comes.
ROUTED_LATE = [m for m in ALL_MODES if m.request != Mode.STREAMED or m.early]


@pytest.mark.parametrize("modes", ROUTED_LATE, ids=str)
async def test_fr101_a_chain_stays_at_the_node_that_keeps_it(modes: Modes) -> None:
    """Its prompt is stored there, so that P cannot render it; D has its KV."""
    router = harness(pools=POOLS)
    await create(router, modes)
    asked = len(router.asks)
    body = compact({"model": "m", "input": "And?", "previous_response_id": "resp_1"})
    answer = Response(response_events(name="resp_2"), headers=SSE, node=D2)
    envoy = await router.play(Request("/v1/responses", [body], headers=ALICE), answer, modes)
    assert (envoy.upstream.node, envoy.upstream.body) == (D2, body)
    foreign = await router.play(Request("/v1/responses", [body], headers=BOB), answer, modes)
    assert (foreign.client.status, foreign.answered) == (404, True)
    assert len(router.asks) == asked
    assert router.outcomes() == {"first_turn": 1, "decode_alone": 2}


# --- our own refusals ---


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/responses", {"error": {"type": "BadRequestError", "param": None, "code": 400}}),
        ("/v1/messages", {"type": "error", "error": {"type": "invalid_request_error"}}),
    ],
)
async def test_a_refusal_has_the_shape_of_its_api(path: str, expected: dict[str, Any]) -> None:
    envoy = await harness().play(Request(path, [b"{}"], headers=JSON), Response())
    assert envoy.client.status == 400
    refusal = json.loads(envoy.client.body)
    assert refusal["error"].pop("message").startswith("kvreturn: `")
    assert refusal == expected


@pytest.mark.parametrize(
    ("path", "events", "member"),
    [("/v1/responses", response_events, "input"), ("/v1/messages", message_events, "messages")],
)
async def test_a_second_turn_is_a_hit(path: str, events: Any, member: str) -> None:  # noqa: ANN401 - a function
    for modes in ALL_MODES:
        router = harness()
        talk = [{"role": "user", "content": "Hi"}]
        for _ in range(3):
            body = compact({"model": "m", member: talk, "stream": True, "max_tokens": 9})
            answer = Response(events(params=handle()), headers=SSE, node=D1)
            envoy = await router.play(Request(path, [body], headers=ALICE), answer, modes)
            assert b"remote" not in envoy.client.body
            talk = [*talk, {"role": "assistant", "content": "Good morning"}, {"role": "user", "content": "And?"}]
        assert router.outcomes() == {"first_turn": 1, "hit": 2}
        assert {ask.path for ask in router.asks} == {path}
