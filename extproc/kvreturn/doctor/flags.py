"""What is known of one node's flags, wherever it was learned: from the node itself, or from its command line."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Connector = Literal["kvreturn", "stock", "other", "none"]
Side = Literal["prefill", "decode"]
OUR_MODULE = "kvreturn_connector.connector"
NIXL = "NixlConnector"
_TTL, _THRESHOLD, _LEASE = 480.0, 64.0, 30.0  # vLLM 0.32.0's defaults


@dataclass(frozen=True, slots=True)
class Flags:
    """One node's; None where it is not known.

    Attributes:
        source: address of the node, or path of the file.
        side: which pool it is in, or what its `kv_role` makes of it.
        connector: which KV connector it runs.
        connector_version: of ours.
        vllm: version.
        role: `kv_role`.
        bidirectional: `bidirectional_kv_xfer`.
        ttl: `decoder_kv_blocks_ttl`, seconds.
        threshold: `kv_recompute_threshold`, tokens.
        lease: `kv_lease_duration`, seconds.
        policy: `kv_load_failure_policy`.
        block_size: tokens per block.
        prefix_caching: whether it is on.
        kv_cache_dtype: of the KV cache.
        tp: tensor parallel size.
        backends: of NIXL.
        ucx_tls: the variable UCX_TLS.
        secret: whether it has one.
        scope: tells it from another one (docs/handle-format.md).
        hash_seed: the variable PYTHONHASHSEED.
        side_host: of the side channel.
        side_port: of the side channel.
    """

    source: str
    side: Side | None = None
    connector: Connector | None = None
    connector_version: str | None = None
    vllm: str | None = None
    role: str | None = None
    bidirectional: bool | None = None
    ttl: float | None = None
    threshold: float | None = None
    lease: float | None = None
    policy: str | None = None
    block_size: int | None = None
    prefix_caching: bool | None = None
    kv_cache_dtype: str | None = None
    tp: int | None = None
    backends: tuple[str, ...] | None = None
    ucx_tls: str | None = None
    secret: bool | None = None
    scope: str | None = None
    hash_seed: str | None = None
    side_host: str | None = None
    side_port: int | None = None


def from_about(source: str, side: Side, about: Mapping[str, Any]) -> Flags:
    """What a node with our connector tells of itself (docs/handle-format.md). Members of wrong types are left out."""
    backends = about.get("backends")
    return Flags(
        source=source,
        side=side,
        connector="kvreturn",
        connector_version=_text(about, "connector"),
        vllm=_text(about, "vllm"),
        role=_text(about, "role"),
        bidirectional=_truth(about, "bidirectional"),
        ttl=number(about.get("ttl")),
        threshold=number(about.get("threshold")),
        lease=number(about.get("lease")),
        block_size=_count(about, "block_size"),
        prefix_caching=_truth(about, "prefix_caching"),
        kv_cache_dtype=_text(about, "kv_cache_dtype"),
        tp=_count(about, "tp"),
        backends=tuple(map(str, backends)) if isinstance(backends, list) else None,
        ucx_tls=_text(about, "ucx_tls"),
        scope=_text(about, "scope"),
        hash_seed=_text(about, "hash_seed"),
        side_host=_text(about, "side_host"),
        side_port=_count(about, "side_port"),
    )


def from_transfer(
    source: str, transfer: Mapping[str, Any], options: Mapping[str, str], environ: Mapping[str, str]
) -> Flags:
    """What a node's command line and environment say, with vLLM's defaults filled in.

    Args:
        source: path of the file.
        transfer: `--kv-transfer-config`; empty where it has none.
        options: the other options, names without leading dashes and with dashes; empty where they are not known.
        environ: variables that are set for it.
    """
    extra = transfer.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, Mapping) else {}
    role = transfer.get("kv_role")
    backends = extra.get("backends", ["UCX"])
    return Flags(
        source=source,
        side={"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(role)),  # type: ignore[arg-type] # a Side
        connector=_connector(transfer),
        role=role if isinstance(role, str) else None,
        bidirectional=extra.get("bidirectional_kv_xfer", False) is True,
        ttl=number(extra.get("decoder_kv_blocks_ttl", _TTL)),
        threshold=number(extra.get("kv_recompute_threshold", _THRESHOLD)),
        lease=number(extra.get("kv_lease_duration", _LEASE)),
        policy=str(transfer.get("kv_load_failure_policy", "fail")),
        block_size=int(options["block-size"]) if options.get("block-size", "").isdecimal() else None,
        prefix_caching=False
        if "no-enable-prefix-caching" in options
        else (options["enable-prefix-caching"].lower() != "false" if "enable-prefix-caching" in options else None),
        kv_cache_dtype=options.get("kv-cache-dtype"),
        tp=int(options["tensor-parallel-size"]) if options.get("tensor-parallel-size", "").isdecimal() else None,
        backends=tuple(map(str, backends)) if isinstance(backends, list) else None,
        ucx_tls=environ.get("UCX_TLS"),
        secret=True if "KVRETURN_SECRET" in environ else None,
        hash_seed=environ.get("PYTHONHASHSEED"),
        side_host=environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST"),
    )


def _connector(transfer: Mapping[str, Any]) -> Connector:
    name = transfer.get("kv_connector")
    if not name:
        return "none"
    if name != NIXL:
        return "other"
    return "kvreturn" if transfer.get("kv_connector_module_path") == OUR_MODULE else "stock"


def number(value: object) -> float | None:
    """A number of JSON as one, None if `value` is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(about: Mapping[str, Any], key: str) -> str | None:
    value = about.get(key)
    return value if isinstance(value, str) else None


def _truth(about: Mapping[str, Any], key: str) -> bool | None:
    value = about.get(key)
    return value if isinstance(value, bool) else None


def _count(about: Mapping[str, Any], key: str) -> int | None:
    value = about.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
