"""Looking at running nodes: are they there, what do they serve, what runs on them."""

import asyncio
import email.utils
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvreturn.core import wire
from kvreturn.core.handle import COLD, PARAMS
from kvreturn.core.returning import PATH
from kvreturn.doctor.context import OK, Answer, Context, Node, pools
from kvreturn.doctor.flags import Flags, Side, from_about, number
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn
from kvreturn.envoy.ports import reachable

_SKEW = 2.0  # seconds from which on it is worth a word
_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')


async def look(ctx: Context) -> list[Finding]:
    """Look at all nodes of both pools, and remember in the context what they are."""
    members = await _members(ctx)
    ctx.nodes = [Node(address, side) for side, pool in members.items() for address in pool]
    found = await asyncio.gather(*(_look_at(ctx, node) for node in ctx.nodes))
    findings = [f for each in found for f in each]
    for side, pool in members.items():
        if not pool:
            remedy = "see the check `router.admin`; set `admin`, and run this on the router's machine"
            findings.append(skipped("node", f"who is in pools.{side} is for the router to tell", remedy=remedy))
    return [*findings, *_models(ctx.nodes), *_clocks(ctx.nodes)]


async def _members(ctx: Context) -> dict[Side, list[str]]:
    """The nodes of both pools. What is discovered is what the router has discovered, as far as it tells."""
    found, sources, admin = pools(ctx.settings), ctx.settings.pools.sources, ctx.settings.worker(0).admin
    discovered = [side for side in found if not sources[side].static]
    if discovered and admin:
        told = (await ctx.get(f"http://{reachable(admin)}/kvreturn/pools")).json()
        for side in discovered:
            nodes = told.get(side) if isinstance(told, dict) else None
            if isinstance(nodes, list):
                named = [n["address"] for n in nodes if isinstance(n, dict) and isinstance(n.get("address"), str)]
                found[side] = named or found[side]
    return found


async def _look_at(ctx: Context, node: Node) -> list[Finding]:
    base = f"http://{node.address}"
    paths = ("/health", "/version", "/v1/models", "/metrics")
    health, version, models, metrics = await asyncio.gather(*(ctx.get(base + path) for path in paths))
    name = f"{node.side} {node.address}"
    if health.status != OK:
        remedy = f"start the node, or correct pools.{node.side}; from here it must be reachable as from the router"
        return [fail("node.health", f"/health: {health.what}", remedy, name)]
    findings = [ok("node.health", f"answers in {health.seconds * 1e3:.0f} ms", name)]
    told = version.json()
    if version.status == OK and isinstance(told, dict) and isinstance(told.get("version"), str):
        node.version = told["version"]
    else:
        findings.append(warn("node.version", f"/version: {version.what}", "is this vLLM's OpenAI server?", name))
    served = _served(models)
    if not served:
        remedy = "give --api-key if the node wants one" if models.status in {401, 403} else "is this vLLM's server?"
        findings.append(fail("node.models", f"/v1/models: {models.what}", remedy, name))
        return findings
    node.models = served
    _read_clock(node, health)
    node.flags = _from_metrics(node, metrics)
    findings.append(await _ask_about(ctx, node, name))
    return findings


def _served(answer: Answer) -> tuple[str, ...]:
    listed = answer.json()
    data = listed.get("data") if isinstance(listed, dict) and answer.status == OK else None
    cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
    return tuple(card["id"] for card in cards if isinstance(card.get("id"), str))


def _from_metrics(node: Node, answer: Answer) -> Flags:
    """A node tells its cache's configuration as labels of a metric; whatever connector it runs."""
    match = _INFO.search(answer.body.decode(errors="replace"))
    labels = dict(_LABEL.findall(match[1])) if match else {}
    size, caching = labels.get("block_size", ""), labels.get("enable_prefix_caching")
    return Flags(
        source=node.address,
        side=node.side,
        vllm=node.version,
        block_size=int(size) if size.isdigit() else None,
        prefix_caching={"True": True, "False": False}.get(caching or ""),
        kv_cache_dtype=labels.get("cache_dtype"),
    )


