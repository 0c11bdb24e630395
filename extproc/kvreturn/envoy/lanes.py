"""The fast lane in Envoy: the scripts through which turns pass, how they call the router, and who hears of the end."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.resources import files

from kvreturn.config import Settings
from kvreturn.core.api import APIS
from kvreturn.core.scrub import ROUTING_HEADERS, ROUTING_PREFIXES
from kvreturn.envoy import filters, names, replies
from kvreturn.envoy.clusters import of_a_router, plain_cluster, router_cluster
from kvreturn.envoy.filters import message_timeout
from kvreturn.envoy.ports import as_envoy_knows, reachable
from kvreturn.envoy.protos import (
    Any,
    accesslog_pb,
    cluster_pb,
    core_pb,
    grpc_log_pb,
    hcm_pb,
    matcher_pb,
    matching_pb,
    skip_pb,
    type_pb,
    xds_core_pb,
    xds_match_pb,
)

Constant = str | bool | float | list[str] | dict[str, bool]

_PASS = ("json.lua", "members.lua", "events.lua", "kept.lua", "part.lua", "request.lua", "fast_lane.lua")
_HOLD = ("part.lua", "hand_over.lua")
# What the router may need beyond its store's deadline to read up to 256 KiB of answer, on a machine that is busy.
_BEYOND = 0.5
_FLUSH = timedelta(milliseconds=200)
_IDLE = timedelta(seconds=30)  # the router's own is 75 s: Envoy hangs up first
_CONNECT = timedelta(seconds=1)


def pass_script(settings: Settings) -> str:
    """The script that tells the router of requests, and that every byte of an answer passes, and no handle."""
    constants: dict[str, Constant] = {
        "EVENT_BYTES": settings.limits.event_bytes,
        "REQUEST_SECONDS": message_timeout(settings),
        "SCRIPTS": names.SCRIPTS,
        "ROUTERS": [as_envoy_knows(listen) for listen in settings.routers()],
        "ANTHROPIC": replies.ANTHROPIC,
        "LATE": replies.bodies(replies.LATE, "504"),
        "GONE": replies.bodies(replies.GONE, "500"),
        "FAILED": replies.bodies(replies.FAILED, "500"),
        "TURNS": {api.path: True for api in APIS},
        "FOREIGN": dict.fromkeys(sorted(ROUTING_HEADERS), True),
        "FOREIGN_PREFIXES": list(ROUTING_PREFIXES),
    }
    return _script(constants, _PASS)


def hold_script(settings: Settings) -> str:
    """The script that holds the end of an answer."""
    return _script({"TIMEOUT": round((settings.store.deadline + _BEYOND) * 1000)}, _HOLD)


def _script(constants: Mapping[str, Constant], names_of: Sequence[str]) -> str:
    folder = files("kvreturn.envoy") / "lua"
    known = {
        "NAMESPACE": names.METADATA_NAMESPACE,
        "CALLS": names.calls_of(""),
        "REQUESTS": names.requests_of(""),
        **constants,
    }
    first = "".join(f"local {name} = {_lua(value)}\n" for name, value in known.items())
    return "\n".join([first, *((folder / name).read_text() for name in names_of)])


def _lua(value: Constant) -> str:
    """A constant as Lua writes it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"[{_lua(k)}] = {_lua(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "{ " + ", ".join(map(_lua, value)) + " }"
    return json.dumps(value)  # numbers, addresses, and names of headers, in which both mean the same


def clusters(settings: Settings) -> list[cluster_pb.Cluster]:
    """How the scripts, and the log of turns, reach each router alone: only one knows of a turn. And all together."""
    several = len(settings.routers()) > 1
    found = [_looked_at(_calls(settings, names.CALLS_CLUSTER, settings.routers()))]
    for listen in settings.routers():
        router = as_envoy_knows(listen)
        requests = _calls(settings, names.requests_of(router), [listen])
        # A single one is called whatever its health is. Parts of answers go to any: it has begun with the turn.
        found += [_looked_at(requests) if several else requests, _calls(settings, names.calls_of(router), [listen])]
        found.append(_alone(listen))
    return found


