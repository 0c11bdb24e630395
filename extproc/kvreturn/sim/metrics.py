"""`GET /metrics`: the names and labels of vLLM 0.32.0 and of our connector, for what a simulated node knows."""

from kvreturn.sim.config import NodeConfig
from kvreturn.sim.stats import BlockUse, NodeStats


def exposition(config: NodeConfig, stats: NodeStats, use: BlockUse, engine: str = "0") -> str:
    """Prometheus text format."""
    labels = f'engine="{engine}",model_name="{config.model}"'
    lines: list[str] = []

    def family(name: str, kind: str, *samples: tuple[str, str, float]) -> None:
        lines.append(f"# TYPE vllm:{name} {kind}")
        lines.extend(f"vllm:{name}{suffix}{{{labels}{more}}} {float(value)}" for suffix, more, value in samples)

    def counter(name: str, value: float) -> None:
        family(f"{name}_total", "counter", ("", "", value))

    def summed(name: str, value: float) -> None:
        buckets = ("_bucket", ',le="+Inf"', stats.transfers)
        family(name, "histogram", buckets, ("_count", "", stats.transfers), ("_sum", "", value))

    used = stats.blocks_used / (stats.blocks_used + stats.blocks_free)
    family("kv_cache_usage_perc", "gauge", ("", "", used))
    family("num_requests_running", "gauge", ("", "", stats.running))
    family("num_requests_waiting", "gauge", ("", "", stats.waiting))
    reasons = {"capacity": stats.waiting - stats.loading, "deferred": stats.loading}
    samples = [("", f',reason="{reason}"', number) for reason, number in reasons.items()]
    family("num_requests_waiting_by_reason", "gauge", *samples)
    counter("num_preemptions", stats.preemptions)
    counter("prefix_cache_queries", stats.queried_tokens if config.prefix_caching else 0)
    counter("prefix_cache_hits", stats.local_tokens)
    connected = config.role != "single"
    counter("external_prefix_cache_queries", stats.queried_tokens - stats.local_tokens if connected else 0)
    counter("external_prefix_cache_hits", stats.read_tokens)
    counter("prompt_tokens", stats.prompt_tokens)
    sources = {
        "local_compute": stats.computed_tokens - stats.recomputed_tokens,
        "local_cache_hit": stats.local_tokens,
        "external_kv_transfer": stats.read_tokens,
    }
    family(
        "prompt_tokens_by_source_total",
        "counter",
        *(("", f',source="{source}"', value) for source, value in sources.items()),
    )
    counter("prompt_tokens_cached", stats.local_tokens + stats.read_tokens)
    counter("generation_tokens", stats.generated_tokens)
    if connected:
        summed("nixl_xfer_time_seconds", stats.transfer_seconds)
        summed("nixl_bytes_transferred", stats.transferred_bytes)
        counter("nixl_num_failed_transfers", stats.failed_transfers)
        counter("nixl_num_failed_notifications", stats.failed_notifications)
        counter("nixl_num_kv_expired_reqs", stats.expired_reads + stats.expired_holds)
        counter("nixl_num_notifications_after_expiry", stats.late_notifications)
    if connected and config.connector == "kvreturn":
        family("kvreturn_pins", "gauge", ("", "", stats.pins))
        family("kvreturn_pinned_blocks", "gauge", ("", "", use.pinned))
        counter("kvreturn_early_releases", stats.early_releases)
        counter("kvreturn_pins_refused", stats.refused_pins)
    cache = (
        f'block_size="{config.block_size}",enable_prefix_caching="{config.prefix_caching}",engine="{engine}",'
        f'num_gpu_blocks="{config.num_blocks}"'
    )
    lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{cache}}} 1.0"]
    return "\n".join(lines) + "\n"
