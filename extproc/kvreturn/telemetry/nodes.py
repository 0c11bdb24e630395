"""Metrics of the pools."""

from collections import Counter
from collections.abc import Callable, Mapping

from kvreturn.telemetry.instruments import Instruments
from kvreturn.upstream.node import REASONS, STATES, State


class NodeMetrics:
    """Nodes by state, what takes them out, and how finding them goes.

    Args:
        instruments: the router's.
        pools: by name of the pool, gives the states of its nodes.
    """

    def __init__(self, instruments: Instruments, pools: Mapping[str, Callable[[], Mapping[str, State]]]) -> None:
        def counted() -> Mapping[tuple[str, ...], float]:
            by_pool = {pool: Counter(states().values()) for pool, states in pools.items()}
            return {(pool, state): float(by_pool[pool][state]) for pool in pools for state in STATES}

        instruments.watch_each("nodes", "Nodes by state.", counted, "pool", "state", unit="{node}")
        self.ejections = instruments.counter(
            "node_ejections", "Nodes that were taken out, by why.", "pool", "reason", unit="{node}"
        )
        self.discovery_errors = instruments.counter(
            "discovery.errors",
            "Answers about who is in a pool that could not be used: `failed`, or `empty`; the pool stays as it is.",
            "pool",
            "kind",
            unit="{answer}",
        )
        for pool in pools:
            for reason in REASONS:
                self.ejections.labels(pool, reason)
            for kind in ("failed", "empty"):
                self.discovery_errors.labels(pool, kind)
