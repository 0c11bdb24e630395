"""Deployments for `kvreturn doctor`: simulated nodes with real Envoy and router or without, and scripted nodes."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from kvreturn.config import Settings
from kvreturn.doctor.model import Diagnosis, Finding
from kvreturn.doctor.run import Plan, diagnose
from kvreturn.server.app import running
from kvreturn.sim import NO_TIMING, NodeConfig, SimNode
from support.envoy import Json, unused_address
from support.gateway import configuration, envoy_before, serving_sims
from support.nodes import Seen

SECRET = "a secret of these tests"
P = NodeConfig(role="prefill", connector="kvreturn", timing=NO_TIMING, secret=SECRET.encode())
D = replace(P, role="decode")


@dataclass
class Deployment:
    """What is looked at.

    Attributes:
        config: path of the settings.
        settings: in it.
        p: the prefill node.
        d: the decode node.
    """

    config: Path
    settings: Settings
    p: SimNode
    d: SimNode

    async def findings(self, **plan: Any) -> list[Finding]:  # noqa: ANN401 - of `Plan`
        return list((await self.diagnose(**plan)).findings)

    async def diagnose(self, **plan: Any) -> Diagnosis:  # noqa: ANN401 - of `Plan`
        return await diagnose(Plan(self.config, **{"seconds": 2.0, **plan}))


def settings_file(folder: Path, p: str, d: str, **changes: Any) -> tuple[Path, Settings]:  # noqa: ANN401 - as YAML has them
    """Settings for two nodes, in a file."""
    plain = configuration("kvreturn", [p], [d], **{"secret": SECRET, "admin": unused_address(), **changes})
    path = folder / "kvreturn.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path, Settings.model_validate(plain)


@contextlib.asynccontextmanager
async def nodes(
    folder: Path,
    p: NodeConfig = P,
    d: NodeConfig = D,
    **changes: Any,  # noqa: ANN401 - settings as YAML has them
) -> AsyncIterator[Deployment]:
    """Two simulated nodes; neither router nor Envoy runs."""
    both = SimNode(p), SimNode(d)
    async with serving_sims(*both) as urls:
        path, settings = settings_file(folder, *(url.removeprefix("http://") for url in urls), **changes)
        yield Deployment(path, settings, *both)


@contextlib.asynccontextmanager
async def deployment(
    folder: Path,
    p: NodeConfig = P,
    d: NodeConfig = D,
    change: Callable[[Json], object] = lambda _: None,
    **changes: Any,  # noqa: ANN401 - settings as YAML has them
) -> AsyncIterator[Deployment]:
    """The same, with router and real Envoy.

    Args:
        folder: for the settings.
        p: the prefill node.
        d: the decode node.
        change: edits Envoy's bootstrap.
        changes: settings.
    """
    async with nodes(folder, p, d, **changes) as there, running(there.settings), envoy_before(there.settings, change):
        yield there


@dataclass
class Scripted:
    """A node that answers as told, by path; what is not in `answers` is 404.

    Attributes:
        answers: status and JSON, or text, by path.
        completion: makes the answer to `/v1/completions` from the request.
        headers: of all answers.
    """

    answers: dict[str, tuple[int, object]] = field(
        default_factory=lambda: {
            "/health": (200, ""),
            "/version": (200, {"version": "0.32.0"}),
            "/v1/models": (200, {"object": "list", "data": [{"id": "sim"}]}),
            "/metrics": (200, 'vllm:cache_config_info{block_size="16",enable_prefix_caching="True"} 1.0\n'),
        }
    )
    completion: Callable[[Json], tuple[int, object]] = lambda _: (200, {"choices": [{"text": ""}]})
    headers: Mapping[str, str] = field(default_factory=dict)

    async def __call__(self, seen: Seen) -> web.StreamResponse:
        """A handler of `FakePrefill`."""
        if seen.path == "/v1/completions":
            status, body = self.completion(json.loads(seen.body))
        else:
            status, body = self.answers.get(seen.path, (404, {"detail": "Not Found"}))
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=self.headers)


def told(findings: list[Finding], check: str) -> list[tuple[str, str]]:
    """Status and finding of one check."""
    return [(f.status.value, f.found) for f in findings if f.check == check]


def worst(findings: list[Finding], check: str) -> Finding:
    """The worst finding of a check."""
    order = ["fail", "warn", "skipped", "ok"]
    return min((f for f in findings if f.check == check), key=lambda f: order.index(f.status.value))
