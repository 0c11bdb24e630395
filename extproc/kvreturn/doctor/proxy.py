"""Envoy, as its admin port shows it: version, what its configuration breaks, and whether it knows our nodes."""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvreturn.core.address import is_ip, split_address
from kvreturn.doctor.context import OK, Answer, Context, pools
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn
from kvreturn.envoy import names
from kvreturn.envoy.lint import lint
from kvreturn.envoy.ports import NAMED, as_envoy_knows, reachable
from kvreturn.envoy.reading import endpoints, normalise
from kvreturn.envoy.scripts import has_scripts

_TRIED = (1, 40)
_BOOTSTRAP = "envoy.admin.v3.BootstrapConfigDump"
_VERSION = re.compile(r"/(\d+)\.(\d+)\.")
_SICK = {"failed_active_health_check", "failed_outlier_check", "pending_active_hc", "excluded_via_immediate_hc_fail"}


async def check_envoy(ctx: Context) -> list[Finding]:
    """Ask Envoy's admin port."""
    address = reachable(ctx.settings.envoy.admin)
    base = f"http://{address}"
    paths = ("/server_info", "/config_dump", "/clusters?format=json")
    info, dump, clusters = await asyncio.gather(*(ctx.get(base + path) for path in paths))
    told = info.json()
    if info.status != OK or not isinstance(told, dict):
        remedy = "start Envoy (`kvreturn up`), or set envoy.admin to its admin port as it is reached from here"
        if info.status or "admin" in ctx.settings.envoy.model_fields_set:
            return [fail("envoy", f"admin port {address}: {info.what}", remedy)]
        why = f"admin port {address} (the default): {info.what}. Envoy is elsewhere or does not run, see `gateway`"
        remedy = "forward the port (`kubectl port-forward deploy/kvreturn-envoy 9901`), or run this in Envoy's network "
        remedy += "(`docker run --network container:NAME`)"
        return [skipped("envoy", why, remedy=remedy)]
    return [*_server(told), *_lint(ctx, dump), *_nodes(ctx, clusters)]


def _server(info: Mapping[str, Any]) -> Iterator[Finding]:
    state, version = info.get("state"), str(info.get("version", ""))
    if state == "LIVE":
        yield ok("envoy", "is live")
    else:
        yield warn("envoy", f"is {str(state).lower()}", "wait until it is live, or look into its log")
    match = _VERSION.search(version)
    if match and (int(match[1]), int(match[2])) >= _TRIED:
        yield ok("envoy.version", version.split("/")[1])
    else:
        wanted = ".".join(map(str, _TRIED))
        yield warn("envoy.version", version or "not told", f"run Envoy {wanted}, which kvreturn is tried with")


