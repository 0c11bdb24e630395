"""Envoy clusters for the decode pool, the prefill pool and the router itself."""

from collections.abc import Sequence
from datetime import timedelta

import betterproto2

from kvreturn.config import ConfigError
from kvreturn.core.address import is_ip, split_address
from kvreturn.envoy import names
from kvreturn.envoy.ports import may_be_several, reachable
from kvreturn.envoy.protos import (
    Any,
    cluster_pb,
    core_pb,
    endpoint_pb,
    http_pb,
    least_request_pb,
    metadata_pb,
    override_host_pb,
    type_pb,
)

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
# Envoy's default of 1024 would refuse streams that vLLM is able to queue. vLLM is HTTP/1: one connection per stream.
_PARALLEL = 16_384
# uvicorn closes a kept connection after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE). A request that Envoy writes in that moment
# would be lost, and Envoy may not retry it. So Envoy closes first.
_NODE_IDLE = timedelta(seconds=4)
# For so long Envoy does not listen at all when it starts and no router tells it any node.
_FIRST_ENDPOINTS = timedelta(seconds=5)
_MAY_BE_NAMED = [core_pb.HealthStatus[s] for s in ("UNKNOWN", "HEALTHY", "DEGRADED", "DRAINING")]


def bind_address(address: str) -> core_pb.Address:
    """Where a listener binds: `host:port`, host an IP address or `localhost`.

    Raises:
        ConfigError: Envoy binds no other host names.
    """
    host, port = split_address(address)
    if host == "localhost":
        host = "127.0.0.1"
    if not is_ip(host):
        raise ConfigError(f"envoy: cannot listen on {address}: Envoy binds IP addresses only")
    return core_pb.Address(socket_address=core_pb.SocketAddress(address=host, port_value=port))


def node_cluster(
    name: str, nodes: Sequence[str] | None, metadata_key: str, health_check_path: str
) -> cluster_pb.Cluster:
    """A pool of vLLM nodes, of which dynamic metadata may name one.

    Args:
        name: the cluster's name.
        nodes: `host:port` of each node; None to have a router tell them.
        metadata_key: key within the metadata namespace `kvreturn`; its value is the node's `ip:port`.
        health_check_path: path that answers 200 on a node that can serve.
    """
    cluster = plain_cluster(name, nodes or [], timedelta(seconds=2), idle=_NODE_IDLE)
    source = override_host_pb.OverrideHostOverrideHostSource(metadata=_key(metadata_key))
    cluster.load_balancing_policy = _named_else_least_request(source, _key(names.UPSTREAM_KEY))
    # Envoy ignores health altogether once less than half of a pool is healthy; in a pool of three that would send two
    # thirds of the traffic to dead nodes. Here it does so only if no node at all is healthy.
    cluster.common_lb_config = cluster_pb.ClusterCommonLbConfig(
        healthy_panic_threshold=type_pb.Percent(value=1),
        # A node that drains gets nothing by Envoy's own choice; but the router may send it what only it can answer.
        override_host_status=None if nodes else core_pb.HealthStatusSet(statuses=_MAY_BE_NAMED),
    )
    if nodes is None:
        _told_by_router(cluster)
    cluster.health_checks = [
        core_pb.HealthCheck(
            timeout=timedelta(seconds=3),
            interval=timedelta(seconds=5),
            no_traffic_interval=timedelta(seconds=5),  # Envoy's default, 60 s, finds a dead idle node far too late
            unhealthy_threshold=2,
            healthy_threshold=1,
            http_health_check=core_pb.HealthCheckHttpHealthCheck(path=health_check_path),
        )
    ]
    # A node that refuses a connection gets no more until the next health check. Its answers do not count: one that
    # answers 500 to a bad request is up.
    cluster.outlier_detection = _refusing(timedelta(seconds=5))
    return cluster


