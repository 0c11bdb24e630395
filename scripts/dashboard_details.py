"""What is below the first screen, folded up."""

from dashboard_panels import J, gauge, lines, node, quantile, rate

LEGS = [
    (
        12,
        lines(
            "Prefill and decode legs",
            [
                (quantile(q, f"kvreturn_{leg}_duration_seconds"), f"{leg}, p{q * 100:.0f}")
                for leg in ("prefill", "decode")
                for q in (0.5, 0.95)
            ],
            "s",
            "The prefill leg with its retries; the decode leg to the end of the answer.",
        ),
    ),
    (
        12,
        lines(
            "What goes wrong",
            [
                (rate("kvreturn_prefill_retries_total"), "prefill retries"),
                (rate("kvreturn_prefill_fallbacks_total"), "D alone"),
                (rate("kvreturn_turns_incomplete_total"), "streams cut"),
                (rate("kvreturn_turn_errors_total", by="type"), "error {{type}}"),
                (rate("kvreturn_requests_refused_total", by="why"), "refused: {{why}}"),
            ],
            "reqps",
            "Errors by HTTP status, `in_band` inside a stream; refused by the router itself, and why.",
        ),
    ),
    (
        12,
        lines(
            "Turns by model",
            [(rate("kvreturn_turns_total", by="model, api"), "{{model}} {{api}}")],
            "reqps",
            "Models that no node has answered to, and all beyond the 32nd, are `other`.",
            stack=True,
        ),
    ),
    (
        12,
        lines(
            "Time that the router adds",
            [
                (quantile(q, "kvreturn_router_added_seconds", f'side="{side}"'), f"{side}, p{q * 100:.0f}")
                for side in ("request", "response")
                for q in (0.5, 0.99)
            ],
            "s",
            "To a request without waiting for P; to the whole of a response.",
        ),
    ),
]

STORE = [
    (
        8,
        lines(
            "Handles",
            [
                (rate("kvreturn_handles_captured_total"), "captured"),
                (rate("kvreturn_handles_missing_total"), "turns without one"),
                (rate("kvreturn_frees_total", by="result"), "freed: {{result}}"),
                (rate("kvreturn_sessions_expired_total"), "expired"),
                (rate("kvreturn_sessions_evicted_total"), "evicted"),
                (rate("kvreturn_sessions_over_limit_total"), "over limit"),
            ],
            "ops",
            "Expired and evicted ones are known of the memory store only.",
        ),
    ),
    (
        8,
        lines(
            "Age of handles when they are used",
            [(quantile(q, "kvreturn_handle_age_seconds"), f"p{q * 100:.0f}") for q in (0.5, 0.95)],
            "s",
            "Near the TTL: raise it, or let turns go back eagerly.",
        ),
    ),
    (
        8,
        lines(
            "Store calls",
            [
                (quantile(0.99, "kvreturn_store_duration_seconds", by="operation"), "{{operation}}, p99"),
            ],
            "s",
            "Calls that succeeded; `store.deadline` cuts the others.",
        ),
    ),
    (
        12,
        lines(
            "Store errors",
            [(rate("kvreturn_store_errors_total", by="operation, kind"), "{{operation}}: {{kind}}")],
            "ops",
            "`breaker_open`: not asked, because it failed.",
        ),
    ),
    (
        12,
        lines(
            "Records in the memory store",
            [(gauge("kvreturn_sessions", by="instance"), "{{instance}}")],
            "short",
            "A shared store knows its own.",
        ),
    ),
]

RETURNS = [
    (
        12,
        lines(
            "Eager returns",
            [
                (rate("kvreturn_returns_total", by="result"), "{{result}}"),
                (rate("kvreturn_return_recalls_total"), "recalled"),
            ],
            "ops",
            "What became of them (docs/return.md).",
        ),
    ),
    (
        12,
        lines(
            "What was chosen, and why",
            [(rate("kvreturn_return_choices_total", by="choice, why"), "{{choice}}: {{why}}")],
            "ops",
            "Of turns whose KV could go back at once.",
            stack=True,
        ),
    ),
    (
        12,
        lines(
            "Returns under way",
            [
                (gauge("kvreturn_returns_running"), "running"),
                (gauge("kvreturn_returns_waiting"), "waiting"),
            ],
            "short",
            "Waiting ones wait for room on P.",
        ),
    ),
    (
        12,
        lines(
            "Time of a return",
            [(quantile(q, "kvreturn_return_duration_seconds"), f"p{q * 100:.0f}") for q in (0.5, 0.95)],
            "s",
            "While it lasts, D keeps the blocks.",
        ),
    ),
]

