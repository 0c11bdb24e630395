"""The names in vLLM 0.32.0's `--kv-transfer-config`. It ignores unknown ones inside `kv_connector_extra_config`."""

import difflib
from collections.abc import Iterable

VLLM = "0.32.0"

# Members of `kv_connector_extra_config`, by the module under vllm/distributed/kv_transfer/kv_connector/v1/nixl that
# reads them (`get_from_extra_config`).
_READ_BY = {
    "base_scheduler.py": (
        "kv_lease_duration",
        "kv_recompute_threshold",
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
    ),
    "base_worker.py": (
        *("backends", "kv_lease_duration", "bidirectional_kv_xfer", "num_threads", "engine_ttl"),
        "enforce_handshake_compat",
    ),
    "connector.py": ("bidirectional_kv_xfer",),
    "push_scheduler.py": ("push_registration_timeout",),
}
EXTRA = frozenset(key for keys in _READ_BY.values() for key in keys)
"""What vLLM reads."""

OURS = frozenset({"allowed_peers", "retention_budget", "claim_timeout"})
"""What our connector reads besides (kvreturn_connector/settings.py)."""

TRANSFER = frozenset(
    {
        *("kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port", "kv_connector_extra_config"),
        *("kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy"),
    }
)
"""The fields of `KVTransferConfig` (vllm/config/kv_transfer.py); vLLM does not start with another one."""

_RENAMED = {"remote_pull_threshold": "kv_recompute_threshold"}  # vLLM no longer reads the older name


def meant(key: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one most likely stands for."""
    close = difflib.get_close_matches(key, sorted(known), n=1)
    return _RENAMED.get(key) or (close[0] if close else None)