def _told_by_router(cluster: cluster_pb.Cluster) -> None:
    """Its endpoints come from a router (EDS), over the same connection as its other streams."""
    cluster.type = cluster_pb.ClusterDiscoveryType.EDS
    cluster.load_assignment = None
    cluster.eds_cluster_config = cluster_pb.ClusterEdsClusterConfig(
        eds_config=core_pb.ConfigSource(
            resource_api_version=core_pb.ApiVersion.V3,
            initial_fetch_timeout=_FIRST_ENDPOINTS,
            api_config_source=core_pb.ApiConfigSource(
                api_type=core_pb.ApiConfigSourceApiType.GRPC,
                transport_api_version=core_pb.ApiVersion.V3,
                grpc_services=[
                    core_pb.GrpcService(envoy_grpc=core_pb.GrpcServiceEnvoyGrpc(cluster_name=names.ROUTER_CLUSTER))
                ],
            ),
        )
    )
    # One that has left is gone at once: else it would stay for as long as it answers health checks.
    cluster.ignore_health_on_host_removal = True


def router_cluster(listens: Sequence[str], *, named: bool = False) -> cluster_pb.Cluster:
    """The ext_proc servers, over HTTP/2.

    No HTTP/2 keepalive: a gRPC server hangs up on a peer that pings an idle connection more than every five minutes.

    Args:
        listens: `host:port` or `unix:/path` that each server binds; a name may stand for several.
        named: whether a stream may name one of them, by `names.TO_HEADER`.
    """
    cluster = _cluster(names.ROUTER_CLUSTER, [reachable(listen) for listen in listens], timedelta(seconds=1))
    cluster.health_checks = [of_a_router(core_pb.HealthCheck(grpc_health_check=core_pb.HealthCheckGrpcHealthCheck()))]
    # A single one gets streams whatever its health is, since Envoy has no other; but who asks whether this Envoy can
    # serve wants to know.
    if may_be_several(listens):
        _spread(cluster, named=named)
    cluster.typed_extension_protocol_options[_HTTP_OPTIONS] = Any.pack(
        http_pb.HttpProtocolOptions(
            explicit_http_config=http_pb.HttpProtocolOptionsExplicitHttpConfig(
                http2_protocol_options=core_pb.Http2ProtocolOptions()
            )
        )
    )
    return cluster


def of_a_router(check: core_pb.HealthCheck) -> core_pb.HealthCheck:
    """A look at a router: each second, and one is enough either way."""
    check.timeout = check.interval = check.no_traffic_interval = timedelta(seconds=1)
    check.unhealthy_threshold = check.healthy_threshold = 1
    return check


def plain_cluster(name: str, addresses: Sequence[str], connect: timedelta, *, idle: timedelta) -> cluster_pb.Cluster:
    """A cluster of HTTP/1 servers.

    Args:
        name: the cluster's name.
        addresses: `host:port` or `unix:/path`.
        connect: within which a connection must stand.
        idle: after which an idle connection is closed.
    """
    cluster = _cluster(name, addresses, connect)
    cluster.typed_extension_protocol_options[_HTTP_OPTIONS] = Any.pack(
        http_pb.HttpProtocolOptions(
            common_http_protocol_options=core_pb.HttpProtocolOptions(idle_timeout=idle),
            explicit_http_config=http_pb.HttpProtocolOptionsExplicitHttpConfig(
                http_protocol_options=core_pb.Http1ProtocolOptions()
            ),
        )
    )
    return cluster


def _spread(cluster: cluster_pb.Cluster, *, named: bool) -> None:
    """Each stream to the router with the fewest, none to one that drains (its health fails) or is gone."""
    source = override_host_pb.OverrideHostOverrideHostSource(header=names.TO_HEADER)
    cluster.load_balancing_policy = _named_else_least_request(source) if named else _least_request()
    cluster.common_lb_config = cluster_pb.ClusterCommonLbConfig(healthy_panic_threshold=type_pb.Percent(value=1))
    # A router that died gets no more streams from the first one on that it broke off or refused: the health check would
    # find out a second later. It ends the ejection too.
    cluster.outlier_detection = _refusing(timedelta(seconds=1))


