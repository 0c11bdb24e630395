"""The lint's rules, each a function over one ext_proc filter that calls our service."""

import re
from collections.abc import Callable, Iterator

from kvreturn.envoy import names
from kvreturn.envoy.ports import may_be_several
from kvreturn.envoy.reading import FULL_DUPLEX, Doc, Modes, endpoints, is_type, our_key, override_hosts, seconds
from kvreturn.envoy.scripts import request_seconds, routers
from kvreturn.envoy.subject import Finding, Subject

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_RETRY_HEADERS = {
    "x-envoy-retry-on",
    "x-envoy-max-retries",
    "x-envoy-retry-grpc-on",
    "x-envoy-hedge-on-per-try-timeout",
}
_ENVOY_MESSAGE_TIMEOUT = 0.2
_ENVOY_ROUTE_TIMEOUT = 15.0
_ENVOY_IDLE_TIMEOUT = 300.0
_TIMER_FLOOR = 1.0
# What the router writes or removes, and what it must never be able to.
_ROUTER_HEADERS = ("content-length", "accept-encoding", "x-request-id", "traceparent", "tracestate")
_FOREIGN_HEADERS = ("host", ":authority", ":scheme", ":method", "x-envoy-retry-on")


Rule = Callable[[Subject], Iterator[Finding]]
RULES: dict[str, Rule] = {}


