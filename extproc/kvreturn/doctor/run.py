"""All checks, in an order in which later ones know what earlier ones have found."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

import kvreturn
from kvreturn.config import ConfigError, Settings
from kvreturn.config_file import load_settings
from kvreturn.doctor.agree import agree
from kvreturn.doctor.alive import check_router
from kvreturn.doctor.context import Context
from kvreturn.doctor.flags import Flags
from kvreturn.doctor.gateway import probe_gateway
from kvreturn.doctor.model import Diagnosis, Finding, fail, ok, skipped
from kvreturn.doctor.nodefiles import read_files
from kvreturn.doctor.nodes import look
from kvreturn.doctor.pair import probe_pairs, probe_stock
from kvreturn.doctor.proxy import check_envoy
from kvreturn.doctor.secret import shell
from kvreturn.doctor.sessions import check_store
from kvreturn.doctor.surroundings import check_fabric, check_otlp, check_settings
from kvreturn.envoy.ports import reachable

_LONGER = 10  # times a request's time: a probe of two turns is at most so many requests, one after the other
Check = Callable[[Context], Awaitable[Sequence[Finding]]]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to look at.

    Attributes:
        config: the router's settings.
        node_files: `--node-config`.
        environ: where secrets and OTEL_* variables are.
        offline: look at files only.
        seconds: for each check; a probe of several requests has so much for each of them.
        headers: for gateway and nodes.
        gateway: its base URL; Envoy's listener of the settings if left out.
        workers: of the router, if it was started with another number than the settings have.
    """

    config: Path
    node_files: Sequence[Path] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    offline: bool = False
    seconds: float = 5.0
    headers: Mapping[str, str] = field(default_factory=dict)
    gateway: str | None = None
    workers: int | None = None


async def diagnose(plan: Plan, progress: Progress = lambda _: None) -> Diagnosis:
    """Run all checks. Raises nothing.

    Args:
        plan: what to look at.
        progress: told what is being done.
    """
    begun = time.monotonic()
    settings, findings = _config(plan)
    flags, found = read_files(plan.node_files)
    findings += found
    if settings is None or plan.offline:
        findings += shell(settings, None) if settings else []
        findings += agree(flags, settings, kvreturn.__version__)
        findings += await check_fabric(flags, plan.seconds, plan.environ)
        why = "--offline" if plan.offline else "the settings cannot be read"
        findings.append(skipped("live", f"{why}: nothing that runs was looked at"))
    else:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            url = (plan.gateway or f"http://{reachable(settings.envoy.listen)}").rstrip("/")
            findings += await _live(
                Context(settings, session, plan.environ, plan.seconds, plan.headers, url), flags, progress
            )
    return Diagnosis(findings, str(plan.config), plan.offline, time.monotonic() - begun)


def _config(plan: Plan) -> tuple[Settings | None, list[Finding]]:
    path = str(plan.config)
    try:
        settings = load_settings(plan.config, plan.environ, {"workers": plan.workers} if plan.workers else {})
    except ConfigError as e:
        remedy = "correct it; README.md lists all settings"
        return None, [fail("config", _without(path, line), remedy, path) for line in str(e).splitlines()]
    return settings, [ok("config", "loads", path), *check_settings(settings, plan.environ)]


def _without(path: str, line: str) -> str:
    """What is wrong with a file, without its name, which is shown before it anyway."""
    return re.sub(r"^(\d+): ", r"line \1: ", line.removeprefix(f"{path}:").lstrip())


async def _live(ctx: Context, from_files: Sequence[Flags], progress: Progress) -> list[Finding]:
    findings = list[Finding]()
    first: dict[str, Check] = {
        "node": look,
        "router": check_router,
        "envoy": check_envoy,
        "store": check_store,
        "otlp": check_otlp,
    }
    progress("nodes, router, Envoy, store, telemetry")
    for some in await asyncio.gather(*(_bounded(ctx, name, check, 3) for name, check in first.items())):
        findings += some
    progress("flags")
    findings += await _bounded(ctx, "flags", _stock, _LONGER)
    known = [node.flags for node in ctx.nodes if node.flags]
    findings += agree([*known, *from_files], ctx.settings, kvreturn.__version__, ctx.router_scope)
    findings += await check_fabric([*known, *from_files], ctx.seconds, ctx.environ)
    progress("a conversation with the nodes themselves")
    findings += await _bounded(ctx, "pair", probe_pairs, _LONGER)
    progress("a conversation through the gateway")
    findings += await _bounded(ctx, "gateway", probe_gateway, _LONGER)
    return findings


async def _stock(ctx: Context) -> Sequence[Finding]:
    await probe_stock(ctx)
    return ()


async def _bounded(ctx: Context, name: str, check: Check, times: int) -> Sequence[Finding]:
    """A check, in bounded time; a mistake of ours in it is a finding too, and stops no other check."""
    try:
        async with asyncio.timeout(ctx.seconds * times):
            return await check(ctx)
    except TimeoutError:
        return [fail(name, f"took longer than {ctx.seconds * times:g} s", "run it again with a larger --timeout")]
    except Exception as e:  # noqa: BLE001 - whatever peers answer, the others are still checked
        return [fail(name, f"the check itself failed ({type(e).__name__}: {e})", "please report this")]
