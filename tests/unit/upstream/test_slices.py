"""Nodes from EndpointSlices: a server that speaks the Kubernetes API's list and watch."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import kvreturn.upstream.slices as module
from kvreturn.settings.pools import EndpointSlices
from kvreturn.telemetry.metrics import Metrics
from kvreturn.telemetry.nodes import NodeMetrics
from kvreturn.upstream.members import Members
from kvreturn.upstream.pool import Pool
from kvreturn.upstream.slices import SliceWatch, read_slices
from support.envoy import unused_address
from support.harness import until

Json = dict[str, Any]
PATH = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
ONE, TWO = "10.0.0.1:8000", "10.0.0.2:8000"


def endpoint(address: str, **conditions: bool) -> Json:
    return {"addresses": [address], "conditions": conditions}


def piece(name: str, *endpoints: Json, version: int = 1, family: str = "IPv4") -> Json:
    """An EndpointSlice."""
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "addressType": family,
        "ports": [{"name": "metrics", "port": 9000}, {"name": "http", "port": 8000, "protocol": "TCP"}],
        "endpoints": list(endpoints),
    }


READY = {"ready": True, "serving": True, "terminating": False}


@pytest.mark.parametrize(
    ("slices", "port", "ready", "terminating"),
    [
        ([piece("a", endpoint("10.0.0.1", **READY), endpoint("10.0.0.2"))], "http", {ONE, TWO}, set()),
        ([piece("a", endpoint("10.0.0.1", **READY))], 8000, {ONE}, set()),
        ([piece("a", endpoint("10.0.0.1", **READY))], "grpc", set(), set()),
        ([piece("a", endpoint("10.0.0.1", ready=False, serving=False))], "http", set(), set()),
        ([piece("a", endpoint("10.0.0.1", ready=False, serving=True, terminating=True))], "http", set(), {ONE}),
        ([piece("a", endpoint("10.0.0.1", ready=False, serving=False, terminating=True))], "http", set(), set()),
        ([piece("a", endpoint("10.0.0.1")), piece("b", endpoint("10.0.0.2"))], "http", {ONE, TWO}, set()),
        ([piece("a", endpoint("fd00::7"), family="IPv6")], "http", {"[fd00::7]:8000"}, set()),
        ([piece("a", endpoint("fd00::7"), family="IPv6"), piece("b", endpoint("10.0.0.1"))], "http", {ONE}, set()),
        ([piece("a", endpoint("vllm.example.org"), family="FQDN")], "http", set(), set()),
        ([{**piece("a"), "endpoints": None, "ports": None}], "http", set(), set()),
        # A slice that is being rewritten names an endpoint twice for a while.
        (
            [piece("a", endpoint("10.0.0.1")), piece("b", endpoint("10.0.0.1", serving=True, terminating=True))],
            "http",
            {ONE},
            set(),
        ),
    ],
)
def test_which_endpoints_are_nodes(slices: list[Json], port: int | str, ready: set[str], terminating: set[str]) -> None:
    assert read_slices(slices, port) == (ready, terminating)


class Api:
    """The API server, as far as EndpointSlices go.

    Attributes:
        slices: what a list tells.
        version: of the list.
        refuse: status of all answers, if not 200.
        requests: queries of the requests, and the bearer token of each.
    """

    def __init__(self) -> None:
        self.slices: list[Json] = []
        self.version = 1
        self.refuse = 0
        self.requests: list[tuple[dict[str, str], str | None]] = []
        self._watches: list[asyncio.Queue[bytes | None]] = []

    def lists(self) -> int:
        return sum("watch" not in query for query, _ in self.requests)

    @property
    def watched(self) -> bool:
        return bool(self._watches)

    def event(self, kind: str, thing: Json) -> None:
        for watch in self._watches:
            watch.put_nowait(json.dumps({"type": kind, "object": thing}).encode() + b"\n")

    def end(self) -> None:
        for watch in self._watches:
            watch.put_nowait(None)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((dict(request.query), request.headers.get("authorization")))
        if self.refuse:
            return web.json_response({"kind": "Status", "code": self.refuse}, status=self.refuse)
        if "watch" not in request.query:
            items = {"metadata": {"resourceVersion": str(self.version)}, "items": self.slices}
            return web.json_response(items)
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watches.append(queue)
        try:
            while (line := await queue.get()) is not None:
                await response.write(line[:7])  # a line comes in pieces
                await response.write(line[7:])
        finally:
            self._watches.remove(queue)
        return response


class Here:
    def __init__(self, api: Api, address: str, token: Path) -> None:
        self.api = api
        self.pool = Pool([], time.monotonic, kind="decode")
        self.metrics = Metrics()
        settings = EndpointSlices(
            service="vllm-decode",
            namespace="serving",
            port="http",
            server=f"http://{address}",
            token_file=str(token),
        )
        self.watch = SliceWatch(settings, Members(self.pool, NodeMetrics(self.metrics, {})))

    async def nodes(self, **expected: bool) -> None:
        """Wait until these are the nodes, and whether they drain."""
        wanted = {f"10.0.0.{name[1:]}:8000": drains for name, drains in expected.items()}
        await until(lambda: self.pool.addresses() == wanted)

    def errors(self, kind: str) -> float:
        return self.metrics.value("kvreturn_discovery_errors_total", pool="decode", kind=kind)


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Here]:
    monkeypatch.setattr(module, "_BACKOFF", (0.01, 0.05))
    token = tmp_path / "token"
    token.write_text("first\n")
    api, address = Api(), unused_address()
    api.slices = [piece("a", endpoint("10.0.0.1", **READY), version=5)]
    api.version = 7
    app = web.Application()
    app.router.add_get(PATH, api.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    host, _, port = address.rpartition(":")
    await web.TCPSite(runner, host, int(port)).start()
    there = Here(api, address, token)
    task = asyncio.create_task(there.watch.run())
    yield there
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await runner.cleanup()


async def test_a_list_and_then_every_change(here: Here, tmp_path: Path) -> None:
    await here.nodes(n1=False)
    await until(lambda: here.api.watched)
    service = {"labelSelector": "kubernetes.io/service-name=vllm-decode"}
    assert here.api.requests[0] == (service, "Bearer first")
    query, _ = here.api.requests[1]
    assert (query["watch"], query["resourceVersion"], query["allowWatchBookmarks"]) == ("1", "7", "true")
    here.api.event("ADDED", piece("b", endpoint("10.0.0.2", **READY), version=8))
    await here.nodes(n1=False, n2=False)
    here.api.event("MODIFIED", piece("a", endpoint("10.0.0.1", serving=True, terminating=True), version=9))
    await here.nodes(n1=True, n2=False)
    here.api.event("DELETED", piece("a", version=10))
    await here.nodes(n2=False)
    # The server ends a watch now and then: on it goes from the last version, bookmarks included. Tokens change.
    here.api.event("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": "20"}})
    (tmp_path / "token").write_text("second")
    here.api.end()
    await until(lambda: len(here.api.requests) == 3)
    query, token = here.api.requests[2]
    assert (query["resourceVersion"], token) == ("20", "Bearer second")
    assert here.api.lists() == 1


@pytest.mark.parametrize("how", ["event", "status"])
async def test_what_is_too_old_is_listed_again(here: Here, how: str) -> None:
    await here.nodes(n1=False)
    await until(lambda: here.api.watched)
    here.api.slices = [piece("c", endpoint("10.0.0.3", **READY), version=50)]
    here.api.version = 50
    if how == "event":
        here.api.event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
    else:
        here.api.refuse = 410
        here.api.end()
        await until(lambda: len(here.api.requests) > 3)
        here.api.refuse = 0
    await here.nodes(n3=False)
    assert here.api.lists() >= 2
    assert here.pool.addresses() == {"10.0.0.3:8000": False}


async def test_a_server_that_fails_leaves_the_nodes_and_is_asked_again(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    await here.nodes(n1=False)
    await until(lambda: here.api.watched)
    here.api.refuse = 403
    here.api.end()
    await until(lambda: here.errors("failed") >= 3)
    assert here.pool.addresses() == {ONE: False}
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("service vllm-decode tells no decode nodes (the API server answers 403: ")
    here.api.refuse = 0
    await until(lambda: here.api.watched)
    await until(lambda: len(caplog.messages) == 2)
    assert caplog.messages[1] == "service vllm-decode tells decode nodes again"
    here.api.event("MODIFIED", piece("a", endpoint("10.0.0.2", **READY), version=60))
    await here.nodes(n2=False)


async def test_rubbish_does_not_end_it(here: Here) -> None:
    await until(lambda: here.api.watched)
    here.api.event("ADDED", {"metadata": {}})
    await until(lambda: here.errors("failed") == 1)
    await until(lambda: here.api.watched)
    here.api.event("ADDED", piece("b", endpoint("10.0.0.2", **READY), version=8))
    await here.nodes(n1=False, n2=False)


async def test_a_service_without_endpoints_does_not_empty_the_pool(here: Here) -> None:
    await here.nodes(n1=False)
    await until(lambda: here.api.watched)
    here.api.event("MODIFIED", piece("a", version=8))
    await until(lambda: here.errors("empty") == 1)
    assert here.pool.addresses() == {ONE: False}


async def test_outside_of_a_cluster_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool([ONE], time.monotonic)
    watch = SliceWatch(EndpointSlices(service="s", port=1), Members(pool, NodeMetrics(Metrics(), {})))
    task = asyncio.create_task(watch.run())
    await until(lambda: caplog.messages)
    task.cancel()
    assert "No such file or directory: '/var/run/secrets/kubernetes.io/serviceaccount/namespace'" in caplog.messages[0]
