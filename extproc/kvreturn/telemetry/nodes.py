"""Metrics of the pools."""

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvreturn.upstream.node import REASONS, STATES, State


class NodeMetrics:
    """Nodes by state, what takes them out, and how finding them goes.

    Args:
        registry: the router's.
        pools: by name of the pool, gives the states of its nodes.
    """

    def __init__(self, registry: CollectorRegistry, pools: Mapping[str, Callable[[], Mapping[str, State]]]) -> None:
        nodes = Gauge("kvreturn_nodes", "Nodes by state.", ("pool", "state"), registry=registry)
        self.ejections = Counter(
            "kvreturn_node_ejections", "Nodes that were taken out, by why.", ("pool", "reason"), registry=registry
        )
        self.discovery_errors = Counter(
            "kvreturn_discovery_errors",
            "Answers about who is in a pool that could not be used: `failed`, or `empty`; the pool stays as it is.",
            ("pool", "kind"),
            registry=registry,
        )
        for pool, states in pools.items():
            for state in STATES:
                nodes.labels(pool, state).set_function(partial(_count, states, state))
            for reason in REASONS:
                self.ejections.labels(pool, reason)
            for kind in ("failed", "empty"):
                self.discovery_errors.labels(pool, kind)


def _count(states: Callable[[], Mapping[str, State]], state: State) -> float:
    return sum(s == state for s in states().values())
