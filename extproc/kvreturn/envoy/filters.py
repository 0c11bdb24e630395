"""The HTTP filters of the bootstrap."""

from datetime import timedelta
from typing import Literal

import betterproto2

from kvreturn.config import Settings
from kvreturn.envoy import names
from kvreturn.envoy.ports import may_be_several
from kvreturn.envoy.protos import (
    Any,
    core_pb,
    early_mutation_pb,
    ext_proc_pb,
    hcm_pb,
    header_to_metadata_pb,
    health_check_pb,
    lua_pb,
    matcher_pb,
    mutation_pb,
    previous_hosts_pb,
    route_pb,
    router_pb,
    type_pb,
)

# `override_host` takes a named node without asking whether it is alive: a conversation bound to a dead node would get
# 503 turn after turn. Envoy's own override mechanism does ask (health check and outlier detection), but is within reach
# of scripts only. So this names the node there, and takes it from `override_host` if that worked. It does not work for
# what is no ip:port; such a name stays where it is, matches no host, and the fallback policy chooses. Where no other
# node will do (an eager return), Envoy answers 503 if it is not alive.
_NODE_GUARD = """\
function envoy_on_request(handle)
  local metadata = handle:streamInfo():dynamicMetadata()
  local ours = metadata:get("{namespace}")
  local node = ours and ours["{key}"]
  local only = ours ~= nil and ours["{only}"] ~= nil
  if node and pcall(handle.setUpstreamOverrideHost, handle, node, only) then
    metadata:set("{namespace}", "{key}", "")
  end
end
"""

Role = Literal["gateway", "prefill", "decode"]


def message_timeout(settings: Settings) -> float:
    """Seconds that the router may take for one message: it answers a request only after the prefill leg."""
    return settings.prefill.timeout + 5


def ext_proc(settings: Settings, role: Role, *, answers_only: bool = False) -> hcm_pb.HttpFilter:
    """The filter that calls the router in a role.

    Args:
        settings: the router's.
        role: that it has there.
        answers_only: the router has heard of the request by another way.
    """
    send, skip = ext_proc_pb.ProcessingModeHeaderSendMode.SEND, ext_proc_pb.ProcessingModeHeaderSendMode.SKIP
    request = ext_proc_pb.ProcessingModeBodySendMode[settings.envoy.request_body_mode]
    response = ext_proc_pb.ProcessingModeBodySendMode[settings.envoy.response_body_mode]
    full_duplex = ext_proc_pb.ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
    ours = ext_proc_pb.MetadataOptionsMetadataNamespaces(untyped=[names.METADATA_NAMESPACE])
    config = ext_proc_pb.ExternalProcessor(
        grpc_service=core_pb.GrpcService(
            envoy_grpc=core_pb.GrpcServiceEnvoyGrpc(cluster_name=names.ROUTER_CLUSTER),
            initial_metadata=_first_words(role, answers_only=answers_only),
            retry_policy=_another_router() if may_be_several(settings.routers()) else None,
        ),
        # Never let a body pass unread: it could carry a client's own kv_transfer_params (field report 31).
        failure_mode_allow=False,
        processing_mode=ext_proc_pb.ProcessingMode(
            request_header_mode=skip if answers_only else send,
            response_header_mode=send,
            request_body_mode=ext_proc_pb.ProcessingModeBodySendMode.NONE if answers_only else request,
            response_body_mode=response,
            # A buffered body comes whole, with or without trailers after it, and vLLM reads none.
            request_trailer_mode=send if request == full_duplex else skip,
            response_trailer_mode=send,
        ),
        response_attributes=[names.UPSTREAM_ADDRESS],
        message_timeout=timedelta(seconds=message_timeout(settings)),
        stat_prefix="kvreturn",
        max_message_timeout=timedelta(0),
        # Where a body mode is full duplex Envoy ignores overrides without a word.
        allow_mode_override=full_duplex not in {request, response},
        metadata_options=ext_proc_pb.MetadataOptions(
            receiving_namespaces=ours,
            forwarding_namespaces=ours if answers_only else None,  # so that the router knows whose answer it is
        ),
    )
    return _filter(names.EXT_PROC_FILTER, config)


