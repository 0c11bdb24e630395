"""Every rule on a hand-written bootstrap: what breaks it, and what comes near but does not."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvreturn.envoy import lane_rules, unread_rules
from kvreturn.envoy.lint import lint
from kvreturn.envoy.rules import RULES

ROOT = Path(__file__).parents[3]
GOOD = (Path(__file__).parent / "good.yaml").read_text()
SHIPPED = sorted((ROOT / "envoy").glob("*.yaml"))

MODES = "{request_body_mode: BUFFERED, response_body_mode: STREAMED}"
TIMEOUT = "message_timeout: 61s"
ROUTE = "route: {cluster: vllm, timeout: 0s}"
STORED_ROUTE = "route: {timeout: 0s, cluster: vllm}"
PREFILL_ROLE = "initial_metadata: [{key: x-kvreturn-role, value: prefill}]"
ON = "typed_per_filter_config: {kv: {'@type': x/envoy.config.route.v3.FilterConfig, config: {}}}"
FULL_DUPLEX = (
    "{request_body_mode: FULL_DUPLEX_STREAMED, response_body_mode: FULL_DUPLEX_STREAMED, "
    "request_trailer_mode: SEND, response_trailer_mode: SEND}"
)
HTTP = "http_filters:\n"
ROUTER_FILTER = "                  - name: envoy.filters.http.router\n"
CLUSTER = "    - name: vllm\n      type: STATIC\n"
SERVICE = "grpc_service: {envoy_grpc: {cluster_name: kvreturn}}"
ROUTER_ENDPOINT = "              - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9090}}}\n"
OTHER_LISTENER = """\
  listeners:
    - name: other
      address: {socket_address: {address: %s, port_value: 8001}}
      filter_chains:
        - filters:
            - typed_config:
                "@type": type.googleapis.com/any.v3.HttpConnectionManager
                route_config: {virtual_hosts: [{routes: [{match: {prefix: /}, route: {cluster: %s}}]}]}
"""


def http_filter(kind: str, cluster: str = "", more: str = "") -> str:
    """An entry of http_filters."""
    config = f"'@type': type.googleapis.com/envoy.extensions.filters.http.{kind}"
    call = f", grpc_service: {{envoy_grpc: {{cluster_name: {cluster}}}}}" if cluster else ""
    return f"                  - {{name: {kind}, typed_config: {{{config}{call}{more}}}}}\n"


READINESS = http_filter("health_check.v3.HealthCheck", more=", cluster_min_healthy_percentages: {kvreturn: {value: 1}}")
REQUESTS_ONLY = ", response_direction_config: {common_config: {enabled: {default_value: false}}}"
EXT_PROC = "ext_proc.v3.ExternalProcessor"
OTHER_FULL_DUPLEX = http_filter(
    EXT_PROC, "other", ", processing_mode: {response_body_mode: FULL_DUPLEX_STREAMED, response_trailer_mode: SEND}"
)


def mode(name: str, value: str) -> tuple[str, str]:
    """Adds a member to the processing mode."""
    return MODES, MODES.replace("}", f", {name}: {value}}}")


def config(member: str) -> tuple[str, str]:
    """Adds a member to the filter's configuration."""
    return TIMEOUT, f"{TIMEOUT}\n                      {member}"


def on_route(member: str) -> tuple[str, str]:
    """Adds a member to the filtered route."""
    return ROUTE, f"{ROUTE}\n                          {member}"


def override(member: str) -> tuple[str, str]:
    """Has the filtered route override something of the filter."""
    return on_route(f"typed_per_filter_config: {{kv: {{overrides: {{{member}}}}}}}")


def in_action(member: str) -> tuple[str, str]:
    """Adds a member to the filtered route's action."""
    return ROUTE, ROUTE.replace("}", f", {member}}}")


def in_cluster(member: str) -> tuple[str, str]:
    """Adds a member to the decode cluster."""
    return CLUSTER, f"{CLUSTER}      {member}\n"


