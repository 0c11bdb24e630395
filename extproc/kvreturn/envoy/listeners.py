"""Envoy listeners: where clients connect, and the router's way to the prefill nodes."""

from datetime import timedelta

from kvreturn.config import Settings
from kvreturn.envoy import filters, lanes, names, replies
from kvreturn.envoy.clusters import bind_address
from kvreturn.envoy.protos import (
    Any,
    accesslog_pb,
    core_pb,
    ext_proc_pb,
    hcm_pb,
    listener_pb,
    matcher_pb,
    route_pb,
    stream_pb,
)

_HEADER_ROOM = 5  # KiB: Envoy counts what it adds itself, and must be able to say no itself
_FOREVER = timedelta(0)
_METHODS_WITHOUT_BODY = "GET|HEAD|OPTIONS"
# What and how it went: no header of the request but method, path, and the id that the node got; of the path no query.
# An id that the router did not set may be a client's own text: it comes last, so that it cannot pass for another field.
_ACCESS_LOG = (
    "%START_TIME% leg={leg} %DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT% %REQ(:METHOD)% %PATH(NQ)% %PROTOCOL% -> "
    "%RESPONSE_CODE% %RESPONSE_FLAGS% node=%UPSTREAM_HOST% first=%RESPONSE_DURATION%ms all=%DURATION%ms "
    "in=%BYTES_RECEIVED% out=%BYTES_SENT% request=%REQ(X-REQUEST-ID):64%\n"
)
# The node's own, or none.
_SERVER_HEADER = hcm_pb.HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH
_ESCAPED_SLASHES = hcm_pb.HttpConnectionManagerPathWithEscapedSlashesAction.UNESCAPE_AND_FORWARD


def client_listener(settings: Settings) -> listener_pb.Listener:
    """Where clients connect: all passes the router but GET, HEAD and OPTIONS of what is no stored response."""
    host = _decode_routes(settings, "client", scripts=settings.fast_lane)
    if settings.fast_lane:
        chain = [filters.readiness(names.CALLS_CLUSTER), *lanes.chain(settings)]
        hcm = _through_router(settings, host, chain)
        hcm.access_log += lanes.ends(settings)
    else:
        chain = [filters.readiness(), *_by_ext_proc(settings, names.GATEWAY, names.DECODE_NODE_KEY)]
        hcm = _through_router(settings, host, chain)
    # Inbound: draining closes this listener only, and running turns still reach their prefill nodes.
    return _listener("client", settings.envoy.listen, hcm, core_pb.TrafficDirection.INBOUND)


def orchestrated_listeners(settings: Settings) -> list[listener_pb.Listener]:
    """Where an orchestrator finds prefill and decode nodes, if there is one."""
    ours = settings.envoy.orchestrated
    if ours is None:
        return []
    by_prefill = _by_ext_proc(settings, names.PREFILL, names.PREFILL_NODE_KEY)
    prefill = _through_router(settings, _prefill_routes(settings), by_prefill)
    prefill.local_reply_config = replies.of_routers()
    routes = _decode_routes(settings, "orchestrated_decode")
    decode = _through_router(settings, routes, _by_ext_proc(settings, names.DECODE, names.DECODE_NODE_KEY))
    listeners = [
        _listener("orchestrated_prefill", ours.prefill_listen, prefill, core_pb.TrafficDirection.OUTBOUND),
        _listener("orchestrated_decode", ours.decode_listen, decode, core_pb.TrafficDirection.OUTBOUND),
    ]
    for listener in listeners:
        listener.ignore_global_conn_limit = True  # that limit is for clients
    return listeners


def _by_ext_proc(settings: Settings, role: filters.Role, node_key: str) -> list[hcm_pb.HttpFilter]:
    """All passes the router, which has this role and names the node under this key."""
    return [filters.ext_proc(settings, role), filters.node_guard(node_key), filters.router()]


