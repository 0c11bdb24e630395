"""What a node tells of itself: `kvreturn doctor` compares nodes by it. docs/handle-format.md has the members."""

import base64
import os
import time
from collections.abc import Mapping
from typing import Any

from kvreturn_connector import __version__, wire
from kvreturn_connector.compat import vllm_version
from kvreturn_connector.settings import Settings


def about(
    vllm_config: Any, settings: Settings, side: tuple[str, int], environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The node's versions, flags and clock. No secret, and nothing of any request.

    Args:
        vllm_config: vLLM's.
        settings: ours.
        side: host and port of the side channel.
        environ: of the process.
    """
    transfer, cache, parallel = vllm_config.kv_transfer_config, vllm_config.cache_config, vllm_config.parallel_config
    extra = transfer.kv_connector_extra_config
    return {
        "connector": __version__,
        "vllm": vllm_version(),
        "role": transfer.kv_role,
        "bidirectional": settings.bidirectional,
        "ttl": settings.ttl,
        "threshold": settings.threshold,
        "lease": extra.get("kv_lease_duration", 30),
        "retention_budget": settings.retention_budget,
        "block_size": cache.block_size,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "kv_cache_dtype": str(cache.cache_dtype),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "backends": list(extra.get("backends", ["UCX"])),
        "ucx_tls": environ.get("UCX_TLS"),
        "scope": base64.b64encode(wire.scope_tag(wire.chain_seed(settings.secret))).decode(),
        "hash_seed": environ.get("PYTHONHASHSEED"),
        "side_host": side[0],
        "side_port": side[1],
        "time": time.time(),
    }
