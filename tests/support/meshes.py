"""What Envoy Gateway and Istio make of our policies, as far as our rules look: one static bootstrap of each.

Written from what their documentation and their generated configuration show; nothing of theirs runs here.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import yaml

from support.deployed import Json
from support.kubernetes import FOLDER

_HCM = "envoy.filters.network.http_connection_manager"
_TYPE = "type.googleapis.com/envoy.extensions.filters"
_ROUTER: Json = {
    "name": "envoy.filters.http.router",
    "typed_config": {"@type": f"{_TYPE}.http.router.v3.Router"},
}
_MODES = {"Buffered": "BUFFERED", "Streamed": "STREAMED"}
_HTTP2: Json = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def _of(objects: list[Json], kind: str) -> Json:
    (found,) = [o["spec"] for o in objects if o["kind"] == kind]
    spec: Json = found
    return spec


def _cluster(name: str, port: int, **more: Any) -> Json:  # noqa: ANN401 - JSON
    """An EDS cluster of two pods, with them in it."""
    hosts = [
        {"endpoint": {"address": {"socket_address": {"address": f"10.0.0.{i}", "port_value": port}}}} for i in (1, 2)
    ]
    endpoints = {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "10s", "load_assignment": endpoints, **more}


def _bootstrap(listener: Json, manager: Json, clusters: list[Json]) -> Json:
    manager = {"@type": f"{_TYPE}.network.http_connection_manager.v3.HttpConnectionManager", **manager}
    chain = {"filters": [{"name": _HCM, "typed_config": manager}]}
    address = {"socket_address": {"address": "0.0.0.0", "port_value": 10080}}
    listeners = [{"name": "http", "address": address, "filter_chains": [chain], **listener}]
    return {"static_resources": {"listeners": listeners, "clusters": clusters}}


def envoy_gateway(objects: list[Json]) -> Json:
    """The bootstrap that the Gateway, its route and its policies come to."""
    route, policy = _of(objects, "HTTPRoute"), _of(objects, "EnvoyExtensionPolicy")
    traffic, backend = _of(objects, "ClientTrafficPolicy"), _of(objects, "BackendTrafficPolicy")
    ((rule,), (processor,), (script,)) = route["rules"], policy["extProc"], policy["lua"]
    routers, decode = "envoyextensionpolicy/kvreturn/kvreturn/extproc/0", "httproute/kvreturn/kvreturn/rule/0"
    mode = processor["processingMode"]
    call = {
        "@type": f"{_TYPE}.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {
            "envoy_grpc": {"cluster_name": routers},
            "timeout": "10s",
            "retry_policy": {
                "num_retries": processor["backendSettings"]["retry"]["numRetries"],
                "retry_on": ",".join(processor["backendSettings"]["retry"]["retryOn"]["triggers"]),
            },
        },
        "failure_mode_allow": processor["failOpen"],
        "message_timeout": processor["messageTimeout"],
        "processing_mode": {
            "request_header_mode": "SEND" if "request" in mode else "SKIP",
            "response_header_mode": "SEND" if "response" in mode else "SKIP",
            "request_body_mode": _MODES[mode["request"]["body"]],
            "response_body_mode": _MODES[mode["response"]["body"]],
            "request_trailer_mode": "SKIP",
            "response_trailer_mode": "SKIP",
        },
        "response_attributes": mode["response"]["attributes"],
        "metadata_options": {"receiving_namespaces": {"untyped": processor["metadata"]["writableNamespaces"]}},
        "allow_mode_override": mode.get("allowModeOverride", False),
    }
    lua = {"@type": f"{_TYPE}.http.lua.v3.Lua", "default_source_code": {"inline_string": script["inline"]}}
    filters = [
        {"name": f"envoy.filters.http.lua/{policy_name}/lua/0", "disabled": True, "typed_config": lua}
        if kind == "lua"
        else {"name": f"envoy.filters.http.ext_proc/{policy_name}/extproc/0", "disabled": True, "typed_config": call}
        for kind in _order(_of(objects, "EnvoyProxy"))
        for policy_name in ("envoyextensionpolicy/kvreturn/kvreturn",)
    ]
    on = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}
    assert rule["timeouts"]["request"] == backend["timeout"]["http"]["requestTimeout"]
    action = {
        "cluster": decode,
        "timeout": rule["timeouts"]["request"],
        "upgrade_configs": [{"upgrade_type": "websocket"}],
    }
    if "retry" in backend:
        action["retry_policy"] = {}
    routes = [{"match": {"prefix": "/"}, "route": action, "typed_per_filter_config": {f["name"]: on for f in filters}}]
    manager = {
        "stat_prefix": "http-10080",
        "http_filters": [*filters, _ROUTER],
        "route_config": {"name": "kvreturn", "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "stream_idle_timeout": traffic["timeout"]["http"]["streamIdleTimeout"],
        "normalize_path": True,
        "merge_slashes": not traffic["path"]["disableMergeSlashes"],
        "path_with_escaped_slashes_action": _screaming(traffic["path"]["escapedSlashesAction"]),
    }
    buffer, unit = re.fullmatch(r"(\d+)(Mi)", traffic["connection"]["bufferLimit"]).groups()  # type: ignore[union-attr]
    assert unit == "Mi"
    nodes = _cluster(decode, 8000, health_checks=[_active(backend["healthCheck"]["active"])])
    ready = {
        "@type": f"{_TYPE}.http.health_check.v3.HealthCheck",
        "pass_through_mode": False,
        "headers": [{"name": ":path", "string_match": {"exact": traffic["healthCheck"]["path"]}}],
    }
    manager["http_filters"].insert(0, {"name": "envoy.filters.http.health_check", "typed_config": ready})
    targets = {
        ("Cluster", decode, None): nodes,
        (
            "Listener",
            "kvreturn/kvreturn/http",
            "..http_filters[?(@.name=='envoy.filters.http.health_check')].typed_config",
        ): ready,
    }
    for patch in _of(objects, "EnvoyPatchPolicy")["jsonPatches"]:
        operation = patch["operation"]
        assert operation["op"] == "add"
        target = targets[patch["type"].rpartition(".")[2], patch["name"], operation.get("jsonPath")]
        target[operation["path"].removeprefix("/")] = operation["value"]
    health = processor["backendSettings"]["healthCheck"]
    processors = _cluster(
        routers,
        9090,
        typed_extension_protocol_options=_HTTP2,
        health_checks=[_active(health["active"])],
        outlier_detection={
            "split_external_local_origin_errors": health["passive"]["splitExternalLocalOriginErrors"],
            "consecutive_local_origin_failure": health["passive"]["consecutiveLocalOriginFailures"],
            "interval": health["passive"]["interval"],
            "base_ejection_time": health["passive"]["baseEjectionTime"],
            "max_ejection_percent": health["passive"]["maxEjectionPercent"],
        },
    )
    listener = {"per_connection_buffer_limit_bytes": int(buffer) << 20}
    return _bootstrap(listener, manager, [nodes, processors])


def _active(check: Json) -> Json:
    asks = {"HTTP": "http_health_check", "GRPC": "grpc_health_check"}[check["type"]]
    return {
        "timeout": check["timeout"],
        "interval": check["interval"],
        "unhealthy_threshold": check["unhealthyThreshold"],
        "healthy_threshold": check["healthyThreshold"],
        asks: check[check["type"].lower()],
    }


def _order(proxy: Json) -> list[str]:
    """Of the two kinds of filters; Lua comes first unless told otherwise."""
    (told,) = proxy["filterOrder"]
    assert told == {"name": "envoy.filters.http.lua", "after": "envoy.filters.http.ext_proc"}
    return ["ext_proc", "lua"]


def _screaming(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


def istio(objects: list[Json], envoy_filter: Json) -> Json:
    """The bootstrap of the gateway, with the patches of the EnvoyFilter in it."""
    service = _of(objects, "VirtualService")
    (rule,) = service["http"]
    decode = "outbound|8000||vllm-decode.kvreturn.svc.cluster.local"
    action: Json = {"cluster": decode, "timeout": rule["timeout"]}
    if rule["retries"]["attempts"]:
        action["retry_policy"] = {"num_retries": rule["retries"]["attempts"]}
    host = {"name": "*:80", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": action}]}
    manager = {
        "stat_prefix": "outbound_0.0.0.0_8080",
        "http_filters": [_ROUTER],
        "route_config": {"name": "http.8080", "virtual_hosts": [host]},
    }
    routers = "outbound|9090||kvreturn-router.kvreturn.svc.cluster.local"
    clusters = [_cluster(decode, 8000), _cluster(routers, 9090, typed_extension_protocol_options=_HTTP2)]
    bootstrap = _bootstrap({}, manager, clusters)
    (listener,) = bootstrap["static_resources"]["listeners"]
    network = listener["filter_chains"][0]["filters"][0]
    known = network["typed_config"]
    for patch in envoy_filter["spec"]["configPatches"]:
        match, change = patch["match"], copy.deepcopy(patch["patch"])
        assert match["context"] == "GATEWAY"
        if patch["applyTo"] == "HTTP_FILTER":
            before = match["listener"]["filterChain"]["filter"]["subFilter"]["name"]
            named = [f["name"] for f in known["http_filters"]].index(before)
            at = {"INSERT_BEFORE": named, "INSERT_FIRST": 0}[change["operation"]]
            known["http_filters"].insert(at, change["value"])
            continue
        assert change["operation"] == "MERGE"
        targets = {
            "NETWORK_FILTER": [network],
            "VIRTUAL_HOST": known["route_config"]["virtual_hosts"],
            "CLUSTER": [c for c in clusters if c["name"].endswith(f"||{match.get('cluster', {}).get('service')}")],
        }[patch["applyTo"]]
        assert targets
        for target in targets:
            _merge(target, change["value"])
    return bootstrap


def _merge(target: Json, more: Json) -> None:
    """As protobuf merges: messages member by member, lists one after the other."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        elif isinstance(value, list):
            target[key] = [*target.get(key, []), *value]
        else:
            target[key] = value


_FILTER: Json = yaml.safe_load((FOLDER / "overlays/istio/filters.yaml").read_text())
MESHES: dict[str, Callable[[list[Json]], Json]] = {
    "envoy-gateway": envoy_gateway,
    "istio": lambda objects: istio(objects, _FILTER),
}
"""Makes the bootstrap of the objects of an overlay, by the overlay's name."""
