"""What `kvreturn doctor` finds at nodes, stores and collectors that run: simulated ones, and some that do as told."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvreturn_connector.about import about
from kvreturn_connector.settings import Settings as ConnectorSettings

from kvreturn import __version__
from kvreturn.doctor.flags import from_about
from kvreturn.doctor.model import Finding
from kvreturn.doctor.run import Plan, diagnose
from kvreturn.sim import NodeConfig, SimNode
from kvreturn.sim.about import about as simulated
from kvreturn.sim.fabric import Address
from support.doctor import SECRET, D, P, Scripted, nodes, settings_file, worst
from support.nodes import FakePrefill, prefill_params
from support.redis import needs_redis, server

LEAK = {"choices": [{"text": "x"}], "kv_transfer_params": prefill_params()}
UNSIGNED_P, UNSIGNED_D = replace(P, secret=b""), replace(D, secret=b"")
STOCK_P, STOCK_D = replace(P, connector="stock", secret=b""), replace(D, connector="stock", secret=b"")


@pytest.mark.parametrize(
    ("p", "d", "changes", "check", "status", "finding"),
    [
        (P, D, {}, "proof", "ok", "read back"),
        (P, D, {}, "flags.secret", "ok", "as the router has it"),
        (P, replace(D, secret=b""), {}, "flags.secret", "fail", "none, and the router has one"),
        (P, replace(D, secret=b"another"), {}, "flags.secret", "fail", "another one than the router's"),
        (P, D, {"secret": ""}, "flags.secret", "fail", "one and the same on all nodes, and these settings have none"),
        (UNSIGNED_P, UNSIGNED_D, {}, "flags.secret", "warn", "could search for prompts with another one's digests"),
        (UNSIGNED_P, UNSIGNED_D, {}, "proof", "ok", "read back"),
        (UNSIGNED_P, UNSIGNED_D, {"proof": "router"}, "flags.secret", "fail", "signed handles only"),
        (UNSIGNED_P, UNSIGNED_D, {"return": "eager"}, "flags.secret", "fail", "not sent back eagerly"),
        (P, replace(D, secret=b"another"), {}, "streams", "fail", "leaves no handle"),
        (replace(P, secret=b"x"), replace(D, secret=b"x"), {}, "flags.secret", "fail", "settings have another"),
        (replace(P, secret=b"x"), replace(D, secret=b"x"), {}, "secret", "skipped", "see the check `flags.secret`"),
        (UNSIGNED_P, UNSIGNED_D, {"secret": ""}, "secret", "warn", "none"),
        (P, replace(D, bidirectional=False), {}, "flags.bidirectional_kv_xfer", "fail", "leave no handle"),
        (P, replace(D, bidirectional=False), {}, "streams", "fail", "leaves no handle"),
        (replace(P, bidirectional=False), D, {}, "proof", "fail", "disabled"),
        (replace(P, block_size=32), D, {}, "flags.block_size", "fail", "differs"),
        (replace(P, block_size=32), D, {}, "proof", "fail", "block_size"),
        (replace(P, allowed_peers=("10.9.9.9",)), D, {}, "proof", "fail", "peer"),
        (replace(P, recompute_threshold=5_000), D, {}, "proof", "warn", "below_threshold"),
        (P, replace(D, retention_budget=0.0), {}, "streams", "fail", "leaves no handle"),
        (P, replace(D, decoder_ttl=300), {}, "ttl", "fail", "hand out handles"),
        (P, replace(D, decoder_ttl=4), {}, "ttl", "fail", "declines reads"),
        (P, replace(D, decoder_ttl=4), {}, "proof", "fail", "expired"),
        (P, STOCK_D, {}, "streams", "fail", "streams carry no handle, its whole answers do"),
        (P, STOCK_D, {}, "proof", "skipped", "the decode node runs the stock connector"),
        (STOCK_P, D, {}, "proof", "skipped", "the prefill node runs the stock connector"),
        (STOCK_P, D, {}, "flags.connector", "warn", "ignores sealed handles"),
        (STOCK_P, STOCK_D, {}, "flags.connector", "fail", "prove nothing"),
        (STOCK_P, STOCK_D, {}, "flags.kv_load_failure_policy", "skipped", "does not tell"),
        (replace(STOCK_P, bidirectional=False), D, {}, "flags.bidirectional_kv_xfer", "fail", "hangs"),
        (replace(STOCK_P, bidirectional=False), D, {"return": "eager"}, "flags.bidirectional_kv_xfer", "ok", ""),
        (replace(P, role="single", connector="stock"), D, {}, "flags.connector", "fail", "no KV connector"),
        (replace(P, role="single", connector="stock"), D, {}, "pair", "skipped", "needs a prefill and a decode node"),
        (replace(P, model="a"), replace(D, model="b"), {}, "models", "fail", "no model is served by all"),
        (replace(P, aliases=("also",)), D, {}, "models", "warn", "also: not on all nodes"),
        (replace(P, prefix_caching=False), D, {}, "flags.prefix_caching", "warn", "what is not read back is computed"),
        (replace(P, prefix_caching=False), D, {"return": "eager"}, "flags.prefix_caching", "fail", "nothing stays"),
        (P, D, {"limits": {"min_tokens": 1}}, "flags.kv_recompute_threshold", "warn", "spent unread"),
    ],
)
async def test_what_nodes_are_and_do_is_found(  # noqa: PLR0917 - as parametrized
    tmp_path: Path, p: NodeConfig, d: NodeConfig, changes: dict[str, Any], check: str, status: str, finding: str
) -> None:
    async with nodes(tmp_path, p, d, **changes) as there:
        found = worst(await there.findings(), check)
        # A stock node's stream leaves a pin of one token that it does not tell of.
        async with asyncio.timeout(2):
            while there.p.blocks().pinned or there.d.blocks().pinned > (d.connector == "stock"):  # noqa: ASYNC110 - as it is
                await asyncio.sleep(0.01)
    assert found.status == status, found
    assert finding in found.found
    assert bool(found.remedy) == (status in {"fail", "warn"}) or status == "skipped"


async def test_a_decode_node_that_p_cannot_reach_is_told_as_node_gone(tmp_path: Path) -> None:
    async with nodes(tmp_path) as there:
        real = there.d.engine.address
        there.d.engine.address = Address("127.0.0.1", 1)  # what its handles name from now on
        findings = await there.findings()
        there.d.engine.address = real
    assert (found := worst(findings, "proof")).status == "fail"
    assert "node_gone" in found.found
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in found.remedy
    assert (hint := worst(findings, "side_channel")).status == "warn"
    assert "a hint only" in hint.found


def _told(**members: Any) -> Callable[[Any], tuple[int, object]]:  # noqa: ANN401 - JSON
    """A node with our connector that tells this of itself."""
    full = {**simulated(P, Address("10.0.0.9", 5600)), **members}

    def completion(body: Any) -> tuple[int, object]:  # noqa: ANN401 - JSON
        asks = body["kv_transfer_params"].get("kvreturn") or {}
        report = {"v": 1, "proven": 0, "read": 0, "local": 0, "reason": "malformed"}
        if asks.get("about") and full["connector"]:
            report["about"] = full
        elif members.get("fails"):
            return 500, "boom"
        return 200, {"choices": [{"text": ""}], "kv_transfer_params": {"kvreturn": report}}

    return completion


def _answers(**changes: object) -> dict[str, tuple[int, object]]:
    return {**Scripted().answers, **changes}  # type: ignore[dict-item] # as the callers write them


@contextlib.asynccontextmanager
async def scripted(folder: Path, p: Scripted, **changes: Any) -> AsyncIterator[list[Finding]]:  # noqa: ANN401 - settings
    """Findings about a node that does as told, beside a healthy decode node."""
    d = SimNode(D)
    async with FakePrefill(p) as fake:
        try:
            address = (await d.start()).removeprefix("http://")
            path, _ = settings_file(folder, fake.address, address, **changes)
            yield list((await diagnose(Plan(path, seconds=1.0))).findings)
        finally:
            await d.stop()


@pytest.mark.parametrize(
    ("p", "check", "status", "finding"),
    [
        (Scripted(_answers(**{"/health": (503, "")})), "node.health", "fail", "HTTP 503"),
        (Scripted(_answers(**{"/version": (404, "")})), "node.version", "warn", "HTTP 404"),
        (Scripted(_answers(**{"/v1/models": (401, "no")})), "node.models", "fail", "HTTP 401: no"),
        (Scripted(_answers(**{"/v1/models": (200, "<html>")})), "node.models", "fail", "HTTP 200"),
        (Scripted(completion=lambda _: (500, "boom")), "node.connector", "fail", "HTTP 500: boom"),
        (Scripted(completion=lambda _: (200, "[]")), "node.connector", "fail", "HTTP 200"),
        (Scripted(completion=_told(connector=None)), "node.connector", "warn", "older"),
        (Scripted(completion=_told(connector="9.1.0")), "versions.connector", "fail", f"9.1.0, router {__version__}"),
        (Scripted(completion=_told(vllm="0.33.0")), "versions.vllm", "fail", "0.33.0"),
        (Scripted(completion=_told(role="kv_consumer")), "flags.kv_role", "fail", "node of pools.prefill"),
        (Scripted(completion=_told(kv_cache_dtype="fp8")), "flags.kv_cache_dtype", "fail", "fp8"),
        (Scripted(completion=_told(tp=2)), "flags.tensor_parallel_size", "warn", "differs"),
        (Scripted(completion=_told(ucx_tls="tcp")), "transport", "warn", "over TCP"),
        (Scripted(completion=_told(backends=["LIBFABRIC"])), "transport", "fail", "differs"),
        (Scripted(completion=_told(time=time.time() - 36_000)), "clock", "warn", "-36"),
        (Scripted(headers={"date": "Sun, 01 Nov 2020 00:00:00 GMT"}), "clock", "warn", " s against this machine"),
        (Scripted(completion=_told(ttl="soon", tp=True, backends=1)), "node.connector", "ok", "kvreturn connector"),
        (Scripted(completion=lambda _: (200, LEAK)), "node.connector", "ok", "stock"),
        (Scripted(completion=_told(fails=True)), "pair", "fail", "prefill: HTTP 500: boom"),
    ],
)  # fmt: skip
async def test_what_a_strange_node_says_is_found(
    tmp_path: Path, p: Scripted, check: str, status: str, finding: str
) -> None:
    async with scripted(tmp_path, p) as findings:
        found = worst(findings, check)
        assert found.status == status, found
        assert finding in found.found
        assert not [f for f in findings if "the check itself failed" in f.found]


async def test_a_gateway_that_gives_handles_away_is_found(tmp_path: Path) -> None:
    leaks = Scripted(completion=lambda _: (200, LEAK))
    refuses = Scripted(completion=lambda _: (403, "who are you?"))
    async with nodes(tmp_path) as there, FakePrefill(leaks) as one, FakePrefill(refuses) as other:
        leaking = worst(await there.findings(gateway=f"http://{one.address}"), "gateway")
        refusing = worst(await there.findings(gateway=f"http://{other.address}/"), "gateway")
    assert (leaking.status, leaking.found) == ("fail", "the client gets kv_transfer_params")
    assert refusing.found == "the gateway refuses the probe: HTTP 403: who are you?"
    assert "--api-key" in refusing.remedy
    assert other.seen[0].headers["authorization"] == "Bearer kvreturn-doctor"


async def test_credentials_go_to_nodes_and_gateway(tmp_path: Path) -> None:
    refuses = Scripted(completion=lambda _: (403, "no"))
    async with nodes(tmp_path) as there, FakePrefill(refuses) as gateway:
        await there.findings(gateway=f"http://{gateway.address}", headers={"authorization": "Bearer k"})
        sent = {request.headers.get("authorization") for request in there.p.requests}
    assert sent == {"Bearer k"}
    assert gateway.seen[0].headers["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("environ", "status", "finding"),
    [
        ({}, "skipped", "ask for no OTLP"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, "warn", "127.0.0.1:1: connection refused"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "fail", "zipkin"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:port"}, "fail", "is no endpoint"),
    ],
)
async def test_where_traces_go_is_tried(tmp_path: Path, environ: dict[str, str], status: str, finding: str) -> None:
    async with nodes(tmp_path) as there:
        found = worst(await there.findings(environ=environ), "otlp")
    assert (found.status.value, finding in found.found) == (status, True), found


@needs_redis
class TestStore:
    @pytest.fixture
    def redis(self, tmp_path: Path) -> Iterator[Any]:
        with server(tmp_path) as running:
            yield running

    async def look(self, folder: Path, url: str, **store: Any) -> list[Finding]:  # noqa: ANN401 - settings
        path, _ = settings_file(folder, "127.0.0.1:1", "127.0.0.1:1", store={"url": url, **store})
        return list((await diagnose(Plan(path, seconds=1.0))).findings)

    async def test_a_good_one_is_ok(self, tmp_path: Path, redis: Any) -> None:  # noqa: ANN401 - a server
        redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        findings = [f for f in await self.look(tmp_path, redis.url, deadline=1.0) if f.check.startswith("store")]
        assert {f.check for f in findings} == {
            *("store", "store.version", "store.eviction", "store.persistence", "store.latency", "store.clock"),
        }
        assert {f.status.value for f in findings} == {"ok"}

    async def test_one_that_evicts_is_named(self, tmp_path: Path, redis: Any) -> None:  # noqa: ANN401 - a server
        redis.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        found = worst(await self.look(tmp_path, redis.url), "store.eviction")
        assert (found.status, found.remedy) == ("warn", "CONFIG SET maxmemory-policy noeviction")

    async def test_one_that_is_slower_than_the_deadline_is_named(self, tmp_path: Path, redis: Any) -> None:  # noqa: ANN401
        assert worst(await self.look(tmp_path, redis.url, deadline=1e-6), "store.latency").status == "fail"

    async def test_a_wrong_password_is_named(self, tmp_path: Path, redis: Any) -> None:  # noqa: ANN401 - a server
        redis.ask("CONFIG", "SET", "requirepass", "right")
        url = redis.url.replace("redis://", "redis://:wrong@")
        found = worst(await self.look(tmp_path, url), "store")
        assert (found.status, found.remedy) == ("fail", "correct user and password in store.url")
        assert "wrong" not in found.found


async def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    path, _ = settings_file(tmp_path, "127.0.0.1:1", "127.0.0.1:1", store={"url": "redis://127.0.0.1:1"})
    found = worst(list((await diagnose(Plan(path, seconds=1.0))).findings), "store")
    assert found.status == "fail"
    assert "refused" in found.found


async def test_several_routers_without_a_store_are_named(tmp_path: Path) -> None:
    routers = {"envoy": {"routers": ["10.0.0.5:9090", "10.0.0.6:9090"]}}
    path, _ = settings_file(tmp_path, "127.0.0.1:1", "127.0.0.1:1", **routers)
    assert worst(list((await diagnose(Plan(path, seconds=1.0))).findings), "store").status == "fail"


class _Config:
    """As much of vLLM's configuration as the connector tells of."""

    class kv_transfer_config:  # noqa: N801 - vLLM's name
        kv_role = "kv_producer"
        kv_connector_extra_config = {"bidirectional_kv_xfer": True}  # noqa: RUF012 - as vLLM has it

    class cache_config:  # noqa: N801 - vLLM's name
        block_size = 16
        enable_prefix_caching = True
        cache_dtype = "auto"

    class parallel_config:  # noqa: N801 - vLLM's name
        tensor_parallel_size = 2
        pipeline_parallel_size = 1


def test_connector_and_simulator_tell_the_same_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvreturn_connector.about.vllm_version", lambda: "0.32.0")
    settings = ConnectorSettings(bidirectional=True, secret=SECRET.encode())
    told = about(_Config, settings, ("10.0.0.1", 5600), {"UCX_TLS": "rc"})
    ours = simulated(P, Address("10.0.0.1", 5600))
    assert told.keys() == ours.keys()
    assert told["scope"] == ours["scope"]
    assert SECRET not in json.dumps([told, ours])
    flags = from_about("10.0.0.1:8000", "prefill", told)
    assert (flags.tp, flags.ucx_tls, flags.ttl, flags.backends) == (2, "rc", 480.0, ("UCX",))