def upstream_options(member: str) -> tuple[str, str]:
    """Adds a member to the decode cluster's HTTP options."""
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return in_cluster(f"typed_extension_protocol_options: {{{name}: {{{member}}}}}")


BREAKS: list[tuple[str, list[tuple[str, str]]]] = [
    ("8-trailer-mode", [(MODES, FULL_DUPLEX.replace(", response_trailer_mode: SEND", ""))]),
    ("8-trailer-mode", [(MODES, FULL_DUPLEX.replace("request_trailer_mode: SEND", "request_trailer_mode: SKIP"))]),
    ("8-trailer-mode", [override("processing_mode: {request_body_mode: 4, response_body_mode: STREAMED}")]),
    ("10-two-full-duplex", [(MODES, FULL_DUPLEX), (ROUTER_FILTER, OTHER_FULL_DUPLEX + ROUTER_FILTER)]),
    ("13-message-timeout", [(TIMEOUT, "message_timeout: 60s")]),
    ("13-message-timeout", [("stat_prefix: edge", "stream_idle_timeout: 30s")]),
    (
        "14-message-timeout-floor",
        [
            (MODES, FULL_DUPLEX.replace("response_body_mode: FULL_DUPLEX_STREAMED", "response_body_mode: STREAMED")),
            (TIMEOUT, "message_timeout: 0.9s"),
        ],
    ),
    ("18-static-full-duplex", [(MODES, FULL_DUPLEX), config("allow_mode_override: true")]),
    (
        "18-static-full-duplex",
        [config(f"allow_mode_override: true\n                      allowed_override_modes: [{FULL_DUPLEX}]")],
    ),
    ("24-body-limit", [("request_body_buffer_limit: 40000000", "name: no_limit")]),
    ("24-body-limit", [on_route("request_body_buffer_limit: 32768")]),
    ("24-body-limit", [("request_body_buffer_limit: 40000000", "per_request_buffer_limit_bytes: 40000000")]),
    ("26-response-mode", [(MODES, MODES.replace("STREAMED", "BUFFERED"))]),
    ("26-response-mode", [(MODES, "{request_body_mode: BUFFERED}")]),
    ("26-response-mode", [override("processing_mode: {request_body_mode: BUFFERED, response_body_mode: NONE}")]),
    ("27-retries", [in_action("retry_policy: {retry_on: connect-failure}")]),
    ("27-retries", [in_action("hedge_policy: {hedge_on_per_try_timeout: true}")]),
    ("27-retries", [in_action("request_mirror_policies: [{cluster: vllm}]")]),
    ("27-retries", [("name: all\n", "name: all\n                      retry_policy: {retry_on: 5xx}\n")]),
    ("27-retries", [on_route("request_headers_to_add: [{header: {key: X-Envoy-Retry-On, value: 5xx}}]")]),
    ("27-retries", [upstream_options("retry_policy: {retry_on: 5xx}")]),
    ("27-router-retries", [(SERVICE, f"{SERVICE[:-1]}, retry_policy: {{retry_on: 'connect-failure,reset'}}}}")]),
    ("27-router-retries", [(SERVICE, f"{SERVICE[:-2]}, retry_policy: {{retry_on: unavailable}}}}}}")]),
    ("129-router-health", [(ROUTER_ENDPOINT, ROUTER_ENDPOINT + ROUTER_ENDPOINT.replace("9090", "9092"))]),
    ("129-router-health", [(ROUTER_ENDPOINT, ROUTER_ENDPOINT.replace("127.0.0.1", "kvreturn.svc"))]),
    ("p-readiness", [(HTTP, HTTP + READINESS)]),
    ("28-mutation-rules", [config("mutation_rules: {allow_all_routing: true}")]),
    ("28-mutation-rules", [config("mutation_rules: {allow_envoy: true}")]),
    ("28-mutation-rules", [config("mutation_rules: {disallow_all: true}")]),
    ("28-mutation-rules", [config("mutation_rules: {disallow_is_error: true}")]),
    ("28-mutation-rules", [config("mutation_rules: {disallow_expression: {regex: 'content-.*'}}")]),
    ("28-mutation-rules", [config("mutation_rules: {allow_expression: {regex: '.*'}}")]),
    ("31-unread-requests", [config("failure_mode_allow: true")]),
    ("31-unread-requests", [config("observability_mode: true")]),
    ("31-unread-requests", [config("disable_immediate_response: true")]),
    ("31-unread-requests", [override("failure_mode_allow: true")]),
    ("31-unread-requests", [mode("request_header_mode", "SKIP")]),
    ("31-unread-requests", [(MODES, "{response_body_mode: STREAMED}")]),
    ("31-unread-requests", [(MODES, MODES.replace("BUFFERED", "BUFFERED_PARTIAL"))]),
    ("31-other-way-in", [("string_match: {exact: GET}", "string_match: {exact: POST}")]),
    ("31-other-way-in", [("string_match: {exact: GET}", "string_match: {prefix: GE}")]),
    ("31-other-way-in", [("string_match: {exact: GET}", "string_match: {exact: GET}, invert_match: true")]),
    ("31-other-way-in", [("string_match: {exact: GET}", "string_match: {safe_regex: {regex: 'GET|POST'}}")]),
    (
        "31-other-way-in",
        [
            ("route: {cluster: vllm}", "route: {weighted_clusters: {clusters: [{name: vllm}]}}"),
            ("{exact: GET}", "{exact: PUT}"),
        ],
    ),
    (
        "31-other-way-in",
        [("route: {cluster: vllm}", "route: {cluster_header: x-cluster}"), ("{exact: GET}", "{exact: PUT}")],
    ),
    ("31-other-way-in", [("  listeners:\n", OTHER_LISTENER % ("0.0.0.0", "vllm"))]),
    ("32-filter-order", [(ROUTER_FILTER, http_filter("decompressor.v3.Decompressor") + ROUTER_FILTER)]),
    ("32-filter-order", [(ROUTER_FILTER, http_filter("compressor.v3.Compressor") + ROUTER_FILTER)]),
    ("p-metadata", [("untyped: [kvreturn]", "untyped: [envoy.lb]")]),
    ("p-metadata", [override("metadata_options: {receiving_namespaces: {typed: [kvreturn]}}")]),
    ("p-node-choice", [("metadata: {key: kvreturn, path: [{key: decode_node}]}", "header: x-node")]),
    (
        "p-node-choice",
        [
            (
                "type: STATIC\n      load_assignment:\n        cluster_name: vllm",
                "type: ORIGINAL_DST\n      load_assignment:\n        cluster_name: vllm",
            )
        ],
    ),
    (
        "p-node-choice",  # the router names prefill nodes under another key
        [
            (
                "grpc_service: {envoy_grpc: {cluster_name: kvreturn}",
                f"grpc_service: {{{PREFILL_ROLE}, envoy_grpc: {{cluster_name: kvreturn}}",
            )
        ],
    ),
    ("p-timeouts", [(ROUTE, "route: {cluster: vllm}")]),
    ("p-stored-responses", [("match: {prefix: /v1/responses/}", "match: {prefix: /v1/files/}")]),
    (
        "p-stored-responses",
        [("match: {prefix: /v1/responses/}", "match: {prefix: /v1/responses/, headers: [{name: x}]}")],
    ),
    ("p-response-headers", [mode("response_header_mode", "SKIP")]),
    ("p-response-headers", [("[upstream.address]", "[request.path]")]),
]

