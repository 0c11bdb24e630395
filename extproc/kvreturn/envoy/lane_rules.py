"""The lint's rules for the fast lane: its two scripts, and what stands around them."""

from collections.abc import Iterator

from kvreturn.envoy import names
from kvreturn.envoy.ports import may_be_several
from kvreturn.envoy.reading import Doc, endpoints, our_key, override_hosts
from kvreturn.envoy.scripts import is_hold, is_pass, routers, source, version
from kvreturn.envoy.subject import Finding, Subject

_CONFIGS = ("explicit_http_config", "use_downstream_protocol_config", "auto_config")
_AGAIN = "make the bootstrap again with `kvreturn envoy-config`"


def fast_lane(s: Subject) -> Iterator[Finding]:
    """Both scripts or none, each at its place, with what they need of the filter and of the clusters."""
    passing, holding = ([i for i, f in enumerate(s.chain.filters) if is_it(f)] for is_it in (is_pass, is_hold))
    if not passing and not holding:
        return
    yield from _places(s, passing, holding)
    told = [source(s.chain.filters[i]) for i in passing]
    if any(version(script) != names.SCRIPTS for script in told):
        yield s.chain.where, f"fast_lane.lua is of another version than this kvreturn: turns get errors; {_AGAIN}"
        return
    yield from _filter(s)
    for router in dict.fromkeys(r for script in told for r in routers(script)):
        yield from _reaches(s, router)
    yield from _several(s)
    yield from _nodes(s)


def _places(s: Subject, passing: list[int], holding: list[int]) -> Iterator[Finding]:
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


def _filter(s: Subject) -> Iterator[Finding]:
    """What the ext_proc filter must be like, and be left out of."""
    if not s.called:
        return
    if not _left_out(s.entry.get("xds_matcher", {})):
        what = (
            "ext_proc gets answers that fast_lane.lua has taken on, or does not get others; wrap it "
            "(ExtensionWithMatcher) so that it is skipped exactly where the response header "
            f"{names.PASSES_HEADER} is 1"
        )
        yield s.where, what
    for where, m in s.modes:
        if (m.request_header, m.request_body) != ("SKIP", "NONE"):
            what = (
                "the router hears of each request twice, and has it prefilled twice; set request_header_mode SKIP and "
                "request_body_mode NONE"
            )
            yield where, what
    options = [(s.where, s.config.get("metadata_options", {}))]
    options += [(where, o["metadata_options"]) for where, o in s.overrides if "metadata_options" in o]
    for where, option in options:
        if names.METADATA_NAMESPACE not in option.get("forwarding_namespaces", {}).get("untyped", []):
            what = (
                "the router cannot tell whose answers come by ext_proc, and lets handles pass; put "
                f"{names.METADATA_NAMESPACE} into metadata_options.forwarding_namespaces.untyped"
            )
            yield where, what
    for route in s.routes:
        if not route.passes(s.entry):
            what = (
                "ext_proc is off here, but fast_lane.lua is not: answers that this does not take on pass with their "
                "handles; switch ext_proc on"
            )
            yield route.where, what


def _left_out(matcher: Doc) -> bool:
    """Whether a filter is skipped where a script says so, and nowhere else."""
    rules = matcher.get("matcher_list", {}).get("matchers", [])
    if len(rules) != 1 or "on_no_match" in matcher:
        return False
    found = rules[0].get("predicate", {}).get("single_predicate", {})
    header = found.get("input", {}).get("typed_config", {}).get("header_name")
    action = rules[0].get("on_match", {}).get("action", {}).get("typed_config", {})
    skips = str(action.get("@type", "")).endswith(".SkipFilter")
    return skips and (header, found.get("value_match", {}).get("exact")) == (names.PASSES_HEADER, "1")


def _reaches(s: Subject, router: str) -> Iterator[Finding]:
    """How the scripts, and Envoy's log, reach one router and no other."""
    asked, calls, alone = names.requests_of(router), names.calls_of(router), names.one_router(router)
    if asked not in s.clusters:
        what = f"no cluster {asked}: the scripts cannot call this router, and its turns get 500; add it, or {_AGAIN}"
        yield "static_resources.clusters", what
    if calls not in s.clusters:
        what = f"no cluster {calls}: turns end unstored, as this router is not told of answers; add it, or {_AGAIN}"
        yield "static_resources.clusters", what
    if alone not in s.clusters:
        what = f"no cluster {alone}: Envoy's log cannot reach this router; add it, or {_AGAIN}"
        yield "static_resources.clusters", what
    if all(_told_by(log) != alone for log in s.chain.manager.get("access_log", [])):
        what = (
            f"no gRPC access log goes to the cluster {alone}: nobody tells that router of clients that leave and nodes "
            f"that die, and their turns stay open; add it, or {_AGAIN}"
        )
        yield s.chain.where, what


def _several(s: Subject) -> Iterator[Finding]:
    """With several routers, an answer must come to the one that has its turn."""
    service = s.config.get("grpc_service", {})
    name = service.get("envoy_grpc", {}).get("cluster_name", "")
    cluster = s.clusters.get(name, {})
    if not s.called or not may_be_several(endpoints(cluster)):
        return
    there = f"%DYNAMIC_METADATA({names.METADATA_NAMESPACE}:{names.CALL_KEY})%"
    said = [*service.get("initial_metadata", []), *service.get("envoy_grpc", {}).get("initial_metadata", [])]
    if {"key": names.TO_HEADER, "value": there} not in said:
        what = (
            "nothing says which router has an answer's turn, and all others refuse it; put "
            f"{names.TO_HEADER}: '{there}' into grpc_service.initial_metadata"
        )
        yield s.where, what
    sources = [source for policy in override_hosts(cluster) for source in policy.get("override_host_sources", [])]
    if all(source.get("header") != names.TO_HEADER for source in sources):
        what = (
            f"no override_host policy that reads the header {names.TO_HEADER}: answers go to routers that do not have "
            "their turns, and are refused; add it"
        )
        yield f"clusters.{name}", what


def _nodes(s: Subject) -> Iterator[Finding]:
    for name in sorted(s.guarded & s.clusters.keys()):
        told = {our_key(policy.get("selected_host_key", {})) for policy in override_hosts(s.clusters[name])}
        if len(endpoints(s.clusters[name])) != 1 and names.UPSTREAM_KEY not in told:
            what = (
                "the scripts cannot tell which node has answered where Envoy chose it, and its handle counts as "
                f"another node's; give the override_host policy the selected_host_key {names.METADATA_NAMESPACE}/"
                f"{names.UPSTREAM_KEY}"
            )
            yield f"clusters.{name}", what
        options = s.clusters[name].get("typed_extension_protocol_options", {}).values()
        http1 = [o.get(key, {}).get("http_protocol_options", {}) for o in options for key in _CONFIGS]
        if any(h.get("enable_trailers") for h in http1):
            what = (
                "enable_trailers: behind trailers the fast lane can pass nothing, and a turn's end is lost; remove it"
            )
            yield f"clusters.{name}", what


def _told_by(log: Doc) -> str:
    """The cluster to which a gRPC access log goes; empty if it is none."""
    service = log.get("typed_config", {}).get("common_config", {}).get("grpc_service", {})
    return str(service.get("envoy_grpc", {}).get("cluster_name", ""))


RULES = {"p-fast-lane": fast_lane}
