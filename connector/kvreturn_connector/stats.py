"""Our counters among vLLM's NIXL metrics, on the same `/metrics`."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from kvreturn_connector.pins import PinTable

_GAUGES = {
    "kvreturn_pins": "Finished turns whose KV blocks are pinned for the next prefill.",
    "kvreturn_pinned_blocks": "Distinct KV blocks that finished turns keep pinned.",
}
_COUNTERS = {
    "kvreturn_early_releases": "Pins let go before their time, for want of room (retention_budget).",
    "kvreturn_pins_refused": "Finished turns that got no handle, for want of room (retention_budget).",
    "kvreturn_claims": "Pins given to a prefill node that asked for them.",
    "kvreturn_claims_denied": "Prefill nodes that asked for a pin that is not there, was used, or is another.",
}


@dataclass
class KvreturnStats(NixlKVConnectorStats):
    """vLLM's lists of observations, and ours: gauges as their latest value, counters as increments."""

    def reset(self) -> None:
        """See `KVConnectorStats.reset`."""
        super().reset()
        for name in (*_GAUGES, *_COUNTERS):
            self.data[name] = []

    def is_empty(self) -> bool:
        """See `KVConnectorStats.is_empty`."""
        return super().is_empty() and not any(self.data.get(name) for name in (*_GAUGES, *_COUNTERS))


class PinStats:
    """Turns a pin table's totals into what has changed since the last report.

    Args:
        pins: the table.
    """

    def __init__(self, pins: PinTable) -> None:
        self._pins = pins
        self._last: dict[str, int] = {}

    def collect(self) -> KvreturnStats | None:
        """What is new, None if nothing is."""
        counts = self._pins.counts
        now = {
            "kvreturn_pins": self._pins.pins,
            "kvreturn_pinned_blocks": self._pins.blocks,
            "kvreturn_early_releases": counts.early_releases,
            "kvreturn_pins_refused": counts.refused,
            "kvreturn_claims": counts.claims,
            "kvreturn_claims_denied": counts.denied,
        }
        if now == self._last:
            return None
        stats = KvreturnStats()
        for name, value in now.items():
            change = value - self._last.get(name, 0)
            if name in _GAUGES:
                stats.data[name].append(value)
            elif change:
                stats.data[name].append(change)
        self._last = now
        return stats


class KvreturnPromMetrics(NixlPromMetrics):
    """vLLM's Prometheus metrics of NIXL, and ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def make(kind: Any, name: str, doc: str) -> Any:
            metric = kind(name=f"vllm:{name}", documentation=doc, labelnames=labelnames)
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self._gauges = {name: make(self._gauge_cls, name, doc) for name, doc in _GAUGES.items()}
        self._counters = {name: make(self._counter_cls, name, doc) for name, doc in _COUNTERS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See `KVConnectorPromMetrics.observe`."""
        super().observe(transfer_stats_data, engine_idx)
        for name, gauge in self._gauges.items():
            for value in transfer_stats_data.get(name, ())[-1:]:
                gauge[engine_idx].set(value)
        for name, counter in self._counters.items():
            counter[engine_idx].inc(sum(transfer_stats_data.get(name, ())))