KEEPS: dict[str, list[tuple[str, str]]] = {
    "as it is": [],
    "full duplex with trailers": [(MODES, FULL_DUPLEX)],
    "full duplex by number": [(MODES, FULL_DUPLEX.replace("FULL_DUPLEX_STREAMED", "4").replace("SEND", "1"))],
    "full duplex needs no timer and no buffer": [
        (MODES, FULL_DUPLEX),
        (TIMEOUT, "name: none"),
        ("request_body_buffer_limit: 40000000", "name: none"),
    ],
    "another ext_proc that is not full duplex": [
        (MODES, FULL_DUPLEX),
        (ROUTER_FILTER, http_filter(EXT_PROC, "other") + ROUTER_FILTER),
    ],
    "another full duplex ext_proc, ours streamed": [(ROUTER_FILTER, OTHER_FULL_DUPLEX + ROUTER_FILTER)],
    "overrides between STREAMED and NONE": [config("allow_mode_override: true")],
    "the listener's limit instead": [
        ("request_body_buffer_limit: 40000000", "name: none"),
        ("- name: edge\n", "- name: edge\n      per_connection_buffer_limit_bytes: 40000000\n"),
    ],
    "no idle timeout": [("stat_prefix: edge", "stream_idle_timeout: 0s")],
    "retries where the filter is not at work": [("route: {cluster: vllm}", "route: {cluster: vllm, retry_policy: {}}")],
    "retries of the router's own leg": [
        ("  listeners:\n", (OTHER_LISTENER % ("127.0.0.1", "vllm")).replace("vllm}", "vllm, retry_policy: {a: b}}"))
    ],
    "another router for what one has not taken": [
        (SERVICE, f"{SERVICE[:-1]}, retry_policy: {{retry_on: 'connect-failure, refused-stream'}}}}")
    ],
    "several routers whose health is checked": [
        (ROUTER_ENDPOINT, ROUTER_ENDPOINT + ROUTER_ENDPOINT.replace("9090", "9092")),
        ("- name: kvreturn\n", "- name: kvreturn\n      health_checks: [{grpc_health_check: {}}]\n"),
    ],
    "readiness by clusters whose health is checked": [
        (HTTP, HTTP + READINESS),
        ("- name: kvreturn\n", "- name: kvreturn\n      health_checks: [{grpc_health_check: {}}]\n"),
    ],
    "mutation rules that concern neither side": [
        config("mutation_rules: {disallow_system: true, disallow_expression: {regex: 'x-secret'}}")
    ],
    "GET by regex": [("{exact: GET}", "{safe_regex: {regex: '^(GET|HEAD)$'}}")],
    "GET the old way": [("string_match: {exact: GET}", "exact_match: GET")],
    "an unread route to another cluster": [("route: {cluster: vllm}", "route: {cluster: web}"), ("GET", "POST")],
    "an unread redirect": [("route: {cluster: vllm}", "redirect: {path_redirect: /}"), ("GET", "POST")],
    "an open listener to another cluster": [("  listeners:\n", OTHER_LISTENER % ("0.0.0.0", "web"))],
    "the router's way to the nodes": [("  listeners:\n", OTHER_LISTENER % ("127.0.0.1", "vllm"))],
    "off in general, on for the route": [
        ("- name: kv\n", "- name: kv\n                    disabled: true\n"),
        on_route(ON),
        (STORED_ROUTE, f"{STORED_ROUTE}\n                          {ON}"),
    ],
    "a compressor and a decompressor before": [
        (HTTP, HTTP + http_filter("compressor.v3.Compressor") + http_filter("decompressor.v3.Decompressor")),
    ],
    "a decompressor of requests behind": [
        (ROUTER_FILTER, http_filter("decompressor.v3.Decompressor", more=REQUESTS_ONLY) + ROUTER_FILTER),
    ],
    "a single node needs no choice": [
        ("metadata: {key: kvreturn, path: [{key: decode_node}]}", "header: x-node"),
        ("              - endpoint: {address: {socket_address: {address: 10.0.0.2, port_value: 8000}}}\n", ""),
    ],
    "members in camel case": [
        ("request_body_mode", "requestBodyMode"),
        ("message_timeout", "messageTimeout"),
        ("receiving_namespaces", "receivingNamespaces"),
        ("request_body_buffer_limit", "requestBodyBufferLimit"),
        ("http_filters", "httpFilters"),
        ("override_host_sources", "overrideHostSources"),
    ],
    "nulls for what is absent": [("stat_prefix: edge", "request_timeout:\n                access_log: null")],
}


