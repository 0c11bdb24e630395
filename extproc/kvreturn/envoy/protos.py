"""Envoy's API as typed messages, one module for each proto package.

Their import is in one place because it takes about a second, and because pydantic warns about how the generated classes
are written: that is not for our users to see, nor to fail on.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from envoy_data_plane.envoy.config.accesslog import v3 as accesslog_pb
    from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_pb
    from envoy_data_plane.envoy.config.cluster import v3 as cluster_pb
    from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_pb
    from envoy_data_plane.envoy.config.core import v3 as core_pb
    from envoy_data_plane.envoy.config.endpoint import v3 as endpoint_pb
    from envoy_data_plane.envoy.config.listener import v3 as listener_pb
    from envoy_data_plane.envoy.config.overload import v3 as overload_pb
    from envoy_data_plane.envoy.config.route import v3 as route_pb
    from envoy_data_plane.envoy.extensions.access_loggers.filters.cel import v3 as cel_pb
    from envoy_data_plane.envoy.extensions.access_loggers.grpc import v3 as grpc_log_pb
    from envoy_data_plane.envoy.extensions.access_loggers.stream import v3 as stream_pb
    from envoy_data_plane.envoy.extensions.common.matching import v3 as matching_pb
    from envoy_data_plane.envoy.extensions.filters.common.matcher.action import v3 as skip_pb
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc_pb
    from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata import v3 as header_to_metadata_pb
    from envoy_data_plane.envoy.extensions.filters.http.health_check import v3 as health_check_pb
    from envoy_data_plane.envoy.extensions.filters.http.lua import v3 as lua_pb
    from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router_pb
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm_pb
    from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early_mutation_pb
    from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import v3 as least_request_pb
    from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host_pb
    from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections import v3 as connections_pb
    from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts_pb
    from envoy_data_plane.envoy.extensions.upstreams.http import v3 as http_pb
    from envoy_data_plane.envoy.type import v3 as type_pb
    from envoy_data_plane.envoy.type.matcher import v3 as matcher_pb
    from envoy_data_plane.envoy.type.metadata import v3 as metadata_pb
    from envoy_data_plane.google.protobuf import Any
    from envoy_data_plane.xds.core import v3 as xds_core_pb
    from envoy_data_plane.xds.type.matcher import v3 as xds_match_pb

__all__ = [
    "Any",
    "accesslog_pb",
    "bootstrap_pb",
    "cel_pb",
    "cluster_pb",
    "connections_pb",
    "core_pb",
    "early_mutation_pb",
    "endpoint_pb",
    "ext_proc_pb",
    "grpc_log_pb",
    "hcm_pb",
    "header_to_metadata_pb",
    "health_check_pb",
    "http_pb",
    "least_request_pb",
    "listener_pb",
    "lua_pb",
    "matcher_pb",
    "matching_pb",
    "metadata_pb",
    "mutation_pb",
    "overload_pb",
    "override_host_pb",
    "previous_hosts_pb",
    "route_pb",
    "router_pb",
    "skip_pb",
    "stream_pb",
    "type_pb",
    "xds_core_pb",
    "xds_match_pb",
]
