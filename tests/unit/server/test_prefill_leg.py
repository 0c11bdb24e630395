"""The prefill leg over real HTTP: what P can do wrong, and what becomes of the turn."""

import asyncio
import gzip
import json
import socket
import time
from collections.abc import Iterator

import pytest
from aiohttp import web

import kvreturn.upstream.client
from kvreturn.core.ports import Ask, Failure
from kvreturn.upstream.client import PrefillClient
from kvreturn.upstream.pool import Pool
from support.extproc import Request, Response
from support.harness import DECODE, Harness, live
from support.nodes import (
    FakePrefill,
    Handler,
    Seen,
    carried_handle,
    chat,
    closed_port,
    connector,
    decode_events,
    dies,
    dies_midway,
    handle,
    hangs,
    in_turn,
    prefill_body,
    replies,
    sent_params,
)

TURN = Request(pieces=[chat("Hi")])
END = Response(decode_events(params=handle()), node=DECODE)


@pytest.fixture
def refusing() -> Iterator[str]:
    with closed_port() as address:
        yield address


async def redirects(seen: Seen) -> web.StreamResponse:
    return web.Response(status=307, headers={"location": f"http://{DECODE}{seen.path}"})


FAILURES: dict[str, Handler] = {
    "500": replies(b'{"error":"x"}', 500),
    "502": replies(b"<html>", 502, {"content-type": "text/html"}),
    "503": replies(b"", 503),
    "redirect": redirects,
    "204": replies(b"", 204),
    "malformed JSON": replies(b'{"kv_transfer_params": {'),
    "a list": replies(b"[]"),
    "no parameters": replies(b'{"usage": {}}'),
    "null parameters": replies(b'{"kv_transfer_params": null}'),
    "parameters that are text": replies(b'{"kv_transfer_params": "x"}'),
    "no JSON at all": replies(b"OK", headers={"content-type": "text/plain"}),
    "closed at once": dies,
    "cut off": dies_midway,
}


