"""Requests in the fast lane: what a script that calls the router is told, over HTTP."""

import asyncio
import gc
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvreturn.core.turn import Turn
from kvreturn.server.called import CalledSide
from kvreturn.server.fast import FastLane
from kvreturn.server.record import TurnRecord
from kvreturn.server.world import World
from support.calls import Kind, Told, calling, left
from support.events import message_events, response_events, response_object, without_params
from support.extproc import Request, Response
from support.harness import DECODE, Harness, harness, live, until
from support.nodes import (
    FakePrefill,
    StubPrefill,
    answer,
    carried_handle,
    chat,
    decode_events,
    handle,
    hangs,
    sent_params,
)
from support.turns import compact

JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream"}
UPLOAD = {"content-type": "multipart/form-data; boundary=x"}
TURN = Request(pieces=[chat("Hi", stream=True)])
EVIL = {"do_remote_prefill": True, "remote_host": "evil.example"}
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TURNS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": HI}),
    ("/v1/messages", {"messages": HI, "max_tokens": 9}),
]


async def told(router: Harness, request: Request, kind: Kind | None = None, version: str = "2") -> Told:
    """What the router says of one request, of which nothing more is heard."""
    async with calling(router) as script:
        return await script.request(request, kind, version)


@pytest.mark.parametrize(("path", "members"), TURNS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_goes_on_with_what_p_has_prefilled(
    path: str,
    members: dict[str, Any],
    stream: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    router = harness()
    headers = {**JSON, "accept-encoding": "gzip", "x-prefiller-host-port": "evil:1", "x-request-id": "mine", "x-a": "é"}
    body = compact({"model": "m", "stream": stream, **members, "kv_transfer_params": EVIL})
    went = await told(router, Request(f"{path}?a=b", [body], headers=headers))
    assert went.status is None
    sent = json.loads(went.body)
    assert sent.pop("kv_transfer_params")["remote_host"] == "10.0.0.1"  # P's word, not the client's
    assert sent == {"model": "m", "stream": stream, **members}
    assert [ask.path for ask in router.asks] == [path]
    assert went.headers.keys() & {"accept-encoding", "x-prefiller-host-port"} == set()
    assert (went.headers[":path"], went.headers["x-a"]) == (f"{path}?a=b", "é")
    assert went.headers["x-request-id"] not in {"mine", ""}
    assert went.meta.keys() - {"lane", "early"} == {"turn", "decode_node", "request_id"}
    assert ("lane" in went.meta) == stream
    assert ("early" in went.meta) == (path == "/v1/responses")  # stored there unless the client says no
    assert (went.meta["decode_node"], went.meta["request_id"], len(went.meta["turn"])) == (DECODE, "mine", 32)


async def test_a_large_body_is_told_by_what_is_new_in_it() -> None:
    body = chat("x" * 500_000, stream=True)
    went = await told(harness(), Request(pieces=[body]))
    assert sent_params(went.body)
    assert went.put < 1000
    assert went.body.startswith(body[:-1])


async def test_turns_have_names_that_nobody_can_guess() -> None:
    router = harness()
    async with calling(router) as script:
        names = {(await script.request(TURN)).meta["turn"] for _ in range(3)}
    assert len(names) == 3
    assert all(len(bytes.fromhex(name)) == 16 for name in names)


@pytest.mark.parametrize(
    ("headers", "known"), [({}, False), ({"x-request-id": "a b"}, False), ({"x-request-id": "a-b"}, True)]
)
async def test_an_id_that_could_be_anything_is_not_given_back(headers: dict[str, str], *, known: bool) -> None:
    went = await told(harness(), Request(pieces=TURN.pieces, headers={**JSON, **headers}))
    assert ("request_id" in went.meta) == known


async def test_a_router_in_the_portable_lane_takes_requests_and_lets_no_script_take_answers() -> None:
    went = await told(harness(envoy={"lane": "portable"}), TURN)
    assert sent_params(went.body)
    assert "turn" in went.meta
    assert "lane" not in went.meta


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/v1/embeddings", JSON), ("/v1/embeddings", {}), ("/tokenize", {"content-type": "Application/x+JSON"})],
)
async def test_json_that_is_no_turn_goes_on_without_transfer_parameters(path: str, headers: dict[str, str]) -> None:
    router = harness()
    body = compact({"model": "m", "kv_transfer_params": EVIL, "input": "Hi"})
    went = await told(router, Request(path, [body], headers={**headers, "x-prefiller-url": "evil"}))
    assert json.loads(went.body) == {"model": "m", "input": "Hi"}
    assert (went.status, went.meta, "x-prefiller-url" in went.headers) == (None, {}, False)
    assert (router.asks, left(router)) == ([], [])


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (Request("/v1/embeddings", [b'{"input": "Hi"}'], headers=JSON), None),
        (Request("/v1/audio/transcriptions", [b"--x\r\n\r\nwords\r\n--x--\r\n"], headers=UPLOAD), None),
        (Request("/v1/files/7", [b"kv_transfer_params"], "PUT", {"content-type": "text/plain"}), "left"),
        (Request("/v1/chat/completions", method="POST"), None),
        (Request("/v1/x", method="DELETE"), None),
    ],
    ids=lambda r: r.path if isinstance(r, Request) else str(r),
)
async def test_what_has_nothing_to_hide_goes_on_as_it_came(request_: Request, kind: Kind | None) -> None:
    router = harness()
    went = await told(router, request_, kind)
    assert (went.status, went.body, went.rewritten, went.meta) == (None, b"".join(request_.pieces), False, {})
    assert went.headers.items() >= dict(request_.headers).items()
    assert left(router) == []