NODES = [
    (
        12,
        lines(
            "Nodes by state",
            [(gauge("kvreturn_nodes", "max", by="pool, state"), "{{pool}}: {{state}}")],
            "short",
            "As the router sees them that sees most (docs/pools.md).",
        ),
    ),
    (
        12,
        lines(
            "Nodes taken out, and trouble with finding them",
            [
                (rate("kvreturn_node_ejections_total", by="pool, reason"), "{{pool}}: {{reason}}"),
                (rate("kvreturn_discovery_errors_total", by="pool, kind"), "finding {{pool}}: {{kind}}"),
            ],
            "ops",
            "Why nodes were taken out; a discovery that fails leaves the pool as it is.",
        ),
    ),
    (
        12,
        lines(
            "Blocks that wait on D",
            [("sum by (instance) (vllm:kvreturn_pinned_blocks)", "{{instance}}")],
            "short",
            "What reuse costs D: KV blocks that finished turns keep. Bounded by `retention_budget`.",
        ),
    ),
    (
        12,
        lines(
            "For want of room on D",
            [
                (node("vllm:kvreturn_early_releases_total"), "let go early, {{instance}}"),
                (node("vllm:kvreturn_pins_refused_total"), "no handle, {{instance}}"),
            ],
            "ops",
            "Raise `retention_budget`, or let turns go back eagerly.",
        ),
    ),
    (
        12,
        lines(
            "Handles at P",
            [
                (node("vllm:kvreturn_proofs_total"), "proven, {{instance}}"),
                (node("vllm:kvreturn_reads_total"), "read, {{instance}}"),
                (node("vllm:kvreturn_unread_total", by="reason"), "not read: {{reason}}"),
            ],
            "ops",
            "As the connector on P counts.",
        ),
    ),
    (
        12,
        lines(
            "KV cache and queues",
            [
                ("max by (instance) (vllm:kv_cache_usage_perc)", "cache used, {{instance}}"),
            ],
            "percentunit",
            "vLLM's own.",
        ),
    ),
]

PROCESS = [
    (
        8,
        lines(
            "Event loop lag (p99)",
            [(quantile(0.99, "kvreturn_event_loop_lag_seconds", by="instance"), "{{instance}}")],
            "s",
            "What all streams of a process wait for together. Above 50 ms: more workers.",
        ),
    ),
    (
        8,
        lines(
            "Streams and tasks",
            [
                (gauge("kvreturn_live_streams", by="instance"), "streams, {{instance}}"),
                (gauge("kvreturn_live_turns", by="instance"), "turns, {{instance}}"),
                (gauge("kvreturn_tasks", by="instance"), "tasks, {{instance}}"),
            ],
            "short",
            "They go back to nothing when nothing runs.",
        ),
    ),
    (
        8,
        lines(
            "Memory and CPU",
            [(f"process_resident_memory_bytes{{{J}}}", "{{instance}}")],
            "bytes",
            "Resident memory of each process.",
        ),
    ),
    (
        12,
        lines(
            "Engines whose reads fail",
            [(gauge("kvreturn_breakers_open", "max"), "breakers open")],
            "short",
            "Handles of these decode engines are not used for a while.",
        ),
    ),
    (
        12,
        lines(
            "Inside the router",
            [
                (rate("kvreturn_capture_failures_total"), "failures at looking into a response"),
                (rate("kvreturn_oversize_events_total"), "events over the limit"),
                (rate("kvreturn_config_reloads_total", by="result"), "reloads: {{result}}"),
            ],
            "ops",
            "The first should stay 0.",
        ),
    ),
]