@pytest.mark.parametrize("policy", ["fallback", "error"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_is_retried_once_on_another_node_and_then_by_policy(failure: str, policy: str) -> None:
    bad, good = FakePrefill(FAILURES[failure]), FakePrefill()
    async with bad, good, live(bad, good) as router:
        envoy = await router.play(TURN, END)
        assert sent_params(envoy.upstream.body)["remote_host"] == "10.0.0.1"
        assert (len(bad.seen), len(good.seen)) == (1, 1)
        assert router.outcomes() == {"first_turn": 1}
        assert router.metric("prefill_retries_total") == 1
        assert router.metric("prefill_fallbacks_total") == 0
    async with bad, live(bad, prefill={"via": "direct", "on_failure": policy}) as router:
        bad.seen.clear()
        envoy = await router.play(TURN, END)
        assert len(bad.seen) == 2  # the only node there is
        assert router.outcomes() == {"prefill_failed": 1}
        assert router.metric("prefill_fallbacks_total") == (policy == "fallback")
        if policy == "fallback":
            assert envoy.upstream.body == TURN.pieces[0]
            assert envoy.client.status == 200
        else:
            assert envoy.client.status == 502
            error = json.loads(envoy.client.body)["error"]
            assert (error["type"], error["code"]) == ("BadGateway", 502)
            assert error["message"].startswith("kvreturn: no prefill node could process the request (")


async def test_a_redirect_is_not_followed() -> None:
    """Prompts and handles go to configured nodes only."""
    elsewhere = FakePrefill()

    async def there(seen: Seen) -> web.StreamResponse:
        return web.Response(status=307, headers={"location": f"http://{elsewhere.address}{seen.path}"})

    node = FakePrefill(there)
    async with node, elsewhere, live(node) as router:
        await router.play(TURN, END)
        assert (len(node.seen), elsewhere.seen) == (2, [])


@pytest.mark.parametrize("policy", ["fallback", "error"])
async def test_no_node_listens(refusing: str, policy: str) -> None:
    async with live(refusing, prefill={"via": "direct", "on_failure": policy}) as router:
        begun = time.monotonic()
        envoy = await router.play(TURN, END)
        assert time.monotonic() - begun < 0.5
        assert envoy.client.status == (200 if policy == "fallback" else 502)
        assert router.outcomes() == {"prefill_failed": 1}


async def test_a_node_that_refuses_is_left_alone_for_a_while(refusing: str) -> None:
    async with FakePrefill() as good, live(refusing, good) as router:
        await router.play(TURN, END)
        assert router.metric("prefill_retries_total") == 1
        for i in range(3):
            await router.play(Request(pieces=[chat(f"Hi {i}")]), END)
        assert router.metric("prefill_retries_total") == 1
        assert len(good.seen) == 4


@pytest.mark.parametrize(("policy", "status"), [("fallback", 200), ("error", 504)])
async def test_a_node_that_never_answers_is_given_up_in_time(policy: str, status: int) -> None:
    """Envoy runs no timer in FULL_DUPLEX_STREAMED, so the deadline is ours: 1 s for both tries together."""
    hung = FakePrefill(hangs)
    async with hung, live(hung, prefill={"via": "direct", "timeout": 1, "on_failure": policy}) as router:
        begun = time.monotonic()
        envoy = await router.play(TURN, END)
        assert 0.9 < time.monotonic() - begun < 1.5
        assert envoy.client.status == status
        assert len(hung.seen) == 2
        assert hung.left.is_set()  # vLLM aborts the request when its connection closes
        assert router.outcomes() == {"prefill_failed": 1}
        if policy == "error":
            assert json.loads(envoy.client.body)["error"]["type"] == "GatewayTimeout"


async def test_a_node_that_hangs_leaves_time_for_another_and_is_left_alone_for_a_while() -> None:
    """Without outstanding tokens it would look like the idlest of all."""
    hung, good = FakePrefill(hangs), FakePrefill()
    async with hung, good, live(hung, good, prefill={"via": "direct", "timeout": 0.4}) as router:
        begun = time.monotonic()
        envoy = await router.play(TURN, END)
        assert 0.19 < time.monotonic() - begun < 0.4
        assert sent_params(envoy.upstream.body)
        assert router.outcomes() == {"first_turn": 1}
        await router.play(Request(pieces=[chat("Another")]), END)
        assert (len(hung.seen), len(good.seen)) == (1, 2)


async def test_a_node_whose_host_is_gone_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting to it takes until we give up: its queue of connections is full."""
    monkeypatch.setattr(kvreturn.upstream.client, "_CONNECT", 0.05)
    with socket.socket() as listening, socket.socket() as one, socket.socket() as two:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for client in (one, two):
            client.setblocking(False)  # noqa: FBT003
            client.connect_ex(listening.getsockname())
        gone = "{}:{}".format(*listening.getsockname())
        async with FakePrefill() as good, live(gone, good) as router:
            await router.play(TURN, END)
            await router.play(Request(pieces=[chat("Another")]), END)
            assert router.metric("prefill_retries_total") == 1
            assert len(good.seen) == 2


REFUSALS = [
    (400, b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}', "application/json"),
    (401, b'{"error":"Unauthorized"}', "application/json"),
    (404, b'{"object":"error"}', "application/json; charset=utf-8"),
    (413, b"", "text/plain; charset=utf-8"),
    (422, "\u00e4".encode(), "text/plain; charset=utf-8"),
]


@pytest.mark.parametrize(("status", "body", "content_type"), REFUSALS, ids=[str(r[0]) for r in REFUSALS])
async def test_what_p_has_against_the_request_goes_to_the_client_as_p_said_it(
    status: int, body: bytes, content_type: str
) -> None:
    node = FakePrefill(replies(body, status, {"content-type": content_type}))
    async with node, live(node, node) as router:
        envoy = await router.play(TURN, END)
        assert (envoy.client.status, envoy.client.body) == (status, body)
        assert envoy.client.headers == {":status": str(status), "content-type": content_type}
        assert len(node.seen) == 1
        assert router.outcomes() == {"rejected": 1}
        assert router.metric("prefill_retries_total") == 0
        assert router.metric("turn_errors_total", type=str(status)) == 1


@pytest.mark.parametrize(("name", "value"), [("retry-after", "7"), ("www-authenticate", "Bearer")])
async def test_a_refusal_of_ps_keeps_the_headers_that_tell_the_client_what_to_do(name: str, value: str) -> None:
    node = FakePrefill(replies(b"{}", 429, {name: value, "x-node": "secret"}))
    async with node, live(node) as router:
        envoy = await router.play(TURN, END)
        assert envoy.client.headers
        assert envoy.client.headers[name] == value
        assert "x-node" not in envoy.client.headers


@pytest.mark.parametrize("failure", ["500", "cut off", "no parameters"])
async def test_a_handle_is_spent_by_its_first_try(failure: str) -> None:
    """Rule 2: a retry is cold, whatever became of the read."""
    node = FakePrefill(in_turn(replies(), FAILURES[failure], replies()))
    async with node, live(node) as router:
        await router.play(TURN, END)
        await router.play(Request(pieces=[chat("Hi", "Good morning", "And?")]), Response(decode_events()))
        assert [carried_handle(seen.body) for seen in node.seen] == [None, handle(), None]
        assert router.outcomes() == {"first_turn": 1, "read_failed": 1}
        assert router.handles == 0


async def test_an_answer_that_is_too_large_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvreturn.upstream.client, "_BODY_LIMIT", 1 << 20)
    huge, good = FakePrefill(replies(b" " * (1 << 20) + prefill_body())), FakePrefill()
    async with huge, good, live(huge, good) as router:
        envoy = await router.play(TURN, END)
        assert sent_params(envoy.upstream.body)
        assert len(good.seen) == 1


async def test_a_compressed_answer_is_read() -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    node = FakePrefill(replies(gzip.compress(prefill_body()), headers=headers))
    async with node, live(node) as router:
        envoy = await router.play(TURN, END)
        assert sent_params(envoy.upstream.body)


async def test_credentials_and_trace_go_along_and_nothing_else_of_the_client() -> None:
    sent = {
        "content-type": "application/json; charset=utf-8",
        "authorization": "Bearer token",
        "x-api-key": "key",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=1",
        "cookie": "secret",
        "x-request-id": "abc",
        "user-agent": "client/1",
        "x-kvreturn-node": "evil.example:80",
    }
    node = FakePrefill(in_turn(replies(b"", 500), replies()))
    async with node, live(node) as router:
        await router.play(Request(pieces=TURN.pieces, headers=sent), END)
        ids = []
        for seen in node.seen:
            headers = dict(seen.headers)
            ids.append(headers.pop("x-request-id"))
            assert ids[-1].endswith(f"-p{len(ids)}")  # asked again
            for name in ("authorization", "x-api-key", "traceparent", "tracestate"):
                assert headers.pop(name) == sent[name]
            assert headers.pop("content-type") == "application/json"
            own = {"host", "accept", "accept-encoding", "user-agent", "content-length"}
            assert set(headers) == own
            assert headers["user-agent"] != "client/1"
        assert len({*ids, "abc"}) == 3  # vLLM fails on two live requests of one id


async def test_many_turns_share_connections() -> None:
    node = FakePrefill()
    async with node, live(node) as router:
        for i in range(5):
            await router.play(Request(pieces=[chat(f"Hi {i}")]), END)
        assert len(node._runner.server.connections) == 1  # type: ignore[union-attr]


# --- through Envoy's prefill listener ---


def through(node: FakePrefill, *nodes: str) -> tuple[PrefillClient, Pool]:
    pool = Pool(nodes, time.monotonic)
    return PrefillClient(pool, node.address), pool


async def test_envoy_is_told_the_node_by_a_header_and_tells_the_node_that_answered() -> None:
    listener = FakePrefill(replies(prefill_body(), headers={"x-kvreturn-upstream": "10.0.0.3:8100"}))
    async with listener:
        client, _ = through(listener, "10.0.0.1:8100", "10.0.0.3:8100")
        async with client:
            reply = await client.ask(Ask("/v1/completions", b"{}", prefer="10.0.0.1:8100"), {}, 1)
        assert listener.seen[0].headers["x-kvreturn-node"] == "10.0.0.1:8100"
        assert listener.seen[0].path == "/v1/completions"
        assert (reply.node, reply.status) == ("10.0.0.3:8100", 200)


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (
            b"upstream connect error or disconnect/reset before headers. reset reason: connection refused",
            Failure.CONNECT,
        ),
        (b"no healthy upstream", Failure.CONNECT),
        (b'{"error":"busy"}', None),
    ],
)
async def test_what_envoy_says_itself_is_not_taken_for_the_nodes_answer(body: bytes, failure: Failure | None) -> None:
    async with FakePrefill(replies(body, 503)) as listener:
        client, pool = through(listener, "10.0.0.1:8100", "10.0.0.3:8100")
        async with client:
            reply = await client.ask(Ask("/v1/completions", b"{}"), {}, 1)
        assert (reply.node, reply.failure) == ("10.0.0.1:8100", failure)
        assert pool.choose(prefer="10.0.0.1:8100") == ("10.0.0.3:8100" if failure else "10.0.0.1:8100")


async def test_load_is_outstanding_tokens() -> None:
    hung = FakePrefill(hangs)
    async with hung:
        client, pool = through(hung, "10.0.0.1:8100", "10.0.0.3:8100")
        async with client:
            task = asyncio.create_task(client.ask(Ask("/x", b"{}", tokens=1000), {}, 5))
            await hung.arrived.wait()
            assert pool.choose() == "10.0.0.3:8100"
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pool.choose() == "10.0.0.1:8100"


async def test_no_node_at_all_is_a_failure_to_connect() -> None:
    async with PrefillClient(Pool([], time.monotonic), None) as client:
        assert (await client.ask(Ask("/x", b"{}"), {}, 1)).failure is Failure.CONNECT


async def test_tokenize_that_hangs_leaves_time_for_the_prefill_leg() -> None:
    """Proof by the router: without P's tokens the turn goes cold."""

    async def only_tokenize_hangs(seen: Seen) -> web.StreamResponse:
        return await (hangs if seen.path == "/tokenize" else replies())(seen)

    node = FakePrefill(only_tokenize_hangs)
    async with node, live(node, proof="router", prefill={"via": "direct", "timeout": 1}) as router:
        await router.play(TURN, END)
        begun = time.monotonic()
        envoy = await router.play(Request(pieces=[chat("Hi", "Good morning", "And?")]), END)
        assert time.monotonic() - begun < 0.9
        assert sent_params(envoy.upstream.body)
        paths = [seen.path for seen in node.seen if seen.path != "/v1/completions"]  # that one frees the handle
        assert paths == ["/v1/chat/completions", "/tokenize", "/v1/chat/completions"]
        assert router.outcomes() == {"first_turn": 1, "unproven": 1}


def test_the_scripts_of_the_kit_agree_with_each_other() -> None:
    """A stub without a socket and a node that listens say the same."""
    cold = json.dumps({"kv_transfer_params": {"remote_block_ids": None}}).encode()
    assert connector(cold).body == prefill_body()
    assert isinstance(Harness().stub.script(cold).body, bytes)


@pytest.mark.parametrize(("status", "state"), [(500, "out"), (503, "out"), (400, "up"), (404, "up"), (200, "up")])
async def test_a_node_that_answers_5xx_in_a_row_is_out_and_one_that_refuses_is_not(status: int, state: str) -> None:
    async with FakePrefill(replies(b"{}", status)) as node, live(node, health={"errors": 3}) as router:
        ask = Ask("/v1/completions", b"{}", last=True)
        for _ in range(2):
            await router.world.client.ask(ask, {}, 5.0)
        assert router.world.prefill.states() == {node.address: "up"}
        await router.world.client.ask(ask, {}, 5.0)
        assert router.world.prefill.states() == {node.address: state}
        assert router.metric("node_ejections_total", pool="prefill", reason="errors") == (state == "out")


async def test_a_node_that_is_known_by_name_is_back_when_envoy_tells_its_address() -> None:
    named = "vllm-0.example.org:8000"
    pool = Pool([named], time.monotonic)
    pool.unreachable(named)
    told = replies(b"{}", 200, {"x-kvreturn-upstream": "10.0.0.7:8000"})
    async with FakePrefill(told) as envoy, PrefillClient(pool, envoy.address) as client:
        reply = await client.ask(Ask("/v1/completions", b"{}", last=True), {}, 5.0)
    assert reply.node == "10.0.0.7:8000"
    assert pool.snapshot()[0].failures == 0
