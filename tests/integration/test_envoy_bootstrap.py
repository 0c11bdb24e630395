"""What a real Envoy does with our bootstrap. The numbers in names are those of field reports."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvreturn.envoy.runner import validate
from support.envoy import Gateway, Json, Node, Router, client_ext_proc, gateway, raw, serving, unused_address

SHIPPED = sorted((Path(__file__).parents[2] / "envoy").glob("*.yaml"))
# What a client sends as path, and what the router and the node get. Starlette decodes a path once before it looks for
# the endpoint; so what stays encoded here must not name one of vLLM's endpoints once decoded.
PATHS = {
    "/v1/chat/completions": "/v1/chat/completions",
    "/v1/chat%2Fcompletions": "/v1/chat/completions",
    "/v1/chat%2fcompletions": "/v1/chat/completions",
    "/v1/chat%5Ccompletions": "/v1/chat/completions",
    "/v1/chat\\completions": "/v1/chat/completions",
    "//v1/completions": "/v1/completions",
    "/v1///chat//completions": "/v1/chat/completions",
    "/v1/%63hat/completions": "/v1/chat/completions",
    "/%76%31/completions": "/v1/completions",
    "/v1/./chat/../completions": "/v1/completions",
    "/v1/chat/%2e%2e/completions": "/v1/completions",
    "http://elsewhere/v1/completions": "/v1/completions",
    "/v1/completions?q=%2F..%2F//": "/v1/completions?q=%2F..%2F//",
    "/v1/%2563hat/completions": "/v1/%2563hat/completions",
    "/v1/completions%3Fx": "/v1/completions%3Fx",
}
_MODES = [("BUFFERED", "STREAMED"), ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED")]


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router()
    async with router.serve():
        yield router


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node]]:
    first, second = Node("first"), Node("second")
    async with serving(first, second):
        yield first, second


@pytest.fixture
async def envoy(router: Router, nodes: tuple[Node, Node]) -> AsyncIterator[Gateway]:
    addresses = [n.address for n in nodes]
    async with gateway(router.listen, addresses, addresses) as running:
        yield running


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_envoy_accepts_every_shipped_file(path: Path) -> None:
    assert validate(path.read_text()) is None


def test_a_refused_bootstrap_comes_with_envoys_reason() -> None:
    refusal = validate("static_resources: {clusters: [{name: x, no_such_member: 1}]}")
    assert refusal
    assert "no_such_member" in refusal


class TestDecodeNode:
    async def test_is_exactly_the_one_that_the_router_names(
        self, envoy: Gateway, router: Router, nodes: tuple[Node, Node]
    ) -> None:
        for node in (*nodes, *reversed(nodes)):
            router.node = node.address
            assert [await envoy.ask() for _ in range(4)] == [(200, node.name)] * 4

    @pytest.mark.parametrize("name", ["127.0.0.1:1", "no address", "", None])
    async def test_is_any_if_the_named_one_is_unknown(self, envoy: Gateway, router: Router, name: str | None) -> None:
        router.node = name
        answers = [await envoy.ask() for _ in range(24)]
        assert set(answers) == {(200, "first"), (200, "second")}
        assert not [line for line in envoy.log if "error" in line]

    async def test_is_another_once_the_named_one_refused_a_connection(self, router: Router) -> None:
        alive = Node("alive")
        async with serving(alive):
            router.node = unused_address()
            async with gateway(router.listen, [alive.address, router.node], change=_no_health_checks) as envoy:
                assert (await envoy.ask())[0] == 503
                assert [await envoy.ask() for _ in range(4)] == [(200, "alive")] * 4

    async def test_is_another_while_the_named_one_fails_its_health_check(
        self, router: Router, nodes: tuple[Node, Node]
    ) -> None:
        first = nodes[0]
        first.healthy, router.node = False, first.address
        async with gateway(router.listen, [n.address for n in nodes]) as envoy:
            assert [await envoy.ask() for _ in range(4)] == [(200, "second")] * 4
            assert not first.requests

    async def test_is_found_by_address_where_the_pool_has_host_names(
        self, router: Router, nodes: tuple[Node, Node]
    ) -> None:
        first, second = nodes
        by_name = first.address.replace("127.0.0.1", "localhost")
        async with gateway(router.listen, [by_name, second.address]) as envoy:
            router.node = first.address
            assert [await envoy.ask() for _ in range(4)] == [(200, "first")] * 4
            router.node = by_name
            assert {await envoy.ask() for _ in range(24)} == {(200, "first"), (200, "second")}

    async def test_comes_as_an_attribute_of_the_response_headers(
        self, envoy: Gateway, router: Router, nodes: tuple[Node, Node]
    ) -> None:
        router.node = nodes[1].address
        await envoy.ask()
        with_attributes = [m for m in router.calls[0] if m.attributes]
        assert [m.WhichOneof("request") for m in with_attributes] == ["response_headers"]
        attributes = with_attributes[0].attributes["envoy.filters.http.ext_proc"]
        assert attributes["upstream.address"] == nodes[1].address


class TestPrefillListener:
    async def test_takes_the_node_from_the_header_and_keeps_the_header(
        self, envoy: Gateway, nodes: tuple[Node, Node]
    ) -> None:
        for node in (*nodes, *reversed(nodes)):
            headers = {"x-kvreturn-node": node.address, "x-request-id": "ours"}
            async with envoy.prefill.post("/tokenize", data=b"{}", headers=headers) as response:
                assert await response.text() == node.name
                assert response.headers["x-kvreturn-upstream"] == node.address
            seen = node.requests[-1][0].headers
            assert "x-kvreturn-node" not in seen
            assert seen["x-request-id"] == "ours"

    async def test_says_which_node_it_was_if_the_named_one_is_unknown(
        self, envoy: Gateway, nodes: tuple[Node, Node]
    ) -> None:
        async with envoy.prefill.post("/x", headers={"x-kvreturn-node": "127.0.0.1:1"}) as response:
            by_name = {n.name: n.address for n in nodes}
            assert response.headers["x-kvreturn-upstream"] == by_name[await response.text()]

    async def test_does_not_call_the_router(self, envoy: Gateway, router: Router) -> None:
        async with envoy.prefill.post("/v1/completions", data=b"{}") as response:
            assert response.status == 200
        assert not router.calls


class TestClients:
    async def test_cannot_send_our_headers_88(self, envoy: Gateway, router: Router, nodes: tuple[Node, Node]) -> None:
        router.node = nodes[0].address
        ours = {"x-kvreturn-node": nodes[1].address, "X-KVReturn-Anything": "1", "x-other": "kept"}
        assert await envoy.ask(headers=ours) == (200, "first")
        seen = nodes[0].requests[0][0].headers
        assert not [name for name in seen if name.lower().startswith("x-kvreturn")]
        assert seen["x-other"] == "kept"
        keys = {h.key for h in router.calls[0][0].request_headers.headers.headers}
        assert not [key for key in keys if key.startswith("x-kvreturn")]

    async def test_cannot_turn_on_retries_27(self, envoy: Gateway, nodes: tuple[Node, Node]) -> None:
        for node in nodes:
            node.status = 503
        status, _ = await envoy.ask(headers={"x-envoy-retry-on": "5xx", "x-envoy-max-retries": "3"})
        assert status == 503
        assert sum(len(n.requests) for n in nodes) == 1

    async def test_cannot_hide_a_path_from_the_router(
        self, envoy: Gateway, router: Router, nodes: tuple[Node, Node]
    ) -> None:
        router.node = nodes[0].address
        arrived = {}
        for sent in PATHS:
            request = f"POST {sent} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}"
            assert (await raw(envoy.settings.envoy.listen, request))[0] == 200
            arrived[sent] = router.paths()[-1], nodes[0].requests[-1][0].raw_path
        assert arrived == {sent: (seen, seen) for sent, seen in PATHS.items()}

    @pytest.mark.parametrize("path", ["/v1/completions#x", "/v1/completions%00"])
    async def test_get_400_for_a_path_that_cannot_be_read(
        self, path: str, envoy: Gateway, router: Router, nodes: tuple[Node, Node]
    ) -> None:
        request = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        assert (await raw(envoy.settings.envoy.listen, request))[0] == 400
        assert not nodes[0].requests + nodes[1].requests
        # Envoy's own answer passes the router like any other, without a request before it.
        assert [m.WhichOneof("request") for m in router.calls[0]] == ["response_headers"]


class TestRouterFailures:
    async def test_down_stops_requests_with_a_body_only_31(self, nodes: tuple[Node, Node]) -> None:
        async with gateway(unused_address(), [nodes[0].address]) as envoy:
            for method in ("GET", "HEAD", "OPTIONS"):
                async with envoy.client.request(method, "/v1/models") as response:
                    assert response.status == 200
            nodes[0].requests.clear()
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                async with envoy.client.request(method, "/v1/completions", data=b'{"kv_transfer_params":{}}') as r:
                    assert r.status == 500
            assert not nodes[0].requests

    async def test_slow_beyond_envoys_own_default_is_no_failure_13(self, envoy: Gateway, router: Router) -> None:
        router.delay = 0.4  # Envoy's default is 0.2
        assert (await envoy.ask())[0] == 200

    async def test_stuck_is_504_and_aborting_500_16(self, router: Router, nodes: tuple[Node, Node]) -> None:
        def impatient(bootstrap: Json) -> None:
            client_ext_proc(bootstrap)["message_timeout"] = "0.2s"

        async with gateway(router.listen, [nodes[0].address], change=impatient) as envoy:
            router.delay = 10
            assert (await envoy.ask())[0] == 504
            router.abort = True
            assert (await envoy.ask())[0] == 500
            assert not nodes[0].requests

    async def test_none_matters_to_a_websocket(self, nodes: tuple[Node, Node]) -> None:
        async with (
            gateway(unused_address(), [nodes[0].address]) as envoy,
            envoy.client.ws_connect("/v1/realtime") as ws,
        ):
            await ws.send_str("hello")
            assert await ws.receive_str() == "first hello"


class TestBodies:
    @pytest.mark.parametrize(("request_mode", "response_mode"), _MODES)
    async def test_of_4_mb_pass_and_may_grow_24(
        self, request_mode: str, response_mode: str, router: Router, nodes: tuple[Node, Node]
    ) -> None:
        body = bytes(range(256)) * 16_384
        router.rewrite = lambda sent: sent + b"more" * 1000
        modes: dict[str, Any] = {"request_body_mode": request_mode, "response_body_mode": response_mode}
        async with gateway(router.listen, [nodes[0].address], **modes) as envoy:
            assert await envoy.ask(body) == (200, "first")
        request, arrived = nodes[0].requests[0]
        assert hashlib.sha256(arrived).digest() == hashlib.sha256(body + b"more" * 1000).digest()
        lengths = {"BUFFERED": str(4 * 1024 * 1024 + 4000), "FULL_DUPLEX_STREAMED": None}
        assert request.headers.get("content-length") == lengths[request_mode]
        assert ("transfer-encoding" in request.headers) == (request_mode != "BUFFERED")

    async def test_over_the_routers_limit_still_reach_the_router(self, envoy: Gateway, router: Router) -> None:
        limit = envoy.settings.limits.request_bytes
        assert (await envoy.ask(b"x" * (limit + 1)))[0] == 200
        assert len(router.calls[0][1].request_body.body) == limit + 1

    async def test_far_over_it_are_refused_by_envoy(self, envoy: Gateway, nodes: tuple[Node, Node]) -> None:
        limits = envoy.settings.limits
        assert (await envoy.ask(b"x" * (limits.request_bytes + limits.event_bytes + 1)))[0] == 413
        assert not nodes[0].requests + nodes[1].requests

    async def test_stream_back_while_they_are_made(self, envoy: Gateway, nodes: tuple[Node, Node]) -> None:
        for node in nodes:
            node.gate = asyncio.Event()
        async with envoy.client.post("/v1/completions", data=b"{}") as response:
            assert await response.content.readexactly(1) in {b"f", b"s"}
            for node in nodes:
                assert node.gate
                node.gate.set()
            assert await response.text() in {"irst", "econd"}


class TestDraining:
    async def test_lets_running_streams_end_and_refuses_new_ones(
        self, envoy: Gateway, router: Router, nodes: tuple[Node, Node]
    ) -> None:
        gate = nodes[0].gate = asyncio.Event()
        router.node = nodes[0].address
        async with envoy.client.post("/v1/completions", data=b"{}") as running:
            await running.content.readexactly(1)
            assert not await envoy.envoy.drain(0.2)
            with pytest.raises(aiohttp.ClientConnectorError):
                await envoy.ask()
            async with envoy.prefill.post("/x", headers={"x-kvreturn-node": nodes[1].address}) as response:
                assert response.status == 200  # the running turn's own legs go on
            draining = asyncio.create_task(envoy.envoy.drain(5))
            await asyncio.sleep(0.1)
            assert not draining.done()
            gate.set()
            assert await running.text() == "irst"
        assert await draining
        assert await envoy.envoy.stop() == 0


async def test_the_router_may_listen_on_a_unix_socket(tmp_path: Path, nodes: tuple[Node, Node]) -> None:
    router = Router(listen=f"unix:{tmp_path}/router.sock")
    async with router.serve(), gateway(router.listen, [nodes[0].address]) as envoy:
        assert await envoy.ask() == (200, "first")
        assert len(router.calls) == 1


async def test_the_access_log_tells_what_happened_and_no_secrets(envoy: Gateway, nodes: tuple[Node, Node]) -> None:
    async with envoy.client.post(
        "/v1/completions?key=secret1", data=b"secret2", headers={"authorization": "Bearer secret3"}
    ) as response:
        assert response.status == 200
    await envoy.envoy.stop()
    (line,) = [line for line in envoy.log if "POST" in line]
    began, rest = line.split(" ", 1)
    assert abs((datetime.now(UTC) - datetime.fromisoformat(began)).total_seconds()) < 60
    assert rest.startswith("leg=client 127.0.0.1 POST /v1/completions HTTP/1.1 -> 200 ")
    assert "in=7 " in line
    (seen,) = [request for node in nodes for request, _ in node.requests if request.method == "POST"]
    assert line.endswith(f" request={seen.headers['x-request-id']}")
    assert "secret" not in "".join(envoy.log)


def _no_health_checks(bootstrap: Json) -> None:
    """So that only the refused connection can tell."""
    bootstrap["static_resources"]["clusters"][0].pop("health_checks")
