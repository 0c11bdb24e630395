"""The two pools of one router, made from its settings."""

from collections.abc import Callable

from kvreturn.config import Settings
from kvreturn.telemetry.metrics import Metrics
from kvreturn.telemetry.nodes import NodeMetrics
from kvreturn.upstream.pool import Kind, Pool


def open_pools(settings: Settings, metrics: Metrics, clock: Callable[[], float]) -> tuple[Pool, Pool]:
    """The pools of prefill and of decode nodes.

    Args:
        settings: the router's.
        metrics: gets those of the pools too.
        clock: monotonic seconds.
    """

    def pool(kind: Kind, nodes: list[str]) -> Pool:
        return Pool(nodes, clock, kind=kind, errors=settings.health.errors)

    prefill, decode = pool("prefill", settings.pools.prefill), pool("decode", settings.pools.decode)
    told = NodeMetrics(metrics.registry, {p.kind: p.states for p in (prefill, decode)})
    for one in (prefill, decode):
        one.ejected = lambda reason, kind=one.kind: told.ejections.labels(kind, reason).inc()  # type: ignore[misc]
    return prefill, decode
