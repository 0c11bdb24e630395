"""What a simulated node with our connector tells of itself (docs/handle-format.md, `about`)."""

import os
import time
from typing import Any

from kvreturn import __version__
from kvreturn.core.handle import secret_scope
from kvreturn.sim.config import NodeConfig
from kvreturn.sim.fabric import Address

VLLM = "0.32.0"
"""The version of vLLM that is simulated."""


def about(config: NodeConfig, side: Address) -> dict[str, Any]:
    """The member `about`.

    Args:
        config: the node's.
        side: its side channel.
    """
    return {
        "connector": __version__,
        "vllm": VLLM,
        "role": "kv_producer" if config.role == "prefill" else "kv_consumer",
        "bidirectional": config.bidirectional,
        "ttl": config.decoder_ttl,
        "threshold": config.recompute_threshold,
        "lease": config.lease,
        "retention_budget": config.retention_budget,
        "block_size": config.block_size,
        "prefix_caching": config.prefix_caching,
        "kv_cache_dtype": "auto",
        "tp": 1,
        "pp": 1,
        "backends": ["UCX"],
        "ucx_tls": None,
        "scope": secret_scope(config.secret),
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "side_host": side.host,
        "side_port": side.port,
        "time": time.time(),
    }