def _lint(ctx: Context, dump: Answer) -> Iterator[Finding]:
    check, settings, bootstrap = "envoy.lint", ctx.settings, _bootstrap(dump)
    if bootstrap is None:
        yield skipped(check, f"/config_dump: {dump.error or f'HTTP {dump.status} without a bootstrap'}")
        return
    try:
        problems = lint(
            bootstrap,
            service=settings.listen,
            prefill_timeout=settings.prefill.timeout,
            request_bytes=settings.limits.request_bytes,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        yield skipped(check, f"the bootstrap has a shape that our rules do not read ({type(e).__name__}: {e})")
        return
    for problem in problems:
        what = f"{problem.rule}: {problem.where}: {problem.what}"
        yield fail(check, what, f"see rule {problem.rule} in envoy/README.md, or use `kvreturn envoy-config`")
    if not problems:
        yield ok(check, "breaks none of our rules")
    yield _lane(ctx, bootstrap)
    yield from _calls(ctx, bootstrap)


def _lane(ctx: Context, bootstrap: Mapping[str, Any]) -> Finding:
    """Whether Envoy and the router mean the same lane (docs/lanes.md); if not, answers take the portable one."""
    check, lane, scripts = "envoy.lane", ctx.settings.envoy.lane, has_scripts(bootstrap)
    if lane == "fast" and not ctx.settings.fast_lane:
        what, _, remedy = NAMED.partition(". ")
        return warn(check, what, remedy)
    if scripts == (lane == "fast"):
        return ok(check, lane)
    what = (
        "envoy.lane is `fast`, but Envoy has no scripts for it: requests and answers"
        if lane == "fast"
        else "Envoy has the scripts of the fast lane, but envoy.lane is `portable`: streamed answers"
    )
    remedy = "make Envoy's bootstrap and start the router from the same settings (`kvreturn envoy-config`)"
    return warn(check, f"{what} pass through ext_proc", remedy)


def _calls(ctx: Context, bootstrap: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether Envoy's scripts call the routers where these listen for that, by these settings."""
    resources = normalise(bootstrap).get("static_resources", {})
    clusters = {cluster.get("name"): cluster for cluster in resources.get("clusters", [])}
    for listen in ctx.settings.routers():
        cluster = clusters.get(names.requests_of(as_envoy_knows(listen)))
        ours = reachable(ctx.settings.calls_of(listen))
        called = endpoints(cluster) if cluster else [ours]
        if called != [ours]:
            what = f"Envoy's scripts call {', '.join(called)}, where the router's `calls` is {ours} by these settings"
            remedy = "make Envoy's bootstrap and start all routers from settings with the same `calls`"
            yield fail("envoy.lane", what, remedy, listen)


def _bootstrap(dump: Answer) -> Mapping[str, Any] | None:
    told = dump.json()
    configs = told.get("configs") if isinstance(told, dict) else None
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict) and str(config.get("@type", "")).endswith(_BOOTSTRAP):
            bootstrap = config.get("bootstrap")
            return bootstrap if isinstance(bootstrap, dict) else None
    return None


def _nodes(ctx: Context, answer: Answer) -> Iterator[Finding]:
    check, told = "envoy.nodes", answer.json()
    statuses = told.get("cluster_statuses") if isinstance(told, dict) else None
    if not isinstance(statuses, list):
        yield skipped(check, f"/clusters: {answer.what[:100]}")
        return
    hosts = {s.get("name"): s.get("host_statuses", []) for s in statuses if isinstance(s, dict)}
    clusters = {"prefill": names.PREFILL_CLUSTER, "decode": names.DECODE_CLUSTER}
    for side, pool in pools(ctx.settings).items():
        name = clusters[side]
        if name not in hosts:
            yield skipped(check, f"Envoy has no cluster `{name}`: it is not of our bootstrap", name)
        else:
            yield from _pool(name, pool, hosts[name])


def _pool(name: str, pool: Sequence[str], statuses: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    check = "envoy.nodes"
    known = {address: status.get("health_status", {}) for status in statuses if (address := _address(status))}
    ours = {address for address in pool if is_ip(split_address(address)[0])}
    if len(ours) < len(pool) or not pool:
        yield skipped(check, "host names or discovery in the pool: Envoy shows what they lead to", name)
    else:
        missing, strange = sorted(ours - known.keys()), sorted(known.keys() - ours)
        for what in [f"Envoy does not know {', '.join(missing)}"] * bool(missing) + [
            f"Envoy also knows {', '.join(strange)}"
        ] * bool(strange):
            remedy = "make Envoy's bootstrap from the settings of the router again (`kvreturn envoy-config`)"
            yield fail(check, f"{what}: router and Envoy mean different pools", remedy, name)
        if not missing and not strange:
            yield ok(check, f"the same {len(ours)} as in the settings", name)
    for address, health in sorted(known.items()):
        sick = sorted(flag for flag in _SICK if health.get(flag))
        if sick:
            what = f"Envoy sends nothing to {address}: {', '.join(sick)}"
            yield warn(check, what, "see the check `node.health`; can Envoy's machine reach the node?", name)


def _address(status: Mapping[str, Any]) -> str | None:
    socket = status.get("address", {}).get("socket_address", {})
    host, port = socket.get("address"), socket.get("port_value")
    if not host or not port:
        return None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
