"""The lint's rules for the fast lane: its two scripts, and what stands around them."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvreturn.envoy import names
from kvreturn.envoy.reading import Doc, chains, is_type, normalise
from kvreturn.envoy.subject import Subject

_CONFIGS = ("explicit_http_config", "use_downstream_protocol_config", "auto_config")
_PASSES, _HOLDS = "function Answer:pass(", "local function tell("  # what only fast_lane.lua and hand_over.lua have


def fast_lane(s: Subject) -> Iterator[tuple[str, str]]:
    """Both scripts or none, each at its place, with what they need of the filter and of the clusters."""
    passing, holding = (_having(s, words) for words in (_PASSES, _HOLDS))
    if not passing and not holding:
        return
    yield from _places(s, passing, holding)
    yield from _needs(s)
    yield from _trailers(s)


def _places(s: Subject, passing: list[int], holding: list[int]) -> Iterator[tuple[str, str]]:
    if not (passing and holding):
        yield s.chain.where, "one of the fast lane's scripts is missing: turns end unstored; take both, or none"
    if any(i < s.index for i in passing):
        yield s.chain.where, "fast_lane.lua stands before ext_proc, so it sees answers after it; put it behind"
    if any(i > s.index for i in holding):
        what = (
            "hand_over.lua stands behind ext_proc: what it holds is let go, or in disorder, when ext_proc goes on; put "
            "it before ext_proc"
        )
        yield s.chain.where, what


def _needs(s: Subject) -> Iterator[tuple[str, str]]:
    told = s.config.get("metadata_options", {}).get("forwarding_namespaces", {}).get("untyped", [])
    if names.METADATA_NAMESPACE not in told:
        what = (
            f"the fast lane strips, and the router is not told: every turn goes cold; put {names.METADATA_NAMESPACE} "
            "into metadata_options.forwarding_namespaces.untyped"
        )
        yield s.where, what
    if not s.config.get("allow_mode_override"):
        yield s.where, "the fast lane's answers go through the router too; set allow_mode_override"
    alone = names.one_router("")
    if not any(_told_by(log).startswith(alone) for log in s.chain.manager.get("access_log", [])):
        what = (
            f"no gRPC access log goes to a cluster {alone}ADDRESS: nobody tells the router of clients that leave and "
            "nodes that die, and their turns stay open"
        )
        yield s.chain.where, what
    if not any(name.startswith(alone) for name in s.clusters):
        what = f"no cluster {alone}ADDRESS of one router alone: the scripts can tell nobody of a turn"
        yield "static_resources.clusters", what


def _trailers(s: Subject) -> Iterator[tuple[str, str]]:
    for name in sorted(s.guarded & s.clusters.keys()):
        options = s.clusters[name].get("typed_extension_protocol_options", {}).values()
        http1 = [o.get(key, {}).get("http_protocol_options", {}) for o in options for key in _CONFIGS]
        if any(h.get("enable_trailers") for h in http1):
            what = (
                "enable_trailers: behind trailers the fast lane can pass nothing, and a turn's end is lost; remove it"
            )
            yield f"clusters.{name}", what


def has_scripts(bootstrap: Mapping[str, Any]) -> bool:
    """Whether streamed answers can take the fast lane through an Envoy of this bootstrap."""
    return any(_PASSES in _source(f.get("typed_config", {})) for c in chains(normalise(bootstrap)) for f in c.filters)


def _told_by(log: Doc) -> str:
    """The cluster to which a gRPC access log goes; empty if it is none."""
    service = log.get("typed_config", {}).get("common_config", {}).get("grpc_service", {})
    return str(service.get("envoy_grpc", {}).get("cluster_name", ""))


def _having(s: Subject, words: str) -> list[int]:
    """Where in the chain Lua filters are whose script has these words."""
    return [i for i, f in enumerate(s.chain.filters) if words in _source(f.get("typed_config", {}))]


def _source(config: Doc) -> str:
    source = config.get("default_source_code", {}) if is_type(config, "lua.v3.Lua") else {}
    return str(source.get("inline_string", config.get("inline_code", "")))


RULES = {"p-fast-lane": fast_lane}