def _refusing(ejection: timedelta) -> cluster_pb.OutlierDetection:
    """Ejects a host that refuses or breaks a connection, whatever it answers otherwise."""
    return cluster_pb.OutlierDetection(
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=1,
        enforcing_consecutive_local_origin_failure=100,
        enforcing_local_origin_success_rate=0,
        enforcing_consecutive_5xx=0,
        enforcing_consecutive_gateway_failure=0,
        enforcing_success_rate=0,
        interval=timedelta(seconds=1),
        base_ejection_time=ejection,
        max_ejection_percent=50,
    )


def _cluster(name: str, addresses: Sequence[str], connect_timeout: timedelta) -> cluster_pb.Cluster:
    sockets = [a for a in addresses if not a.startswith("unix:")]
    cluster = cluster_pb.Cluster(
        name=name,
        type=cluster_pb.ClusterDiscoveryType.STATIC,
        connect_timeout=connect_timeout,
        load_assignment=endpoint_pb.ClusterLoadAssignment(
            cluster_name=name,
            endpoints=[
                endpoint_pb.LocalityLbEndpoints(
                    lb_endpoints=[
                        endpoint_pb.LbEndpoint(endpoint=endpoint_pb.Endpoint(address=_address(a))) for a in addresses
                    ]
                )
            ],
        ),
        circuit_breakers=cluster_pb.CircuitBreakers(
            thresholds=[
                cluster_pb.CircuitBreakersThresholds(
                    max_connections=_PARALLEL, max_pending_requests=_PARALLEL, max_requests=_PARALLEL
                )
            ]
        ),
    )
    if sockets:  # the option cannot be set on a Unix socket
        cluster.upstream_connection_options = cluster_pb.UpstreamConnectionOptions(
            tcp_keepalive=core_pb.TcpKeepalive(keepalive_time=30, keepalive_interval=10, keepalive_probes=3)
        )
    if not all(is_ip(split_address(a)[0]) for a in sockets):  # STATIC takes IP addresses only
        cluster.type = cluster_pb.ClusterDiscoveryType.STRICT_DNS
        cluster.dns_lookup_family = cluster_pb.ClusterDnsLookupFamily.V4_PREFERRED
    return cluster


def _address(address: str) -> core_pb.Address:
    if address.startswith("unix:"):
        return core_pb.Address(pipe=core_pb.Pipe(path=address.removeprefix("unix:")))
    host, port = split_address(address)
    return core_pb.Address(socket_address=core_pb.SocketAddress(address=host, port_value=port))


def _key(name: str) -> metadata_pb.MetadataKey:
    return metadata_pb.MetadataKey(key=names.METADATA_NAMESPACE, path=[metadata_pb.MetadataKeyPathSegment(key=name)])


def _least_request() -> cluster_pb.LoadBalancingPolicy:
    return _policy("envoy.load_balancing_policies.least_request", least_request_pb.LeastRequest())


def _named_else_least_request(
    source: override_host_pb.OverrideHostOverrideHostSource, selected: metadata_pb.MetadataKey | None = None
) -> cluster_pb.LoadBalancingPolicy:
    """Whom the source names, if it does. Who it was in the end is told in the metadata, under the key `selected`."""
    named = override_host_pb.OverrideHost(
        override_host_sources=[source], fallback_policy=_least_request(), selected_host_key=selected
    )
    return _policy("envoy.load_balancing_policies.override_host", named)


def _policy(name: str, config: betterproto2.Message) -> cluster_pb.LoadBalancingPolicy:
    extension = core_pb.TypedExtensionConfig(name=name, typed_config=Any.pack(config))
    return cluster_pb.LoadBalancingPolicy(
        policies=[cluster_pb.LoadBalancingPolicyPolicy(typed_extension_config=extension)]
    )
