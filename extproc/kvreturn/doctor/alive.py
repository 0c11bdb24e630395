"""The routers: do they take streams, and does what runs go by the settings that we look at?"""

import asyncio
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import aiohttp

from kvreturn.config import Settings
from kvreturn.core.address import is_ip, split_address
from kvreturn.doctor.context import OK, SILENCE, Answer, Context
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn
from kvreturn.doctor.secret import shell
from kvreturn.envoy import names
from kvreturn.envoy.health import not_serving
from kvreturn.envoy.ports import reachable
from kvreturn.server.view import config

CHECK = "router"
_DRAINS = 503
_SHOWN, _LONG = 8, 60  # settings, characters of a value


async def check_router(ctx: Context) -> list[Finding]:
    """Whether each router takes streams: the workers here, and all of `envoy.routers`; and the admin ports here."""
    workers = [ctx.settings.worker(i) for i in range(ctx.settings.workers)]
    here = {reachable(w.listen) for w in workers}
    others = [r for r in ctx.settings.envoy.routers if reachable(r) not in here]
    found = await asyncio.gather(*(_worker(ctx, w) for w in workers), *(_other(ctx, r) for r in others))
    return [*(f for each in found for f in each), *shell(ctx.settings, ctx.router_scope)]


async def _other(ctx: Context, listen: str) -> list[Finding]:
    """Routers that Envoy finds at an address. A name may be of several (a headless Service)."""
    remedy = "start the router there, or take it out of envoy.routers and make Envoy's bootstrap again"
    target, addresses = reachable(listen), [reachable(listen)]
    if not target.startswith("unix:"):
        host, port = split_address(target)
        if not is_ip(host):
            try:
                async with asyncio.timeout(ctx.seconds):
                    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, TimeoutError):
                return [fail(CHECK, "the name cannot be resolved from here", remedy, listen)]
            hosts = dict.fromkeys(str(info[4][0]) for info in infos)
            addresses = [f"[{h}]:{port}" if ":" in h else f"{h}:{port}" for h in hosts]
    errors = await asyncio.gather(*(_error(ctx, address) for address in addresses))
    subjects = [listen if address == target else f"{listen} ({address})" for address in addresses]
    found = [_listens(*each, remedy, named=addresses != [target]) for each in zip(subjects, errors, strict=True)]
    return [*found, *([] if any(errors) else await _calls(ctx, ctx.settings.calls_of(listen)))]


def _listens(subject: str, error: str, remedy: str, *, named: bool = False) -> Finding:
    """What was found at an address; if it is `named`, one of those that a name stands for."""
    if not error:
        return ok(CHECK, "takes streams", subject)
    if named and error.startswith(SILENCE):
        # A headless Service names ready pods only, and a network policy may let only Envoy reach them.
        return warn(CHECK, f"{error}: it is down, or may not be reached from here", remedy, subject)
    return fail(CHECK, error, remedy, subject)


async def _calls(ctx: Context, address: str) -> list[Finding]:
    """Whether a router that takes streams takes the calls of Envoy's scripts too; nothing where there are none."""
    if not ctx.settings.fast_lane:
        return []
    target, path = reachable(address), names.HEALTH_PATH
    if target.startswith("unix:"):
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(target.removeprefix("unix:"))) as session:
            answer = await replace(ctx, session=session).get(f"http://router{path}")
    else:
        answer = await ctx.get(f"http://{target}{path}")
    subject = f"{address} (calls)"
    if answer.status == OK:
        return [ok(CHECK, "takes the calls of Envoy's scripts", subject)]
    remedy = (
        "all turns of the fast lane go there: start the router with these settings and this version of kvreturn, or "
        "set `calls` as it has it; where that port is closed on the way, open it as the one of `listen`"
    )
    drains = "starts, or drains: takes no calls of Envoy's scripts"
    return [fail(CHECK, drains if answer.status == _DRAINS else answer.what, remedy, subject)]


async def _error(ctx: Context, target: str) -> str:
    if target.startswith("unix:"):
        try:
            async with asyncio.timeout(ctx.seconds):
                _, writer = await asyncio.open_unix_connection(target.removeprefix("unix:"))
        except (OSError, TimeoutError) as e:
            return str(getattr(e, "strerror", "") or "no answer").lower()
        writer.close()
    elif error := await ctx.connects(*split_address(target)):
        return error
    return await not_serving(target, ctx.seconds)


async def _worker(ctx: Context, settings: Settings) -> list[Finding]:
    remedy = "start it (`kvreturn up`, `kvreturn serve`), or run this on its machine; give --workers as it has it"
    error = await _error(ctx, reachable(settings.listen))
    findings = [_listens(settings.listen, error, remedy)]
    if not error:
        findings += await _calls(ctx, settings.calls_listen)
    admin = settings.admin
    if admin is None:
        return [*findings, skipped("router.admin", "`admin` is null: no metrics, no health", settings.listen)]
    base = f"http://{reachable(admin)}"
    paths = ("/healthz", "/kvreturn/about", "/kvreturn/config")
    health, about, running = await asyncio.gather(*(ctx.get(base + path) for path in paths))
    if health.status != OK:
        return [*findings, warn("router.admin", health.what, remedy, admin)]
    told = _json(about)
    if isinstance(told, Mapping) and isinstance(told.get("scope"), str):
        ctx.router_scope = told["scope"]
    return [*findings, ok("router.admin", "answers", admin), *_differences(settings, _json(running), admin)]


def _json(answer: Answer) -> Any:  # noqa: ANN401 - JSON
    return answer.json() if answer.status == OK else None


def _differences(settings: Settings, told: Any, admin: str) -> Iterator[Finding]:  # noqa: ANN401 - JSON
    """Settings of the file, with this shell's environment, against those that the router goes by."""
    if not isinstance(told, list):
        return
    running = {s["name"]: s.get("value") for s in told if isinstance(s, Mapping) and isinstance(s.get("name"), str)}
    ours = {s["name"]: s["value"] for s in json.loads(json.dumps(config(settings)))}
    ours.pop("secret")  # masked; `config.secret` looks at it
    other = [name for name, value in ours.items() if name in running and running[name] != value]
    if not other:
        yield ok("config.running", "the router runs with these settings", admin)
        return
    shown = ", ".join(f"{n} (here {_short(ours[n])}, there {_short(running[n])})" for n in other[:_SHOWN])
    more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
    remedy = "reload the router (SIGHUP), or restart it where its log asks for that; or run this as it was started: "
    remedy += "the same file, variables and --workers"
    yield warn("config.running", f"the router runs with other settings: {shown}{more}", remedy, admin)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
