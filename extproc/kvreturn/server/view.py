"""What the admin port tells, as JSON: sections by name. No contents, no ids but digests, no secrets."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvreturn import __version__
from kvreturn.config import Settings
from kvreturn.core.fingerprint import keyed_hash
from kvreturn.core.handle import secret_scope
from kvreturn.core.outcome import FRESH, REUSED
from kvreturn.core.ports import Holding
from kvreturn.server.board import STEP, TurnView
from kvreturn.server.world import World
from kvreturn.settings.types import Section
from kvreturn.store.errors import StoreError
from kvreturn.store.url import masked_store_url
from kvreturn.upstream.pool import Pool

JSON = dict[str, Any]
SESSIONS = 500
"""Records that are told of at most."""
QUIET = 30.0
"""Seconds after which a turn in which nothing happens is worth a look."""
_LOOK = 1.0  # seconds that the store may take for it


def reuse(world: World) -> JSON:
    """Whether reuse is on, how often it works, and what becomes of it else."""
    settings, metrics, outcomes = world.settings, world.metrics, Counter[str]()
    for family in metrics.turns.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                outcomes[sample.labels["outcome"]] += int(sample.value)
    reused = sum(outcomes[o] for o in REUSED)
    continuations = outcomes.total() - sum(outcomes[o] for o in FRESH)
    why = Counter((v.outcome.value, v.detail) for _, v in world.board.recent() if v.outcome not in FRESH | REUSED)
    returns = {settings.return_for(model) for model in ("", *settings.models)}
    return {
        "on": any(settings.proof_for(m) != "off" or settings.return_for(m) != "lazy" for m in ("", *settings.models)),
        "proof": settings.proof,
        "return": settings.return_,
        "exceptions": len(settings.models),
        "eager": bool(returns - {"lazy"}),
        "turns": outcomes.total(),
        "continuations": continuations,
        "reused": reused,
        "rate": reused / continuations if continuations else None,
        "outcomes": dict(outcomes.most_common()),
        "why_not_lately": [{"outcome": o, "detail": d, "turns": n} for (o, d), n in why.most_common(10)],
        "tokens": {
            "prompt": int(metrics.value("kvreturn_prompt_tokens_total")),
            "read_back": int(metrics.value("kvreturn_read_back_tokens_total")),
            "returned": int(metrics.value("kvreturn_returned_tokens_total")),
        },
        "saved_seconds": metrics.value("kvreturn_prefill_saved_seconds_total"),
        "step_seconds": STEP,
        "history": [asdict(step) for step in world.board.history()],
    }


def turns(world: World) -> JSON:
    """Turns that run, and the last ones that ended."""
    return {
        "live": [_turn(view) for view in world.board.live()],
        "recent": [{"ago": round(ago, 3), **_turn(view)} for ago, view in world.board.recent()],
    }


def _turn(view: TurnView) -> JSON:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(view).items()}


def pools(world: World) -> JSON:
    """Nodes, and engines whose handles are not used. Of engines, digests: their ids are part of handles."""

    def engine(name: str) -> str:
        return keyed_hash(world.key, name.encode())[:4].hex()  # enough to see that it is another one than before

    def nodes(pool: Pool) -> list[JSON]:
        return [asdict(node) | {"engines": [engine(e) for e in node.engines]} for node in pool.snapshot()]

    return {
        "prefill": nodes(world.prefill),
        "decode": nodes(world.decode),
        "breakers_open": [engine(e) for e in world.judge.open_breakers()],
    }


def returns(world: World) -> JSON:
    """Eager returns, and blocks that D was told to free."""
    metrics = world.metrics
    return {
        "waiting": world.returns.waiting,
        "running": world.returns.running,
        "queue": world.settings.returns.queue,
        "results": _by(metrics.returns.collect(), "result"),
        "frees": _by(metrics.frees.collect(), "result"),
    }


async def store(world: World, most: int = 0) -> JSON:
    """The session store, and some of its records."""
    metrics, settings = world.metrics, world.settings.store
    holding, why_not = await _look(world, most)
    return {
        "kind": "memory" if settings.url is None else "redis",
        "url": masked_store_url(settings.url.get_secret_value()) if settings.url else None,
        "breaker_open": world.guard.is_open,
        "not_told": why_not,
        "records": holding and holding.records,
        "bytes": holding and holding.size,
        "milliseconds": {
            name: round(1e3 * seconds / calls, 3)
            for name in ("take", "put", "replace", "end")
            if (calls := metrics.value("kvreturn_store_duration_seconds_count", operation=name))
            and (seconds := metrics.value("kvreturn_store_duration_seconds_sum", operation=name))
        },
        "errors": _by(metrics.store_errors.collect(), "kind"),
    } | ({"sessions": [asdict(held) for held in holding.some] if holding else []} if most else {})


async def _look(world: World, most: int) -> tuple[Holding | None, str | None]:
    """What the store holds, or in one word why it does not tell: it may be well, and its user lack permissions."""
    if world.guard.is_open:
        return None, "breaker_open"
    try:
        async with asyncio.timeout(_LOOK):
            return await world.store.look(most), None
    except StoreError as e:
        return None, e.kind
    except TimeoutError:
        return None, "timeout"


def _by(families: Any, label: str) -> dict[str, int]:  # noqa: ANN401 - the client library's
    found = Counter[str]()
    for family in families:
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.labels[label]] += int(sample.value)
    return dict(found.most_common())


def trouble(world: World) -> list[str]:
    """What somebody should look at, in words."""
    found = world.freshness.trouble()
    for kind, pool in (("prefill", world.prefill), ("decode", world.decode)):
        nodes = pool.snapshot()
        away = [f"{n.address} ({n.state})" for n in nodes if n.state in {"out", "probing"}]
        if away:
            found.append(f"{len(away)} of {len(nodes)} {kind} nodes are not in use: {', '.join(away[:5])}")
        unseen = [n.address for n in nodes if n.unseen]
        if unseen:
            found.append(f"{kind} nodes of which nothing has been heard yet: {', '.join(unseen[:5])}")
    if world.guard.is_open:
        found.append("the session store is away: turns are cold until it is back")
    breakers = world.judge.open_breakers()
    if breakers:
        found.append(
            f"reads from decode engines keep failing ({len(breakers)}): their handles are not used for a while"
        )
    still = sorted((v for v in world.board.live() if v.quiet > QUIET), key=lambda v: -v.quiet)
    if still:
        longest = still[0]
        text = f"turns in which nothing happens for over {QUIET:.0f} s: {len(still)}"
        found.append(f"{text}; the longest for {longest.quiet:.0f} s, in phase {longest.phase}")
    if 2 * world.returns.waiting > world.settings.returns.queue:
        found.append(f"{world.returns.waiting} eager returns wait: prefill nodes are too busy for them")
    return found + world.warnings


def notes(world: World) -> list[str]:
    """What is as somebody wanted it, and good to know, in words."""
    found = []
    for kind, pool in (("prefill", world.prefill), ("decode", world.decode)):
        draining = [n.address for n in pool.snapshot() if n.state == "draining"]
        if draining:
            found.append(f"{kind} nodes that drain: {', '.join(draining)}")
    return found


async def state(world: World) -> JSON:
    """All that changes."""
    return {
        "version": __version__,
        "worker": world.worker,
        "workers": world.settings.workers,
        "trouble": trouble(world),
        "notes": notes(world),
        "reuse": reuse(world),
        "turns": turns(world),
        "pools": pools(world),
        "store": await store(world),
        "returns": returns(world),
    }


def about(settings: Settings) -> JSON:
    """What runs here. `scope` tells its secret from another one, as nodes tell theirs (docs/handle-format.md)."""
    return {"version": __version__, "scope": secret_scope(settings.secret.get_secret_value().encode())}


def config(settings: Settings) -> list[JSON]:
    """All settings in effect by name, with secrets masked, and whether they differ from the defaults."""
    plain = settings.model_dump(mode="json", by_alias=True)  # pydantic masks secrets itself
    if settings.store.url:
        plain["store"]["url"] = masked_store_url(settings.store.url.get_secret_value())
    told: list[JSON] = []
    _flatten("", settings, plain, told)
    return told


def _flatten(prefix: str, section: Section, plain: Mapping[str, Any], told: list[JSON]) -> None:
    for name, field in type(section).model_fields.items():
        own, value = getattr(section, name), plain[field.alias or name]
        path = f"{prefix}{field.alias or name}"
        if isinstance(own, Section):
            _flatten(f"{path}.", own, value, told)
        else:
            changed = field.is_required() or own != field.get_default(call_default_factory=True)
            told.append({"name": path, "value": value, "changed": changed})
