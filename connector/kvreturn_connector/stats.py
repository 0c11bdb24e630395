"""Our counters among vLLM's NIXL metrics, on the same `/metrics`."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from kvreturn_connector.counts import COUNTERS, GAUGES, REASONS, UNREAD, UNREAD_DOC, ReadCounts
from kvreturn_connector.pins import PinTable

_NAMES = (*GAUGES, *COUNTERS, *(f"{UNREAD}:{reason}" for reason in REASONS))


@dataclass
class KvreturnStats(NixlKVConnectorStats):
    """vLLM's lists of observations, and ours: gauges as their latest value, counters as increments."""

    def reset(self) -> None:
        """See `KVConnectorStats.reset`."""
        super().reset()
        for name in _NAMES:
            self.data[name] = []

    def is_empty(self) -> bool:
        """See `KVConnectorStats.is_empty`."""
        return super().is_empty() and not any(self.data.get(name) for name in _NAMES)


class SchedulerStats:
    """Turns what the scheduler's side has counted into what has changed since the last report.

    Args:
        pins: of finished turns.
        reads: of prefill requests.
    """

    def __init__(self, pins: PinTable, reads: ReadCounts) -> None:
        self._pins = pins
        self._reads = reads
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
            **self._reads.totals,
            **{f"{UNREAD}:{reason}": number for reason, number in self._reads.unread.items()},
        }
        if now == self._last:
            return None
        stats = KvreturnStats()
        for name, value in now.items():
            change = value - self._last.get(name, 0)
            if name in GAUGES:
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

        self._gauges = {name: make(self._gauge_cls, name, doc) for name, doc in GAUGES.items()}
        self._counters = {name: make(self._counter_cls, name, doc) for name, doc in COUNTERS.items()}
        unread = self._counter_cls(name=f"vllm:{UNREAD}", documentation=UNREAD_DOC, labelnames=[*labelnames, "reason"])
        for reason in REASONS:
            values = {engine: [*labels, reason] for engine, labels in per_engine_labelvalues.items()}
            self._counters[f"{UNREAD}:{reason}"] = create_metric_per_engine(unread, values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See `KVConnectorPromMetrics.observe`."""
        super().observe(transfer_stats_data, engine_idx)
        for name, gauge in self._gauges.items():
            for value in transfer_stats_data.get(name, ())[-1:]:
                gauge[engine_idx].set(value)
        for name, counter in self._counters.items():
            counter[engine_idx].inc(sum(transfer_stats_data.get(name, ())))