def edited(edits: list[tuple[str, str]]) -> dict[str, Any]:
    """GOOD with texts replaced; each must be there."""
    text = GOOD
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    document: dict[str, Any] = yaml.safe_load(text)
    return document


@pytest.mark.parametrize(("rule", "edits"), BREAKS, ids=[f"{r}-{i}" for i, (r, _) in enumerate(BREAKS)])
def test_finds(rule: str, edits: list[tuple[str, str]]) -> None:
    assert {p.rule for p in lint(edited(edits))} == {rule}


@pytest.mark.parametrize("edits", KEEPS.values(), ids=KEEPS)
def test_accepts(edits: list[tuple[str, str]]) -> None:
    assert lint(edited(edits)) == []


def test_every_rule_is_broken_above() -> None:
    assert {rule for rule, _ in BREAKS} == {*RULES, *unread_rules.RULES}


def test_every_rule_is_documented() -> None:
    documented = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "envoy" / "README.md").read_text(), re.MULTILINE)
    assert set(documented) == {*RULES, *unread_rules.RULES, *lane_rules.RULES, "p-no-filter"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_files_break_no_rule(path: Path) -> None:
    assert lint(yaml.safe_load(path.read_text())) == []


def test_a_problem_says_where_it_is() -> None:
    (problem,) = lint(edited([in_action("retry_policy: {retry_on: 5xx}")]))
    where = "listeners[0].filter_chains[0].filters[0].route_config.virtual_hosts[0].routes[2]"
    assert str(problem).startswith(f"27-retries: {where}: retry_policy: ")


def test_the_routers_settings_move_the_limits() -> None:
    assert lint(edited([]), prefill_timeout=60, request_bytes=39_999_999) == []
    assert [p.rule for p in lint(edited([]), prefill_timeout=60.5)] == ["13-message-timeout"]
    assert {p.rule for p in lint(edited([]), request_bytes=40_000_000)} == {"24-body-limit"}


class TestOurFilter:
    renamed = (("cluster_name: kvreturn}", "cluster_name: extproc}"), ("- name: kvreturn\n", "- name: extproc\n"))

    def test_is_known_by_the_address_of_its_cluster(self) -> None:
        document = edited([*self.renamed, (TIMEOUT, "message_timeout: 2s")])
        assert [p.rule for p in lint(document, service="127.0.0.1:9090")] == ["13-message-timeout"]

    @pytest.mark.parametrize(
        ("address", "service"),
        [
            ("{socket_address: {address: '::1', port_value: 9090}}", "[::1]:9090"),
            ("{pipe: {path: /run/router.sock}}", "unix:/run/router.sock"),
        ],
    )
    def test_may_listen_on_ipv6_or_a_unix_socket(self, address: str, service: str) -> None:
        edit = ("{socket_address: {address: 127.0.0.1, port_value: 9090}}", address)
        assert lint(edited([*self.renamed, edit]), service=service) == []

    def test_may_be_called_without_a_cluster(self) -> None:
        direct = ("envoy_grpc: {cluster_name: kvreturn}", "google_grpc: {target_uri: 'dns:///router:9090'}")
        assert lint(edited([direct]), service="router:9090") == []

    def test_is_missed_loudly(self) -> None:
        for service in (None, "127.0.0.1:9091"):
            assert [p.rule for p in lint(edited([*self.renamed]), service=service)] == ["p-no-filter"]
        assert [p.rule for p in lint({})] == ["p-no-filter"]

    def test_of_somebody_else_is_not_checked(self) -> None:
        loose = http_filter(EXT_PROC, "other", ", failure_mode_allow: true")
        assert lint(edited([(ROUTER_FILTER, loose + ROUTER_FILTER)])) == []