def about_body(model: str) -> bytes:
    """A request that asks what runs on a node, and changes nothing there (docs/handle-format.md)."""
    asks = b'{"v":%d,"free":true,"about":true,"handle":{}}' % wire.VERSION
    params = b'%s,"%s":%s}' % (COLD[:-1], wire.MEMBER.encode(), asks)
    head = json.dumps({"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0})
    return b'%s,"%s":%s}' % (head.encode()[:-1], PARAMS.encode(), params)


async def _ask_about(ctx: Context, node: Node, name: str) -> Finding:
    """Find out which connector it runs. A stock node keeps one block for its lease."""
    check = "node.connector"
    answer = await ctx.post(f"http://{node.address}{PATH}", about_body(node.models[0]))
    body = answer.json()
    if answer.status != OK or not isinstance(body, dict):
        remedy = "give --api-key if the node wants one" if answer.status in {401, 403} else "look into its log"
        return fail(check, f"a request for one token: {answer.what}", remedy, name)
    assert node.flags
    params = body.get(PARAMS)
    if not isinstance(params, dict):
        node.connector = "none"
        node.flags = replace(node.flags, connector="none")
        return ok(check, f"vLLM {node.version}, no KV connector", name)
    try:
        report = wire.load_report(params.get(wire.MEMBER))
    except wire.WireError:
        node.connector = "stock"
        node.flags = replace(node.flags, connector="stock")
        return ok(check, f"vLLM {node.version}, stock NixlConnector", name)
    node.connector = "kvreturn"
    if report.about is None:
        node.flags = replace(node.flags, connector="kvreturn")
        what = "an older kvreturn connector, which does not tell its flags"
        return warn(check, what, "update kvreturn-connector there", name)
    told = from_about(node.address, node.side, report.about)
    vllm, dtype = told.vllm or node.version, told.kv_cache_dtype or node.flags.kv_cache_dtype
    node.flags = replace(
        told,
        vllm=vllm,
        kv_cache_dtype=dtype,
        block_size=told.block_size or node.flags.block_size,
        prefix_caching=node.flags.prefix_caching if told.prefix_caching is None else told.prefix_caching,
    )
    clock = number(report.about.get("time"))
    if clock is not None:
        node.skew, node.skew_error = clock - answer.began - answer.seconds / 2, answer.seconds / 2
    return ok(check, f"vLLM {node.version}, kvreturn connector {told.connector_version}", name)


def _models(nodes: Sequence[Node]) -> Iterator[Finding]:
    served = {node.address: set(node.models) for node in nodes if node.models}
    if len(served) < 2:  # noqa: PLR2004 - nothing to compare
        return
    common = set.intersection(*served.values())
    if not common:
        told = ", ".join(f"{address}: {' '.join(sorted(names))}" for address, names in served.items())
        yield fail("models", f"no model is served by all nodes ({told})", "serve the same --served-model-name on all")
    elif any(names != common for names in served.values()):
        extra = sorted(set.union(*served.values()) - common)
        what = f"{', '.join(extra)}: not on all nodes; turns of it that need the others fail or go cold"
        yield warn("models", what, "serve the same models and adapters on all nodes")
    else:
        yield ok("models", f"{', '.join(sorted(common))} on all nodes")


def _read_clock(node: Node, answer: Answer) -> None:
    """By the Date header, which has whole seconds."""
    date = answer.headers.get("date")
    try:
        told = email.utils.parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        told = None
    if told is not None:
        node.skew, node.skew_error = told + 0.5 - answer.began - answer.seconds / 2, 0.5 + answer.seconds / 2


def _clocks(nodes: Sequence[Node]) -> Iterator[Finding]:
    known = [n for n in nodes if n.skew is not None]
    far = [n for n in known if n.skew is not None and abs(n.skew) - n.skew_error > _SKEW]
    for node in far:
        what = f"{node.skew:+.1f} s against this machine (within {node.skew_error:.1f} s)"
        effect = "reads go by monotonic clocks, but logs, traces and dates in prompts do not"
        yield warn("clock", f"{what}: {effect}", "run NTP on both", node.address)
    if known and not far:
        yield ok("clock", f"{len(known)} nodes agree with this machine within {_SKEW:g} s")
    elif not known and nodes:
        yield skipped("clock", "no node tells the time")
