"""What is compared: ways from a client to a node, each started as its own manual says."""

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from kvreturn.config import Settings
from kvreturn.demo.stack import free_addresses
from kvreturn.envoy import bootstrap, names
from kvreturn.envoy.process import ProcessError, Sink
from kvreturn.settings.envoy import Envoy
from lanes.ground import Ground, ground
from lanes.tools import build

_ROOT = Path(__file__).resolve().parent.parent.parent
PROXY = _ROOT / ".vllm-scripts/vllm-0.32.0/disagg_proxy_multiturn.py"
"""Where scripts/fetch_vllm_scripts.py puts vLLM's proxy."""
VLLM_ROUTER = _ROOT / ".venv-vllm-router"
"""Where `vllm-router` from PyPI is installed."""
FLOOR, PORTABLE, FAST = "envoy", "portable", "fast"


@dataclass
class Candidate:
    """A running way from client to node.

    Attributes:
        name: in JSON.
        label: in tables.
        port: where the client goes.
        pids: everything between client and node, and what it is: `envoy`, `python`, `rust`.
    """

    name: str
    label: str
    port: int
    pids: Mapping[int, str]


@dataclass(frozen=True)
class Skipped:
    """One that cannot run here.

    Attributes:
        name: as for `Candidate`.
        label: as for `Candidate`.
        why: a sentence.
    """

    name: str
    label: str
    why: str


@dataclass
class Field:
    """All that can run here, running.

    Attributes:
        candidates: the plain Envoy first.
        skipped: the others.
        nodes: addresses of P and D.
    """

    candidates: list[Candidate] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    nodes: tuple[str, str] = ("", "")

    @property
    def ours(self) -> list[Candidate]:
        """The lanes."""
        return [c for c in self.candidates if c.name in {PORTABLE, FAST}]


@dataclass(frozen=True)
class Choice:
    """What the user chose.

    Attributes:
        proxy: vLLM's disagg_proxy_multiturn.py.
        proxy_python: an interpreter that has what it needs.
        vllm_router: the program.
        concurrency: Envoy's worker threads.
        only: names to run besides the plain Envoy; empty for all.
    """

    proxy: Path
    proxy_python: str
    vllm_router: Path
    concurrency: int
    only: Sequence[str] = ()

    def wants(self, name: str) -> bool:
        """Whether a candidate is to be run."""
        return not self.only or name in self.only


@contextlib.asynccontextmanager
async def field_of(choice: Choice, sink: Sink, tell: Callable[[str], None]) -> AsyncIterator[Field]:
    """Start everything; at the end nothing is left.

    Args:
        choice: what to start.
        sink: takes all logs.
        tell: takes a line about what is done.

    Raises:
        ProcessError: the nodes, Envoy or our router did not start.
        ToolError: no node can be built.
    """
    found = Field()
    async with ground(choice.concurrency, sink) as on:
        p, d = nodes = found.nodes = _two()
        for address in nodes:
            argv = [str(build("node")), address.rpartition(":")[2]]
            await on.started("node", argv, f"http://{address}/health")
        tell("plain Envoy")
        found.candidates.append(await _floor(on, p, d))
        if choice.wants(PORTABLE):
            tell("portable lane")
            found.candidates.append(await _lane(on, PORTABLE, nodes))
        if choice.wants(FAST):
            if "lane" in Envoy.model_fields:
                tell("fast lane")
                found.candidates.append(await _lane(on, FAST, nodes))
            else:
                found.skipped.append(Skipped(FAST, "kvreturn, fast lane", "this version has no setting envoy.lane"))
        for other in (_proxy, _vllm_router):
            name, label = _OTHERS[other]
            if not choice.wants(name):
                continue
            tell(label)
            try:
                port, pids = await other(on, choice, nodes)
                found.candidates.append(Candidate(name, label, port, pids))
            except _MissingError as e:
                found.skipped.append(Skipped(name, label, str(e)))
            except ProcessError as e:
                found.skipped.append(Skipped(name, label, f"it did not start: {e}"))
        yield found


def _two() -> tuple[str, str]:
    p, d = free_addresses(2)
    return p, d


def router_settings(p: str, d: str, lane: str) -> dict[str, Any]:
    """A router's settings, in the form of its file, on free ports: all defaults, but that one tenant may do it all."""
    listen, calls, admin, *envoy = free_addresses(6)
    ports: dict[str, Any] = dict(zip(("listen", "prefill_listen", "admin"), envoy, strict=True))
    if "lane" in Envoy.model_fields:
        ports["lane"] = lane
    return {
        "listen": listen,
        "calls": calls,
        "admin": admin,
        "secret": "the secret of a benchmark",
        "pools": {"prefill": [p], "decode": [d]},
        "drain_timeout": 1.0,
        "limits": {"live_turns_per_tenant": 10_000},
        "envoy": ports,
    }


