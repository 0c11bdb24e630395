"""Draining nodes by the admin port."""

import pytest
from aiohttp.test_utils import TestClient, TestServer

from kvreturn.server.admin import HEADER, admin_app
from support.harness import DECODE, harness


@pytest.mark.parametrize(
    ("kind", "address"), [("decode", DECODE), ("prefill", "10.0.0.3:8100"), ("decode", "[fd00::7]:8200")]
)
async def test_a_node_drains_until_it_is_taken_back(kind: str, address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    router = harness(pools={"prefill": ["10.0.0.1:8100", "10.0.0.3:8100"], "decode": [DECODE, "[fd00::7]:8200"]})
    pool = router.world.decode if kind == "decode" else router.world.prefill
    pool.started(address, 7)
    path = f"/kvreturn/pools/{kind}/{address}/drain"
    async with TestClient(TestServer(admin_app(router.world, "127.0.0.1"))) as admin:
        for method, state in (("POST", "draining"), ("POST", "draining"), ("DELETE", "up"), ("DELETE", "up")):
            async with admin.request(method, path, headers={HEADER: "1"}) as answer:
                assert answer.status == 200
                assert await answer.json() == {"address": address, "state": state, "load": 7}
            assert pool.states()[address] == state
        assert router.metric("nodes", pool=kind, state="up") == 2
    assert [r.getMessage() for r in caplog.records if r.name == "kvreturn.pool"] == [
        f"{kind} node {address} drains until this process restarts or is told otherwise",
        f"{kind} node {address} drains no longer",
    ]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("decode/10.9.9.9:1", {HEADER: "1"}, 404),
        ("prefill/" + DECODE, {HEADER: "1"}, 404),
        ("other/" + DECODE, {HEADER: "1"}, 404),
        ("decode/" + DECODE, {}, 403),
    ],
)
async def test_what_is_refused(path: str, headers: dict[str, str], status: int) -> None:
    router = harness()
    async with TestClient(TestServer(admin_app(router.world, "127.0.0.1"))) as admin:
        for method in ("POST", "DELETE"):
            async with admin.request(method, f"/kvreturn/pools/{path}/drain", headers=headers) as answer:
                assert answer.status == status
                assert "kvreturn: " in await answer.text()
    assert router.world.decode.states() == {DECODE: "up"}