@pytest.mark.parametrize(
    ("settings_", "request_", "status", "why"),
    [
        ({"limits": {"request_bytes": 9}}, TURN, 413, "too_large"),
        ({"limits": {"header_bytes": 1024}}, Request(pieces=TURN.pieces, headers={"a": "b" * 1024}), 431, "headers"),
        ({"limits": {"live_turns": 1, "live_turns_per_tenant": 9}}, TURN, 503, "turns"),
        ({"limits": {"live_turns_per_tenant": 1}}, TURN, 429, "tenant_turns"),
        ({"tenant_header": "x-tenant"}, TURN, 403, "tenant"),
        ({}, Request(pieces=TURN.pieces, headers={**JSON, "content-encoding": "gzip"}), 415, "encoding"),
        ({}, Request(pieces=[b"{"]), 400, "refused"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_refusal_has_the_shape_of_the_api(
    path: str, settings_: dict[str, Any], request_: Request, status: int, why: str
) -> None:
    router = harness(**settings_)
    if "live_turns" in str(settings_):
        router.world.admission.enter(router.world.scope({}).tenant, router.service.fast.exchange()._api)
    before = left(router)
    said = await told(router, Request(path, request_.pieces, headers=request_.headers))
    assert (said.status, said.headers["content-type"]) == (status, "application/json")
    error = json.loads(said.body)["error"]
    shape = {"message", "type"} if path == "/v1/messages" else {"message", "type", "param", "code"}
    assert set(error) == shape
    assert error["message"].startswith("kvreturn: ")
    assert ("retry-after" in said.headers) == (status in {429, 503})
    assert router.metric("requests_refused_total", why=why) == 1
    assert (left(router), router.asks) == (before, [])


async def test_what_p_refuses_is_refused_in_its_words() -> None:
    router = harness(answer(b'{"error": {"message": "no such model"}}', 404))
    said = await told(router, TURN)
    assert (said.status, json.loads(said.body)) == (404, {"error": {"message": "no such model"}})
    assert left(router) == []


def fails(*_: object, **__: object) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (World, "scope"),
        (Turn, "request"),
        (StubPrefill, "ask"),
        (TurnRecord, "forwarded"),
        (FastLane, "name"),
        (CalledSide, "forward"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
async def test_a_failure_inside_is_an_error_of_the_api_and_leaves_nothing(
    path: str, owner: type, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owner, method, fails)
    router = harness()
    said = await told(router, Request(path, TURN.pieces))
    assert said.status == 500
    assert "kvreturn: internal error" in json.loads(said.body)["error"]["message"]
    assert router.metric("requests_refused_total", why="internal") == 1
    assert "RuntimeError: planted" in caplog.text
    assert left(router) == []


@pytest.mark.parametrize(
    ("kind", "version"),
    [("whole", "1"), ("whole", "3"), ("left", "2")],  # the last one leaves a turn's body to itself
)
async def test_a_script_of_another_version_is_answered_with_what_to_do(
    kind: Kind, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    router = harness()
    said = await told(router, TURN, kind, version)
    assert said.status == 500
    assert "make the bootstrap again" in json.loads(said.body)["error"]["message"]
    assert "make the bootstrap again" in caplog.text
    assert (router.asks, left(router)) == ([], [])


@pytest.mark.parametrize("head", [None, "", "2", "2 whole", "2 whole bm8gY29sb24K", "2 whole a b"])
async def test_what_is_no_call_of_a_script_is_no_request(head: str | None) -> None:
    router = harness()
    async with calling(router) as script:
        named = {} if head is None else {"x-kvreturn-head": head}
        async with script.http.post("/kvreturn/request", headers=named, data=TURN.pieces[0]) as said:
            assert (await said.read()).startswith(b"answer 500\n")
    assert router.asks == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/kvreturn/request", 404), ("POST", "/v1/chat/completions", 404), ("GET", "/metrics", 404)],
)
async def test_nothing_else_is_served(method: str, path: str, status: int) -> None:
    async with calling(harness()) as script, script.http.request(method, path) as said:
        assert said.status == status


@pytest.mark.parametrize("size", [1000, 60_000])
async def test_headers_that_envoy_takes_reach_the_router(size: int) -> None:
    """All are in one header of the call. Envoy takes 5 KiB more than the router, so that the router refuses."""
    router = harness(limits={"header_bytes": 56 << 10})
    said = await told(router, Request(pieces=TURN.pieces, headers={**JSON, "x-long": "y" * size}))
    assert said.status == (None if size == 1000 else 431)


async def test_a_body_of_many_megabytes_reaches_the_router() -> None:
    body = chat("x" * (20 << 20), stream=True)
    went = await told(harness(), Request(pieces=[body]))
    assert len(went.body) > len(body)


async def test_a_body_is_not_kept_for_as_long_as_its_connection() -> None:
    async with calling(harness()) as script:
        await script.request(Request(pieces=[chat("x" * 2_000_000)]))
        idle = [o for o in gc.get_objects() if isinstance(o, web.BaseRequest) and o.path == "/kvreturn/request"]
        assert idle  # aiohttp has the last one of a connection until the next comes
        kept = [value for request in idle for value in vars(request).values() if isinstance(value, bytes)]
        assert sum(map(len, kept)) < 100_000


async def test_a_client_that_leaves_during_the_prefill_leg_ends_it() -> None:
    async with FakePrefill(hangs) as node, live(node, limits={"live_turns": 1}) as router, calling(router) as script:
        call = asyncio.create_task(script.request(TURN))
        await node.arrived.wait()
        assert router.service.fast.passing == 1
        assert router.metric("live_streams") == 1
        call.cancel()
        await asyncio.wait_for(node.left.wait(), 2)
        await until(lambda: not left(router))
        assert router.outcomes() == {"cancelled": 1}
        second = asyncio.create_task(script.request(TURN))  # the only place is free again
        await until(lambda: len(node.seen) == 2)
        second.cancel()
        await until(lambda: not left(router))


async def test_a_client_that_leaves_while_it_is_told_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn has a name by then, and is waited for."""
    there = asyncio.Event()

    async def gone(*_: object) -> None:
        there.set()
        await asyncio.Event().wait()

    router = harness()
    async with calling(router) as script:
        monkeypatch.setattr(aiohttp.web.Response, "prepare", gone)
        call = asyncio.create_task(script.request(TURN))
        await there.wait()
        assert router.service.fast._passing
        call.cancel()
        await until(lambda: not left(router))


async def test_a_turn_that_is_over_before_all_is_told_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Envoy's log, or by a drain that has waited long enough."""
    prepare: Any = aiohttp.web.Response.prepare
    router = harness()
    fast = router.service.fast

    async def slow(self: aiohttp.web.Response, request: aiohttp.web.Request) -> Any:  # noqa: ANN401 - as aiohttp has it
        for name in list(fast._passing):
            fast.leave(name)
        return await prepare(self, request)

    async with calling(router) as script:
        monkeypatch.setattr(aiohttp.web.Response, "prepare", slow)
        await script.request(TURN)
    assert left(router) == []


@pytest.mark.parametrize("serving", [True, False])
async def test_health_tells_whether_new_turns_are_welcome(*, serving: bool) -> None:
    async with calling(harness()) as script:
        script.calls.serving = serving
        async with script.http.get("/kvreturn/health") as said:
            assert said.status == (200 if serving else 503)


async def test_a_stored_response_is_asked_for_where_it_is() -> None:
    d1, d2 = "10.0.0.2:8200", "10.0.0.4:8200"
    router = harness(pools={"prefill": ["10.0.0.1:8100"], "decode": [d1, d2]})
    stored = compact(response_object("Good morning", params=handle()))
    async with calling(router) as script:
        create = Request("/v1/responses", [compact({"model": "m", "input": "Hi"})], headers=JSON)
        turn = (await script.request(create)).meta["turn"]
        await script.by_ext_proc(turn, Response([stored], headers=JSON, node=d2))  # Envoy took another one
        went = await script.request(Request("/v1/responses/resp_1", method="GET", headers={"accept-encoding": "gzip"}))
        assert went.meta.keys() == {"decode_node", "turn"}
        assert went.meta["decode_node"] == d2
        assert "accept-encoding" not in went.headers
        answered = await script.by_ext_proc(went.meta["turn"], Response([stored], headers=JSON, node=d2))
        assert json.loads(answered.client.body) == json.loads(without_params(compact(response_object("Good morning"))))
        other = Request("/v1/responses/resp_1", method="GET", headers={"authorization": "Bearer another"})
        foreign = await script.request(other)
        assert (foreign.status, json.loads(foreign.body)["error"]["code"]) == (404, 404)
    assert left(router) == []


@pytest.mark.parametrize(
    ("path", "members", "events"),
    [
        ("/v1/chat/completions", {"messages": HI}, decode_events(params=handle())),
        ("/v1/responses", {"input": HI}, response_events(params=handle())),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}, message_events(params=handle())),
    ],
)
async def test_the_next_turn_carries_what_the_last_one_left(
    path: str, members: dict[str, Any], events: list[bytes]
) -> None:
    router = harness()
    body = {"model": "m", "stream": True, **members}
    async with calling(router) as script:
        first = await script.request(Request(path, [compact(body)], headers=JSON))
        await script.part(first.meta["turn"], f"1 1 200,0,{DECODE}", b"".join(events))
        assert router.handles == 1
        name = "input" if "input" in members else "messages"
        more = [*HI, {"role": "assistant", "content": "Good morning"}, {"role": "user", "content": "And?"}]
        await script.request(Request(path, [compact({**body, name: more})], headers=JSON))
    assert carried_handle(router.asks[-1].body) == handle()