def _first_words(role: Role, *, answers_only: bool) -> list[core_pb.HeaderValue]:
    """What Envoy says as it opens a stream."""
    if answers_only:
        there = f"%DYNAMIC_METADATA({names.METADATA_NAMESPACE}:{names.CALL_KEY})%"
        return [core_pb.HeaderValue(key=names.TO_HEADER, value=there)]
    return [] if role == names.GATEWAY else [core_pb.HeaderValue(key=names.ROLE_HEADER, value=role)]


def _another_router() -> core_pb.RetryPolicy:
    """A stream that the one router has not taken goes to another one.

    Only what no router can have begun with: who refuses a connection, or a stream in HTTP/2's own words, has seen
    nothing of it.
    """
    elsewhere = core_pb.RetryPolicyRetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts",
        typed_config=Any.pack(previous_hosts_pb.PreviousHostsPredicate()),
    )
    return core_pb.RetryPolicy(
        retry_on=",".join(names.UNTAKEN),
        num_retries=2,
        retry_back_off=core_pb.BackoffStrategy(
            base_interval=timedelta(milliseconds=5), max_interval=timedelta(milliseconds=50)
        ),
        retry_host_predicate=[elsewhere],
        host_selection_retry_max_attempts=3,
    )


def readiness(*more: str) -> hcm_pb.HttpFilter:
    """Answers `names.READY` itself: 200 while a router and a decode node are healthy, 503 else and while Envoy drains.

    Prefill nodes do not count: without them decode nodes work alone.

    Args:
        more: clusters of which one endpoint must be healthy too.
    """
    path = route_pb.HeaderMatcher(name=":path", string_match=matcher_pb.StringMatcher(exact=names.READY))
    one = type_pb.Percent(value=1)  # Envoy knows no absolute number, and takes less for 0
    config = health_check_pb.HealthCheck(
        pass_through_mode=False,
        headers=[path],
        cluster_min_healthy_percentages=dict.fromkeys((names.ROUTER_CLUSTER, names.DECODE_CLUSTER, *more), one),
    )
    return _filter("envoy.filters.http.health_check", config)


def node_guard(key: str) -> hcm_pb.HttpFilter:
    """Has Envoy use the node that the metadata names, if that node is alive.

    Args:
        key: within the metadata namespace `kvreturn`.
    """
    return lua(_NODE_GUARD.format(namespace=names.METADATA_NAMESPACE, key=key, only=names.ONLY_KEY))


def lua(script: str) -> hcm_pb.HttpFilter:
    """A filter that runs a script."""
    return _filter("envoy.filters.http.lua", lua_pb.Lua(default_source_code=core_pb.DataSource(inline_string=script)))


def node_headers() -> hcm_pb.HttpFilter:
    """Turns the router's headers that name a node into metadata, so that the node never sees them."""
    rules = [
        header_to_metadata_pb.ConfigRule(
            header=header,
            on_header_present=header_to_metadata_pb.ConfigKeyValuePair(
                metadata_namespace=names.METADATA_NAMESPACE, key=key
            ),
            remove=True,
        )
        for header, key in ((names.NODE_HEADER, names.PREFILL_NODE_KEY), (names.ONLY_HEADER, names.ONLY_KEY))
    ]
    return _filter("envoy.filters.http.header_to_metadata", header_to_metadata_pb.Config(request_rules=rules))


def router() -> hcm_pb.HttpFilter:
    """Envoy's own router filter. It adds no x-envoy-* headers: they would tell clients about our inside."""
    return _filter("envoy.filters.http.router", router_pb.Router(suppress_envoy_headers=True))


def strip_client_headers() -> core_pb.TypedExtensionConfig:
    """Removes our own headers from what clients send, before anything else looks at the request."""
    ours = matcher_pb.StringMatcher(prefix=names.HEADER_PREFIX)
    remove = mutation_pb.HeaderMutation(remove_on_match=mutation_pb.HeaderMutationRemoveOnMatch(key_matcher=ours))
    return core_pb.TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=Any.pack(early_mutation_pb.HeaderMutation(mutations=[remove])),
    )


def _filter(name: str, config: betterproto2.Message) -> hcm_pb.HttpFilter:
    """A filter with its configuration."""
    return hcm_pb.HttpFilter(name=name, typed_config=Any.pack(config))