def _through_router(
    settings: Settings, host: route_pb.VirtualHost, chain: list[hcm_pb.HttpFilter]
) -> hcm_pb.HttpConnectionManager:
    """Requests pass the router, by these filters."""
    return hcm_pb.HttpConnectionManager(
        stat_prefix=host.name,
        route_config=route_pb.RouteConfiguration(name=host.name, virtual_hosts=[host]),
        http_filters=chain,
        common_http_protocol_options=core_pb.HttpProtocolOptions(idle_timeout=timedelta(hours=1)),
        server_header_transformation=_SERVER_HEADER,
        stream_idle_timeout=timedelta(seconds=settings.envoy.stream_idle_timeout),
        request_headers_timeout=timedelta(seconds=10),
        access_log=[_access_log(host.name, _no_probes())],
        local_reply_config=replies.of_routers_and_decode_nodes(),
        # As with bodies: more than the router's own limit, so that it is the router that refuses. Envoy counts in KiB.
        max_request_headers_kb=settings.limits.header_bytes // 1024 + _HEADER_ROOM,
        use_remote_address=True,
        early_header_mutation_extensions=[filters.strip_client_headers()],
        upgrade_configs=[hcm_pb.HttpConnectionManagerUpgradeConfig(upgrade_type="websocket")],
        # vLLM's server decodes a path before it looks for the endpoint. The router must see the same path, or a client
        # could reach the endpoint past it.
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=_ESCAPED_SLASHES,
    )


