"""`kvreturn doctor` against the whole product: real Envoy, the router, simulated nodes."""

import asyncio
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvreturn.cli.main import main
from kvreturn.sim import NodeConfig
from support.doctor import D, Deployment, P, deployment, nodes, told, worst
from support.envoy import Json, client_ext_proc, client_manager

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"
EAGER = {"return": "eager"}


async def command(there: Deployment, *arguments: str, **environ: str) -> Result:
    """The command as users run it, in a thread."""
    run = CliRunner(env=environ).invoke
    return await asyncio.to_thread(run, main, ["doctor", "--config", str(there.config), *arguments])


@pytest.mark.parametrize("changes", [{}, EAGER], ids=["lazy", "eager"])
async def test_a_healthy_deployment_is_all_ok_and_left_as_it_was(tmp_path: Path, changes: Json) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}"
        async with deployment(tmp_path, **changes) as there:
            ran = await command(there, "--json", "--strict", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
            report = json.loads(ran.stdout)
            assert [f for f in report["findings"] if f["status"] != "ok"] == []
            assert (ran.exit_code, report["status"]) == (0, "ok")
            assert all(f["remedy"] == "" for f in report["findings"])
            async with asyncio.timeout(5):
                while any(node.blocks().pinned for node in (there.p, there.d)):  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.01)
    checks = {f["check"] for f in report["findings"]}
    assert {"streams", "proof", "secret", "side_channel", "gateway.outcome", "envoy.lint", "otlp", "ttl"} <= checks
    documented = set(re.findall(r"`([a-z_.]+)`", DOCS.read_text().partition("## The checks")[2]))
    assert checks <= documented
    assert ("eager_return" in checks) == (changes == EAGER)


def _short_timeout(bootstrap: Json) -> None:
    client_ext_proc(bootstrap)["message_timeout"] = "0.2s"


def _calls_elsewhere(bootstrap: Json) -> None:
    for cluster in bootstrap["static_resources"]["clusters"]:
        if cluster["name"].startswith("kvreturn_requests@"):
            cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"][
                "port_value"
            ] = 9


def _another_node(bootstrap: Json) -> None:
    (cluster,) = [c for c in bootstrap["static_resources"]["clusters"] if c["name"] == "prefill"]
    (one,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    other = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 9}}}}
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [one, other]


def _no_filter(bootstrap: Json) -> None:
    manager = client_manager(bootstrap)
    manager["http_filters"] = [f for f in manager["http_filters"] if not re.search("ext_proc|lua", f["name"])]
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        route.pop("typed_per_filter_config", None)


@pytest.mark.parametrize(
    ("change", "check", "status", "found"),
    [
        (_short_timeout, "envoy.lint", "fail", "14-message-timeout-floor"),
        (_calls_elsewhere, "envoy.lane", "fail", "Envoy's scripts call 127.0.0.1:9"),
        (_another_node, "envoy.nodes", "fail", "Envoy also knows 127.0.0.1:9"),
        (_no_filter, "gateway.outcome", "skipped", "this router counted no turn"),
    ],
)
async def test_what_is_wrong_with_envoy_is_named(
    tmp_path: Path, change: Callable[[Json], None], check: str, status: str, found: str
) -> None:
    async with deployment(tmp_path, change=change) as there:
        finding = worst(await there.findings(), check)
    assert finding.status == status
    assert found in finding.found
    assert finding.remedy


@pytest.mark.parametrize(
    ("p", "d", "changes", "check", "status", "found"),
    [
        (P, replace(D, bidirectional=False), {}, "gateway.outcome", "fail", "no_handle_from_decode"),
        (P, replace(D, connector="stock"), {}, "gateway.outcome", "fail", "no_handle_from_decode"),
        (replace(P, bidirectional=False), D, {}, "gateway.outcome", "fail", "unproven"),
        (replace(P, block_size=32), D, {}, "gateway.outcome", "fail", "unproven"),
        (P, D, {"proof": "off"}, "gateway.outcome", "warn", "nothing is read back"),
        (P, replace(D, secret=b"another"), {}, "gateway.outcome", "fail", "no_handle_from_decode"),
        (P, replace(D, bidirectional=False), EAGER, "eager_return", "fail", "no return was counted"),
        (P, D, {"return": "auto"}, "eager_return", "ok", "left the probe's turn on the decode node"),
        (P, D, {"tenant_header": "x-tenant"}, "gateway.outcome", "ok", "the second turn is a hit"),
    ],
)
async def test_what_becomes_of_reuse_is_told_with_a_remedy(  # noqa: PLR0917 - as parametrized
    tmp_path: Path, p: NodeConfig, d: NodeConfig, changes: Json, check: str, status: str, found: str
) -> None:
    async with deployment(tmp_path, p, d, **changes) as there:
        finding = worst(await there.findings(), check)
    assert finding.status == status, finding
    assert found in finding.found
    assert bool(finding.remedy) == (status != "ok")


async def test_nothing_runs(tmp_path: Path) -> None:
    async with nodes(tmp_path) as there:
        await there.p.stop()
        await there.d.stop()
        ran = await command(there)
    assert ran.exit_code == 1
    assert isinstance(ran.exception, SystemExit)
    lines = ran.stdout.splitlines()
    for check in ("node.health", "router", "envoy"):
        assert any(line.split()[:2] == ["fail", check] and " -> " in line for line in lines), check
    assert lines[-1].startswith("fail: ")
    assert "Traceback" not in ran.output


async def test_another_deployment_than_that_of_the_settings_is_told(tmp_path: Path) -> None:
    """The gateway is a node itself: what goes there passes no router."""
    async with nodes(tmp_path) as there:
        base = f"http://{there.settings.pools.sources['decode'].static[0]}"
        findings = await there.findings(gateway=base)
    assert told(findings, "gateway")[0][0] == "ok"
    assert worst(findings, "gateway.outcome").status == "skipped"


async def test_everything_that_hangs_costs_its_timeout_only(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        changes: dict[str, Any] = {
            "pools": {"prefill": [address], "decode": [address]},
            "envoy": {"admin": address},
            "store": {"url": f"redis://{address}"},
        }
        async with nodes(tmp_path, **changes) as there:
            diagnosis = await there.diagnose(seconds=0.3, environ=dict(os.environ))
    assert diagnosis.seconds < 5
    for check in ("node.health", "envoy", "store"):
        assert "no answer within 0.3 s" in worst(list(diagnosis.findings), check).found
