"""What `kvreturn doctor` finds at routers that run: which of them do, with which secret, by which settings."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvreturn.config import Settings
from kvreturn.doctor.context import Context
from kvreturn.doctor.model import Finding
from kvreturn.doctor.pair import choose
from kvreturn.server.app import running
from support.doctor import Deployment, nodes, told, worst
from support.envoy import unused_address

_NO_ENVOY = {"envoy", "gateway"}  # none runs here


@contextlib.asynccontextmanager
async def with_router(folder: Path, **changes: Any) -> AsyncIterator[Deployment]:  # noqa: ANN401 - settings as YAML has them
    """Two simulated nodes and a router."""
    async with nodes(folder, **changes) as there, running(there.settings):
        yield there


def bad(findings: list[Finding]) -> list[str]:
    return [f.check for f in findings if f.status in {"fail", "warn"} and f.check not in _NO_ENVOY]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"KVRETURN_SECRET": "another"}, "this shell's secret is another one"),
        ({}, "this shell has no secret, and the router that runs has one"),
    ],
)
async def test_a_wrong_secret_of_the_shell_is_one_failure_and_no_nodes(
    tmp_path: Path, environ: dict[str, str], found: str
) -> None:
    async with with_router(tmp_path) as there:
        plain = yaml.safe_load(there.config.read_text())
        del plain["secret"]
        there.config.write_text(yaml.safe_dump(plain))
        findings = await there.findings(environ=environ)
    assert bad(findings) == ["config.secret"]
    assert found in worst(findings, "config.secret").found
    assert told(findings, "secret") == [("ok", "the same on router and decode node, by their digests")]


async def test_settings_that_the_router_does_not_go_by_are_named(tmp_path: Path) -> None:
    async with with_router(tmp_path, store={"ttl": 300.0}) as there:
        assert worst(await there.findings(), "config.running").status == "ok"
        plain = yaml.safe_load(there.config.read_text())
        plain["store"]["ttl"] = 200.0
        there.config.write_text(yaml.safe_dump(plain))
        findings = await there.findings()
    assert bad(findings) == ["config.running"]
    finding = worst(findings, "config.running")
    assert finding.found == "the router runs with other settings: store.ttl (here 200.0, there 300.0)"
    assert "reload" in finding.remedy


async def test_each_router_that_envoy_may_send_to_is_asked(tmp_path: Path) -> None:
    listens = [unused_address() for _ in range(3)]
    envoy = {"envoy": {"routers": listens}}
    async with with_router(tmp_path, listen=listens[0], **envoy) as there:
        second = there.settings.model_copy(update={"listen": listens[1], "admin": None})
        async with running(second):
            findings = await there.findings()
    assert [(f.subject, f.status.value) for f in findings if f.check == "router"] == [
        (listens[0], "ok"),
        (f"{there.settings.calls_of(listens[0])} (calls)", "ok"),
        (listens[1], "ok"),
        (f"{there.settings.calls_of(listens[1])} (calls)", "ok"),
        (listens[2], "fail"),  # so nobody is called there
    ]
    dead = worst(findings, "router")
    assert (dead.found, "take it out of envoy.routers" in dead.remedy) == ("connection refused", True)


@pytest.mark.parametrize(
    ("lane", "there", "status", "found"),
    [
        ("fast", "same", "ok", "takes the calls of Envoy's scripts"),
        ("fast", "closed", "fail", "connection refused"),
        ("fast", "a node", "fail", "HTTP 404"),
        ("fast", "drains", "fail", "starts, or drains"),
        ("portable", "closed", None, ""),
    ],
)
async def test_a_router_must_take_the_calls_of_scripts_where_there_are_any(
    tmp_path: Path, lane: str, there: str, status: str | None, found: str
) -> None:
    calls = unused_address()
    envoy = {"lane": lane, "listen": unused_address(), "prefill_listen": unused_address(), "admin": unused_address()}
    async with nodes(tmp_path, calls=calls, envoy=envoy) as deployed, running(deployed.settings) as router:
        router._calls.serving = there != "drains"
        plain = yaml.safe_load(deployed.config.read_text())
        node = deployed.settings.pools.sources["prefill"].static[0]
        other = {"closed": unused_address(), "a node": node}.get(there, calls)
        deployed.config.write_text(yaml.safe_dump({**plain, "calls": other}))
        findings = await deployed.findings()
    told = [f for f in findings if f.check == "router" and f.subject == f"{other} (calls)"]
    assert [f.status.value for f in told] == ([status] if status else [])
    assert all(found in f.found for f in told)
    assert all("set `calls` as it has it" in f.remedy for f in told if status == "fail")


@pytest.mark.parametrize(
    ("port", "status", "found"),
    [(1, "fail", "connection refused"), (None, "warn", "may not be reached from here")],
)
async def test_a_name_is_asked_for_at_each_of_its_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int | None, status: str, found: str
) -> None:
    async def silent(self: Context, host: str, port: int) -> str:
        del self, host, port
        return "no answer within 2 s"

    listen = f"localhost:{port or 2}"
    if port is None:
        monkeypatch.setattr(Context, "connects", silent)
    async with nodes(tmp_path, envoy={"routers": [listen]}) as there:
        findings = await there.findings()
    at = [f for f in findings if f.check == "router" and f.subject.startswith(f"{listen} (")]
    assert {(f.status.value, found in f.found) for f in at} == {(status, True)}
    assert f"{listen} (127.0.0.1:{port or 2})" in {f.subject for f in at}


async def test_nodes_that_the_router_has_discovered_are_looked_at(tmp_path: Path) -> None:
    async with nodes(tmp_path) as there:
        plain = yaml.safe_load(there.config.read_text())
        found = {side: there.settings.pools.sources[side].static[0] for side in ("prefill", "decode")}
        plain["pools"] = {side: {"dns": f"localhost:{address.split(':')[1]}"} for side, address in found.items()}
        there.config.write_text(yaml.safe_dump(plain))
        async with running(Settings.model_validate(plain)):
            findings = await there.findings()
    subjects = {f.subject for f in findings if (f.check, f.status) == ("node.health", "ok")}
    assert subjects == {f"prefill {found['prefill']}", f"decode {found['decode']}"}


async def test_where_only_the_router_knows_the_nodes_and_is_away_that_is_said(tmp_path: Path) -> None:
    slices = {"endpoint_slices": {"service": "vllm", "port": "http"}}
    async with nodes(tmp_path, pools={"prefill": slices, "decode": slices}) as there:
        findings = await there.findings()
    assert [f.found for f in findings if f.check == "node"] == [
        "who is in pools.prefill is for the router to tell",
        "who is in pools.decode is for the router to tell",
    ]


async def test_what_listens_but_is_no_router_is_told(tmp_path: Path) -> None:
    async with nodes(tmp_path) as there:
        node = there.settings.pools.sources["prefill"].static[0]
        plain = yaml.safe_load(there.config.read_text())
        there.config.write_text(yaml.safe_dump({**plain, "listen": node}))
        assert "no answer to a gRPC health check" in worst(await there.findings(), "router").found


async def test_workers_of_the_command_line_are_asked_too(tmp_path: Path) -> None:
    away = {"listen": "127.0.0.1:1", "prefill_listen": "127.0.0.1:2", "admin": "127.0.0.1:3"}
    async with with_router(tmp_path, listen=f"unix:{tmp_path}/router", envoy=away) as there:
        plain = yaml.safe_load(there.config.read_text())
        there.config.write_text(yaml.safe_dump({**plain, "store": {"url": "redis://127.0.0.1:1"}}))  # workers need one
        findings = await there.findings(workers=2)
    listen = there.settings.listen
    assert [(f.subject, f.status.value) for f in findings if f.check == "router"] == [
        (listen, "ok"),
        (f"{listen}.calls (calls)", "ok"),
        (f"{listen}.1", "fail"),
    ]
    assert "workers (here 2, there 1)" in worst(findings, "config.running").found


async def test_an_admin_port_of_envoy_that_nobody_set_may_be_elsewhere(tmp_path: Path) -> None:
    async with nodes(tmp_path) as there:
        plain = yaml.safe_load(there.config.read_text())
        del plain["envoy"]["admin"]
        there.config.write_text(yaml.safe_dump(plain))
        findings = await there.findings()
    finding = worst(findings, "envoy")
    assert (finding.status, "port-forward" in finding.remedy) == ("skipped", True)
    assert "--gateway URL" in worst(findings, "gateway").remedy


@pytest.mark.parametrize(("p", "d", "probed"), [(1, 1, 1), (2, 3, 6), (4, 4, 16), (3, 6, 16), (1, 40, 40), (80, 1, 64)])
def test_all_pairs_are_probed_up_to_16_or_as_many_as_it_takes_to_have_each_node(p: int, d: int, probed: int) -> None:
    prefill, decode = [f"p{i}" for i in range(p)], [f"d{i}" for i in range(d)]
    chosen, rest = choose(prefill, decode)
    assert (len(chosen), len(set(chosen + rest))) == (probed, p * d)
    if max(p, d) <= 64:
        assert {x for x, _ in chosen} | {y for _, y in chosen} == {*prefill, *decode}