def _rule(name: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return register


@_rule("8-trailer-mode")
def _trailer_mode(s: Subject) -> Iterator[Finding]:
    for where, m in s.modes:
        for side, body, trailer in (
            ("request", m.request_body, m.request_trailer),
            ("response", m.response_body, m.response_trailer),
        ):
            if body == FULL_DUPLEX and trailer != "SEND":
                yield where, f"{side}_body_mode {FULL_DUPLEX} needs {side}_trailer_mode SEND: trailers may end the body"


@_rule("10-two-full-duplex")
def _two_full_duplex(s: Subject) -> Iterator[Finding]:
    others = (f for i, f in enumerate(s.chain.filters) if i != s.index)
    other = any(
        is_type(f.get("typed_config", {}), "ext_proc.v3.ExternalProcessor")
        and Modes.read(f["typed_config"].get("processing_mode", {})).response_body == FULL_DUPLEX
        for f in others
    )
    if other and any(m.response_body == FULL_DUPLEX for _, m in s.modes):
        yield (
            s.where,
            f"another ext_proc filter has response_body_mode {FULL_DUPLEX} too: answers get cut; use STREAMED",
        )


@_rule("13-message-timeout")
def _message_timeout(s: Subject) -> Iterator[Finding]:
    if all(m.request_body == FULL_DUPLEX for _, m in s.modes):
        return  # Envoy runs no timer there
    waits = [(s.where, "message_timeout", seconds(s.config.get("message_timeout"), _ENVOY_MESSAGE_TIMEOUT))]
    if s.called:
        waits = [(s.chain.where, "REQUEST_SECONDS in fast_lane.lua", request_seconds(script)) for script in s.called]
    for where, name, timeout in waits:
        if timeout < s.prefill_timeout + 1:
            what = (
                f"{name} is {timeout:g} s: the client gets 504 while the prefill leg runs; set it to at least "
                f"{s.prefill_timeout + 1:g}s"
            )
            yield where, what
    idle = seconds(s.chain.manager.get("stream_idle_timeout"), _ENVOY_IDLE_TIMEOUT)
    if 0 < idle <= s.prefill_timeout:
        yield s.chain.where, f"stream_idle_timeout {idle:g} s ends the stream while the prefill leg runs; raise it"


@_rule("14-message-timeout-floor")
def _message_timeout_floor(s: Subject) -> Iterator[Finding]:
    timeout = seconds(s.config.get("message_timeout"), _ENVOY_MESSAGE_TIMEOUT)
    timed = any({m.request_body, m.response_body} != {FULL_DUPLEX} for _, m in s.modes)
    if timed and timeout < _TIMER_FLOOR:
        yield s.where, f"message_timeout is {timeout:g} s: short pauses of the router become 504; set at least 1s"


@_rule("18-static-full-duplex")
def _static_full_duplex(s: Subject) -> Iterator[Finding]:
    full_duplex = any(FULL_DUPLEX in {m.request_body, m.response_body} for _, m in s.modes)
    if s.config.get("allow_mode_override") and full_duplex:
        yield s.where, f"allow_mode_override does nothing where a body mode is {FULL_DUPLEX}: remove it"
    allowed = [Modes.read(m) for m in s.config.get("allowed_override_modes", [])]
    if any(FULL_DUPLEX in {m.request_body, m.response_body} for m in allowed):
        what = (
            f"allowed_override_modes has {FULL_DUPLEX}: switched on in mid-stream, the first body chunk passes "
            "unread; configure that mode statically"
        )
        yield s.where, what


@_rule("24-body-limit")
def _body_limit(s: Subject) -> Iterator[Finding]:
    if not s.called and not any(m.request_body == "BUFFERED" for _, m in s.modes):
        return
    for route in s.routes:
        limit = route.body_limit(s.chain.listener)
        if limit <= s.request_bytes:
            what = (
                f"buffers {limit} bytes of a request: a longer one gets 413 from Envoy; set request_body_buffer_limit "
                f"above limits.request_bytes ({s.request_bytes}), with room for the handle"
            )
            yield route.where, what


@_rule("26-response-mode")
def _response_mode(s: Subject) -> Iterator[Finding]:
    for where, m in s.modes:
        if m.response_body not in {"STREAMED", FULL_DUPLEX}:
            what = (
                f"response_body_mode {m.response_body}: streams are held back or the handle is neither captured nor "
                f"stripped; use STREAMED"
            )
            yield where, what


@_rule("27-retries")
def _retries(s: Subject) -> Iterator[Finding]:
    advice = "a retried request can carry its body twice, and sends a handle again that is spent; remove it"
    for route in s.routes:
        for level in (route.action or {}, route.host):
            for key in ("retry_policy", "retry_policy_typed_config", "hedge_policy", "request_mirror_policies"):
                if level.get(key):
                    yield route.where, f"{key}: {advice}"
        added = (h for level in route.levels for h in level.get("request_headers_to_add", []))
        if any(h.get("header", {}).get("key", "").lower() in _RETRY_HEADERS for h in added):
            yield route.where, f"request_headers_to_add turns retries on: {advice}"
    for name in sorted(s.guarded & s.clusters.keys()):
        options = s.clusters[name].get("typed_extension_protocol_options", {}).get(_HTTP_OPTIONS, {})
        for key in ("retry_policy", "request_mirror_policies"):
            if options.get(key):
                yield f"clusters.{name}", f"{key}: {advice}"


@_rule("27-router-retries")
def _router_retries(s: Subject) -> Iterator[Finding]:
    service = s.config.get("grpc_service", {})
    for policy in (service.get("retry_policy"), service.get("envoy_grpc", {}).get("retry_policy")):
        on = [word.strip() for word in (policy or {}).get("retry_on", "").split(",")]
        begun = [word for word in on if word and word not in names.UNTAKEN]
        if begun:
            what = (
                f"grpc_service retries on {', '.join(begun)}: a second router would get a request that the first has "
                f"begun with, and whose handle it may have spent; retry on {', '.join(names.UNTAKEN)} only"
            )
            yield s.where, what


@_rule("129-router-health")
def _router_health(s: Subject) -> Iterator[Finding]:
    name = s.config.get("grpc_service", {}).get("envoy_grpc", {}).get("cluster_name", "")
    cluster = s.clusters.get(name, {})
    if not may_be_several(endpoints(cluster)):
        return
    if not any("grpc_health_check" in check for check in cluster.get("health_checks", [])):
        what = (
            "several routers and no grpc_health_check: a router that drains or has died keeps getting its share of "
            "streams, which fail; add one, and outlier_detection with consecutive_local_origin_failure"
        )
        yield f"clusters.{name}", what
    for calls in (names.requests_of(router) for script in s.called for router in routers(script)):
        if calls in s.clusters and not s.clusters[calls].get("health_checks"):
            what = (
                "several routers and no health check: the scripts keep calling one that drains or has died; add an "
                f"http_health_check for {names.HEALTH_PATH}"
            )
            yield f"clusters.{calls}", what


@_rule("p-readiness")
def _readiness(s: Subject) -> Iterator[Finding]:
    asked = {
        name
        for f in s.chain.filters
        if is_type(f.get("typed_config", {}), "health_check.v3.HealthCheck")
        for name in f["typed_config"].get("cluster_min_healthy_percentages", {})
    }
    for name in sorted(asked & s.clusters.keys()):
        if not s.clusters[name].get("health_checks"):
            yield (
                f"clusters.{name}",
                "no health_checks: who asks Envoy whether it can serve hears that all are up; add one",
            )


@_rule("28-mutation-rules")
def _mutation_rules(s: Subject) -> Iterator[Finding]:
    rules = s.config.get("mutation_rules", {})
    for key, effect in (
        ("allow_all_routing", "the router could change host and method"),
        ("allow_envoy", "the router could set x-envoy-* headers, retries among them"),
        ("disallow_all", "the router's headers are dropped"),
        ("disallow_is_error", "a refused header becomes a 500"),
    ):
        if rules.get(key):
            yield s.where, f"mutation_rules.{key}: {effect}; remove it"
    for key, headers in (("allow_expression", _FOREIGN_HEADERS), ("disallow_expression", _ROUTER_HEADERS)):
        regex = rules.get(key, {}).get("regex")
        hit = [h for h in headers if regex is not None and re.fullmatch(regex, h)]
        if hit:
            yield s.where, f"mutation_rules.{key} matches {', '.join(hit)}: make it narrower"


@_rule("32-filter-order")
def _filter_order(s: Subject) -> Iterator[Finding]:
    for index, http_filter in enumerate(s.chain.filters):
        config = http_filter.get("typed_config", {})
        where = f"{s.chain.where}.http_filters[{index}]"
        decompresses = is_type(config, "decompressor.v3.Decompressor") and not _leaves_responses(config)
        if index > s.index and decompresses:
            what = (
                "a decompressor after the router's filter: compressed answers never end, since the trailers that it "
                "adds get lost; put it before, or set response_direction_config.common_config.enabled to false"
            )
            yield where, what
        if index > s.index and is_type(config, "compressor.v3.Compressor"):
            yield where, "a compressor after the router's filter: it gets compressed responses; put it before"


def _leaves_responses(decompressor: Doc) -> bool:
    common = decompressor.get("response_direction_config", {}).get("common_config", {})
    return common.get("enabled", {}).get("default_value") is False


@_rule("p-metadata")
def _metadata(s: Subject) -> Iterator[Finding]:
    if s.called:
        return  # it is the script that sets metadata
    options = [(s.where, s.config.get("metadata_options", {}))]
    options += [(where, o["metadata_options"]) for where, o in s.overrides if "metadata_options" in o]
    for where, option in options:
        if names.METADATA_NAMESPACE not in option.get("receiving_namespaces", {}).get("untyped", []):
            what = (
                f"metadata_options.receiving_namespaces.untyped lacks `{names.METADATA_NAMESPACE}`: Envoy drops the "
                "router's choice of a node"
            )
            yield where, what


@_rule("p-node-choice")
def _node_choice(s: Subject) -> Iterator[Finding]:
    for name in sorted(s.guarded & s.clusters.keys()):
        cluster = s.clusters[name]
        where = f"clusters.{name}"
        if cluster.get("type") == "ORIGINAL_DST":
            yield where, "ORIGINAL_DST connects to any address that a header names; use STATIC or STRICT_DNS"
        elif len(endpoints(cluster)) != 1:
            read = {
                our_key(source.get("metadata", {}))
                for policy in override_hosts(cluster)
                for source in policy.get("override_host_sources", [])
            }
            for key in sorted({s.node_key(r) for r in s.routes if name in r.clusters} - read):
                what = (
                    f"no override_host policy that reads the metadata {names.METADATA_NAMESPACE}/{key}: "
                    "the router's choice of a node has no effect"
                )
                yield where, what


@_rule("p-timeouts")
def _timeouts(s: Subject) -> Iterator[Finding]:
    for route in s.routes:
        timeout = seconds((route.action or {}).get("timeout"), _ENVOY_ROUTE_TIMEOUT)
        if timeout and s.node_key(route) == names.DECODE_NODE_KEY:  # P's answers are not streamed
            yield route.where, f"timeout {timeout:g} s cuts longer answers; set it to 0s"


@_rule("p-response-headers")
def _response_headers(s: Subject) -> Iterator[Finding]:
    for where, m in s.modes:
        if m.response_header == "SKIP":
            yield where, "response_header_mode SKIP: the router cannot tell which node answered, or how; use SEND"
    if names.UPSTREAM_ADDRESS not in s.config.get("response_attributes", []):
        yield (
            s.where,
            f"response_attributes lacks `{names.UPSTREAM_ADDRESS}`: the router cannot tell which node answered",
        )