def _alone(listen: str) -> cluster_pb.Cluster:
    cluster = router_cluster([listen])
    cluster.name = names.one_router(as_envoy_knows(listen))
    assert cluster.load_assignment
    cluster.load_assignment.cluster_name = cluster.name
    return cluster


def _calls(settings: Settings, name: str, listens: Sequence[str]) -> cluster_pb.Cluster:
    return plain_cluster(name, [reachable(settings.calls_of(listen)) for listen in listens], _CONNECT, idle=_IDLE)


def _looked_at(cluster: cluster_pb.Cluster) -> cluster_pb.Cluster:
    """Nobody is called whose health fails, not even if there is no other."""
    look = core_pb.HealthCheckHttpHealthCheck(path=names.HEALTH_PATH)
    cluster.health_checks = [of_a_router(core_pb.HealthCheck(http_health_check=look))]
    cluster.common_lb_config = cluster_pb.ClusterCommonLbConfig(healthy_panic_threshold=type_pb.Percent(value=0))
    return cluster


def ends(settings: Settings) -> list[accesslog_pb.AccessLog]:
    """Tells each router of the end of its turns: that a client left, or a node died, nobody else would tell."""
    return [_log(as_envoy_knows(listen)) for listen in settings.routers()]


def chain(settings: Settings) -> list[hcm_pb.HttpFilter]:
    """The filters; answers pass from the last one to the first."""
    passing, holding = filters.lua(pass_script(settings)), filters.lua(hold_script(settings))
    return [holding, answers_only(settings), passing, filters.router()]


def answers_only(settings: Settings) -> hcm_pb.HttpFilter:
    """Ext_proc for the answers that no script takes on, each at the router that has its turn."""
    inner = filters.ext_proc(settings, names.GATEWAY, answers_only=True)
    passes = matcher_pb.HttpResponseHeaderMatchInput(header_name=names.PASSES_HEADER)
    found = xds_match_pb.MatcherMatcherListPredicateSinglePredicate(
        input=xds_core_pb.TypedExtensionConfig(name="header", typed_config=Any.pack(passes)),
        value_match=xds_match_pb.StringMatcher(exact="1"),
    )
    skip = xds_core_pb.TypedExtensionConfig(name="skip", typed_config=Any.pack(skip_pb.SkipFilter()))
    rule = xds_match_pb.MatcherMatcherListFieldMatcher(
        predicate=xds_match_pb.MatcherMatcherListPredicate(single_predicate=found),
        on_match=xds_match_pb.MatcherOnMatch(action=skip),
    )
    config = matching_pb.ExtensionWithMatcher(
        xds_matcher=xds_match_pb.Matcher(matcher_list=xds_match_pb.MatcherMatcherList(matchers=[rule])),
        extension_config=core_pb.TypedExtensionConfig(name=inner.name, typed_config=inner.typed_config),
    )
    return hcm_pb.HttpFilter(name=inner.name, typed_config=Any.pack(config))


def _log(router: str) -> accesslog_pb.AccessLog:
    its_turns = matcher_pb.MetadataMatcher(
        filter=names.METADATA_NAMESPACE,
        path=[matcher_pb.MetadataMatcherPathSegment(key=names.CALL_KEY)],
        value=matcher_pb.ValueMatcher(string_match=matcher_pb.StringMatcher(exact=router)),
    )
    return accesslog_pb.AccessLog(
        name="envoy.access_loggers.http_grpc",
        filter=accesslog_pb.AccessLogFilter(
            metadata_filter=accesslog_pb.MetadataFilter(matcher=its_turns, match_if_key_not_found=False)
        ),
        typed_config=Any.pack(
            grpc_log_pb.HttpGrpcAccessLogConfig(
                common_config=grpc_log_pb.CommonGrpcAccessLogConfig(
                    log_name="kvreturn",
                    grpc_service=core_pb.GrpcService(
                        envoy_grpc=core_pb.GrpcServiceEnvoyGrpc(cluster_name=names.one_router(router))
                    ),
                    transport_api_version=core_pb.ApiVersion.V3,
                    buffer_flush_interval=_FLUSH,
                )
            )
        ),
    )