async def start_lane(on: Ground, settings: Mapping[str, Any], router: Sequence[str]) -> tuple[int, dict[int, str]]:
    """Start a router and its Envoy.

    Args:
        on: where.
        settings: of the router.
        router: command line of the router, up to its file of settings.

    Returns:
        The port of Envoy, and both processes.

    Raises:
        ProcessError: one of them did not start.
    """
    path = on.folder / f"{settings['listen'].replace(':', '-')}.yaml"
    path.write_text(yaml.safe_dump(dict(settings)))
    child = await on.started("router", [*router, str(path)], f"http://{settings['admin']}/healthz")
    checked = Settings.model_validate(settings)
    envoy = await on.envoy(bootstrap.to_dict(bootstrap.build(checked)))
    await _takes_turns(checked)
    return int(checked.envoy.listen.rpartition(":")[2]), {envoy: "envoy", child.pid: "python"}


async def _lane(on: Ground, lane: str, nodes: tuple[str, str]) -> Candidate:
    router = [sys.executable, "-m", "kvreturn.cli.main", "serve", "--config"]
    port, pids = await start_lane(on, router_settings(*nodes, lane), router)
    return Candidate(lane, f"kvreturn, {lane} lane", port, pids)


async def _takes_turns(settings: Settings) -> None:
    """Wait until Envoy has found the router alive.

    Raises:
        ProcessError: it has not within half a minute.
    """
    line = f"{names.ROUTER_CLUSTER}::{settings.listen}::health_flags::healthy"
    async with aiohttp.ClientSession() as session:
        for _ in range(300):
            async with session.get(f"http://{settings.envoy.admin}/clusters") as response:
                if line in (await response.text()).splitlines():
                    return
            await asyncio.sleep(0.1)
    raise ProcessError("Envoy does not find the router alive")


async def _floor(on: Ground, p: str, d: str) -> Candidate:
    """The very Envoy of our bootstrap, but without what we put into the client's way: one leg, no filter of ours."""
    settings = Settings.model_validate(router_settings(p, d, PORTABLE))
    config = bootstrap.to_dict(bootstrap.build(settings))
    resources = config["static_resources"]
    resources["listeners"] = [listener for listener in resources["listeners"] if listener["name"] == "client"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [f for f in manager["http_filters"] if f["name"] == "envoy.filters.http.router"]
    for host in manager["route_config"]["virtual_hosts"]:
        for route in host["routes"]:
            route.pop("typed_per_filter_config", None)
    resources["clusters"] = [c for c in resources["clusters"] if c["name"] == names.DECODE_CLUSTER]
    port = int(settings.envoy.listen.rpartition(":")[2])
    return Candidate(FLOOR, "plain Envoy", port, {await on.envoy(config): "envoy"})


class _MissingError(Exception):
    """A candidate cannot run here, and why."""


async def _proxy(on: Ground, choice: Choice, nodes: tuple[str, str]) -> tuple[int, dict[int, str]]:
    if not choice.proxy.exists():
        raise _MissingError("not there: run `python scripts/fetch_vllm_scripts.py`, or give --proxy")
    needed = ("fastapi", "uvicorn", "httpx")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if choice.proxy_python == sys.executable and missing:
        raise _MissingError(f"it needs {', '.join(missing)}: pip install {' '.join(missing)}, or give --proxy-python")
    (own,) = free_addresses(1)
    host, port = own.split(":")
    argv = [choice.proxy_python, str(choice.proxy), "--host", host, "--port", port]
    for role, address in zip(("prefiller", "decoder"), nodes, strict=True):
        argv += [f"--{role}-host", address.split(":")[0], f"--{role}-port", address.split(":")[1]]
    child = await on.started("vLLM's proxy", argv, f"http://{own}/health")
    return int(port), {child.pid: "python"}


async def _vllm_router(on: Ground, choice: Choice, nodes: tuple[str, str]) -> tuple[int, dict[int, str]]:
    if not choice.vllm_router.exists():
        raise _MissingError(
            f"not there: python3 -m venv {VLLM_ROUTER.name} && {VLLM_ROUTER.name}/bin/pip install vllm-router"
        )
    own, metrics = free_addresses(2)
    host, port = own.split(":")
    argv = [
        str(choice.vllm_router),
        "--host",
        host,
        "--port",
        port,
        "--vllm-pd-disaggregation",
        "--policy",
        "round_robin",
    ]
    argv += ["--prefill", f"http://{nodes[0]}", "--decode", f"http://{nodes[1]}", "--log-level", "warning"]
    argv += ["--prometheus-port", metrics.split(":")[1], "--max-concurrent-requests", "8192"]
    child = await on.started("vllm-router", argv, f"http://{own}/health")
    return int(port), {child.pid: "rust"}


_OTHERS = {
    _proxy: ("proxy", "disagg_proxy_multiturn.py"),
    _vllm_router: ("vllm-router", "vllm-router"),
}
