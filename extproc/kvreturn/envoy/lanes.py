"""The fast lane in Envoy: the scripts through which streamed answers pass, and the log that tells of their end."""

from collections.abc import Sequence
from datetime import timedelta
from importlib.resources import files

from kvreturn.envoy import names
from kvreturn.envoy.clusters import router_cluster
from kvreturn.envoy.protos import Any, accesslog_pb, cluster_pb, core_pb, grpc_log_pb, matcher_pb

_PASS = ("json.lua", "members.lua", "events.lua", "kept.lua", "part.lua", "fast_lane.lua")
_HOLD = ("part.lua", "hand_over.lua")
# What the router may need beyond its store's deadline to read up to 256 KiB of answer, on a machine that is busy.
_BEYOND = 0.5
_FLUSH = timedelta(milliseconds=200)


def pass_script(event_bytes: int) -> str:
    """The script that every byte of an answer passes, and no handle.

    Args:
        event_bytes: as `limits.event_bytes`.
    """
    return _script(f"local EVENT_BYTES = {event_bytes}\n", _PASS)


def hold_script(deadline: float) -> str:
    """The script that holds the end of an answer.

    Args:
        deadline: of the session store, in seconds.
    """
    return _script(f"local TIMEOUT = {round((deadline + _BEYOND) * 1000)} -- milliseconds\n", _HOLD)


def _script(constants: str, names_of: Sequence[str]) -> str:
    folder = files("kvreturn.envoy") / "lua"
    return "\n".join([constants, *((folder / name).read_text() for name in names_of)])


def one_each(listens: Sequence[str]) -> list[cluster_pb.Cluster]:
    """A cluster for each router alone: only the one that has a turn can be told of it."""
    clusters = [router_cluster([listen]) for listen in listens]
    for cluster, listen in zip(clusters, listens, strict=True):
        cluster.name = names.one_router(listen)
        assert cluster.load_assignment
        cluster.load_assignment.cluster_name = cluster.name
    return clusters


def ends(listens: Sequence[str]) -> list[accesslog_pb.AccessLog]:
    """Tells each router of the end of its turns: that a client left, or a node died, nobody else would tell."""
    return [_log(names.one_router(listen)) for listen in listens]


def _log(cluster: str) -> accesslog_pb.AccessLog:
    its_turns = matcher_pb.MetadataMatcher(
        filter=names.METADATA_NAMESPACE,
        path=[matcher_pb.MetadataMatcherPathSegment(key=names.CALL_KEY)],
        value=matcher_pb.ValueMatcher(string_match=matcher_pb.StringMatcher(exact=cluster)),
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
                    grpc_service=core_pb.GrpcService(envoy_grpc=core_pb.GrpcServiceEnvoyGrpc(cluster_name=cluster)),
                    transport_api_version=core_pb.ApiVersion.V3,
                    buffer_flush_interval=_FLUSH,
                )
            )
        ),
    )
