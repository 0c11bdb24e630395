"""The connector class that vLLM loads: `"kv_connector_module_path": "kvreturn_connector.connector"`.

It bears vLLM's own name, `NixlConnector`: vLLM asks by that name in places (for the metrics, for example), and
`kv_connector_module_path` takes precedence over the built-in class.
"""

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker, connector, pull_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from kvreturn_connector.compat import check_connector
from kvreturn_connector.scheduler import ProvenPullScheduler
from kvreturn_connector.settings import Settings, keys_read_by, read_settings
from kvreturn_connector.stats import KvreturnPromMetrics, KvreturnStats, SchedulerStats
from kvreturn_connector.worker import ProvenPullWorker

logger = logging.getLogger("vllm.kvreturn")
_LOCAL = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}  # noqa: S104 - recognised, not bound to


class NixlConnector(NixlPullConnector):
    """vLLM's pull connector with proven reads and bounded pins.

    Args:
        vllm_config: vLLM's.
        role: scheduler or worker.
        kv_cache_config: vLLM's.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        config = vllm_config.kv_transfer_config
        check_connector()
        keys = keys_read_by([base_scheduler, base_worker, pull_scheduler, connector])
        settings = read_settings(config.kv_connector_extra_config, config.kv_role, keys)
        # vLLM's base class makes its own two halves; ours take their places before anything uses them.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        self.connector_scheduler = self.connector_worker = None
        self._stats: SchedulerStats | None = None
        if role == KVConnectorRole.SCHEDULER:
            # A failed read costs a prefill, not a request. vLLM reads the policy after it made the connector.
            config.kv_load_failure_policy = "recompute"
            self.connector_scheduler = ProvenPullScheduler(vllm_config, self.engine_id, kv_cache_config, settings)
            self._stats = SchedulerStats(self.connector_scheduler.pins, self.connector_scheduler.read_counts)
            _announce(settings, self.connector_scheduler)
        else:
            self.connector_worker = ProvenPullWorker(vllm_config, self.engine_id, kv_cache_config, settings)

    def get_kv_connector_stats(self) -> Any:
        """VLLM's from the workers, ours from the scheduler."""
        return self._stats.collect() if self._stats else super().get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvreturnStats:
        """See `KVConnectorBase_V1.build_kv_connector_stats`."""
        return KvreturnStats(data=data) if data is not None else KvreturnStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvreturnPromMetrics:
        """See `KVConnectorBase_V1.build_prom_metrics`."""
        return KvreturnPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _announce(settings: Settings, scheduler: ProvenPullScheduler) -> None:
    logger.info(
        "kvreturn connector: bidirectional=%s retention_budget=%g (%d blocks) ttl=%g s allowed_peers=%s mac=%s",
        settings.bidirectional,
        settings.retention_budget,
        scheduler.pins.budget,
        settings.ttl,
        ",".join(settings.allowed_peers) or "private",
        bool(settings.secret),
    )
    if not settings.bidirectional:
        logger.warning(
            "kvreturn: bidirectional_kv_xfer is off: a prefill node reads nothing back, a decode node leaves no "
            "handles. If it is on at the other nodes, they work for nothing: set it to the same everywhere"
        )
    if scheduler.side_channel_host in _LOCAL:
        logger.warning(
            "kvreturn: the side channel is %s: nodes on other machines cannot reach it. Set "
            "VLLM_NIXL_SIDE_CHANNEL_HOST to this node's address, unless all nodes run here",
            scheduler.side_channel_host,
        )
