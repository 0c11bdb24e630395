"""The worker's side of the connector: lets pins go when the scheduler says so, and asks peers before it trusts them."""

import logging
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kvreturn_connector.scheduler import RELEASED
from kvreturn_connector.settings import Settings
from kvreturn_connector.sidechannel import path
from kvreturn_connector.stats import KvreturnStats

logger = logging.getLogger("vllm.kvreturn")


class ProvenPullWorker(NixlPullConnectorWorker):
    """vLLM's worker side of NIXL.

    Args:
        vllm_config: vLLM's.
        engine_id: vLLM's.
        kv_cache_config: vLLM's.
        settings: ours.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, settings: Settings) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._probe_ms = int(settings.claim_timeout * 1000)
        self._released: set[str] = set()
        self.xfer_stats = KvreturnStats()

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """vLLM's, then our orders."""
        super().start_load_kv(metadata)
        for request_id in getattr(metadata, RELEASED, ()):
            if request_id in self._reqs_to_process:
                self._reqs_to_process.discard(request_id)
                self._reqs_to_send.pop(request_id, None)
                self._released.add(request_id)

    def get_transfer_results(self) -> Any:
        """vLLM's, and the pins that were let go: their blocks are free, as if they had been read."""
        results = super().get_transfer_results()
        results.finished_sending.update(self._released)
        self._released.clear()
        return results

    def _nixl_handshake(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        """VLLM waits 5 s for a peer that does not answer, one peer after the other: first see whether it does."""
        context = zmq.Context()
        socket = context.socket(zmq.REQ)
        try:
            if ":" in host:
                socket.setsockopt(zmq.IPV6, 1)
            socket.connect(path(host, port))
            socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
            if not socket.poll(self._probe_ms):
                raise TimeoutError(f"no answer from the side channel of {host}:{port} within {self._probe_ms} ms")
        finally:
            context.destroy(linger=0)
        return super()._nixl_handshake(host, port, *args, **kwargs)