def prefill_listener(settings: Settings) -> listener_pb.Listener:
    """The router's way to prefill nodes. No retries: the router does its own, without the handle."""
    timeout = settings.prefill.timeout
    route = route_pb.Route(
        match=route_pb.RouteMatch(prefix="/"),
        route=route_pb.RouteAction(cluster=names.PREFILL_CLUSTER, timeout=timedelta(seconds=timeout)),
    )
    upstream = core_pb.HeaderValueOption(
        header=core_pb.HeaderValue(key=names.UPSTREAM_HEADER, value="%UPSTREAM_REMOTE_ADDRESS%"),
        append_action=core_pb.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    host = route_pb.VirtualHost(name="prefill", domains=["*"], routes=[route], response_headers_to_add=[upstream])
    hcm = hcm_pb.HttpConnectionManager(
        stat_prefix="prefill",
        route_config=route_pb.RouteConfiguration(name="prefill", virtual_hosts=[host]),
        http_filters=[filters.node_headers(), filters.node_guard(names.PREFILL_NODE_KEY), filters.router()],
        server_header_transformation=_SERVER_HEADER,
        stream_idle_timeout=timedelta(seconds=timeout + 5),  # nothing is sent while the node computes
        # When a node breaks off its answer, Envoy says so by closing, after this time. Its default is a whole second,
        # which the router's second try would lack.
        delayed_close_timeout=timedelta(milliseconds=50),
        access_log=[_access_log("prefill", _no_looks())],
        skip_xff_append=True,
        generate_request_id=False,  # the router gives each leg an id of its own
    )
    listener = _listener("prefill", settings.envoy.prefill_listen, hcm, core_pb.TrafficDirection.OUTBOUND)
    listener.ignore_global_conn_limit = True  # that limit is for clients
    return listener


def body_limit(settings: Settings) -> int:
    """Bytes of a request body that Envoy buffers; the body that the router answers with counts too.

    More than `limits.request_bytes`, so that it is the router that refuses a longer body, in the API's own error shape,
    and so that there is room for the handle that the router adds.
    """
    return settings.limits.request_bytes + settings.limits.event_bytes


def _decode_routes(settings: Settings, name: str, *, scripts: bool = False) -> route_pb.VirtualHost:
    to_decode = route_pb.RouteAction(
        cluster=names.DECODE_CLUSTER, timeout=_FOREVER
    )  # a stream takes as long as it takes
    # A WebSocket begins with GET. With another method its body would never end, and no turn would ever begin.
    websocket = route_pb.RouteActionUpgradeConfig(upgrade_type="websocket", enabled=False)
    turns = route_pb.RouteAction(cluster=names.DECODE_CLUSTER, timeout=_FOREVER, upgrade_configs=[websocket])
    inference = route_pb.Route(name="inference", match=route_pb.RouteMatch(prefix="/"), route=turns)
    # A stored response has its turn's handle in it, and the router knows which node keeps it.
    stored = route_pb.Route(name="stored", match=route_pb.RouteMatch(prefix=names.STORED_RESPONSES), route=turns)
    return _host(settings, name, [stored, _plain(to_decode, scripts=scripts), inference])


def _prefill_routes(settings: Settings) -> route_pb.VirtualHost:
    timeout = timedelta(seconds=settings.prefill.timeout)
    to_prefill = route_pb.RouteAction(cluster=names.PREFILL_CLUSTER, timeout=timeout)
    inference = route_pb.Route(name="inference", match=route_pb.RouteMatch(prefix="/"), route=to_prefill)
    return _host(settings, "orchestrated_prefill", [_plain(to_prefill), inference])


def _plain(action: route_pb.RouteAction, *, scripts: bool = False) -> route_pb.Route:
    """Requests that have no body go past the router; the scripts know the route by its name."""
    past = Any.pack(ext_proc_pb.ExtProcPerRoute(disabled=True))
    methods = matcher_pb.StringMatcher(safe_regex=matcher_pb.RegexMatcher(regex=_METHODS_WITHOUT_BODY))
    return route_pb.Route(
        name="plain",
        match=route_pb.RouteMatch(prefix="/", headers=[route_pb.HeaderMatcher(name=":method", string_match=methods)]),
        route=action,
        typed_per_filter_config={} if scripts else {names.EXT_PROC_FILTER: past},
    )


def _host(settings: Settings, name: str, routes: list[route_pb.Route]) -> route_pb.VirtualHost:
    # Here and not as the connection's limit: that one also holds for responses, and would let every slow reader make
    # Envoy keep as much.
    return route_pb.VirtualHost(name=name, domains=["*"], routes=routes, request_body_buffer_limit=body_limit(settings))


def _listener(
    name: str, address: str, hcm: hcm_pb.HttpConnectionManager, direction: core_pb.TrafficDirection
) -> listener_pb.Listener:
    manager = listener_pb.Filter(name="envoy.filters.network.http_connection_manager", typed_config=Any.pack(hcm))
    return listener_pb.Listener(
        name=name,
        address=bind_address(address),
        filter_chains=[listener_pb.FilterChain(filters=[manager])],
        traffic_direction=direction,
    )


def _access_log(leg: str, which: accesslog_pb.AccessLogFilter) -> accesslog_pb.AccessLog:
    """The access log of a listener."""
    text = _ACCESS_LOG.format(leg=leg)
    line = core_pb.SubstitutionFormatString(text_format_source=core_pb.DataSource(inline_string=text))
    return accesslog_pb.AccessLog(
        name="envoy.access_loggers.stdout",
        typed_config=Any.pack(stream_pb.StdoutAccessLog(log_format=line)),
        filter=which,
    )


def _no_probes() -> accesslog_pb.AccessLogFilter:
    """All requests but those that ask whether this Envoy can serve."""
    return accesslog_pb.AccessLogFilter(not_health_check_filter=accesslog_pb.NotHealthCheckFilter())


def _no_looks() -> accesslog_pb.AccessLogFilter:
    """All but the router's looks at nodes (GET /health, /metrics), every second."""
    get = matcher_pb.StringMatcher(exact="GET")
    header = route_pb.HeaderMatcher(name=":method", string_match=get, invert_match=True)
    return accesslog_pb.AccessLogFilter(header_filter=accesslog_pb.HeaderFilter(header=header))
