"""The first screen: is it on, how often is it reused and why not, what does it save, what does it cost."""

from dashboard_panels import (
    FOLLOW_UP,
    GREEN,
    GREY,
    NOT_REUSED,
    RED,
    REUSED,
    YELLOW,
    bars,
    gauge,
    lines,
    quantile,
    rate,
    stat,
    total,
)

SHARE: list[tuple[str, float | None]] = [(RED, None), (YELLOW, 0.3), (GREEN, 0.6)]

FIRST = [  # is it on, how often, what did it save, what does it cost: one row
    (
        3,
        stat("Turns", rate("kvreturn_turns_total"), "reqps", [(GREY, None)], "Turns a second that the routers see."),
    ),
    (
        4,
        stat(
            "Follow-up turns that reused",
            f"({rate('kvreturn_turns_total', REUSED)} or 0 * {rate('kvreturn_turns_total', FOLLOW_UP)}) "
            f"/ {rate('kvreturn_turns_total', FOLLOW_UP)}",
            "percentunit",
            SHARE,
            "Of the turns that have something to reuse. `no data`: there are none, or `proof: off`.",
            max=1,
        ),
    ),
    (
        4,
        stat(
            "Prompt not computed",
            f"{rate('kvreturn_prefill_saved_tokens_total')} / {rate('kvreturn_prompt_tokens_total')}",
            "percentunit",
            [(GREY, None), (GREEN, 0.3)],
            "Share of all prompts' tokens that came back from D in place of being computed.",
            max=1,
        ),
    ),
    (
        4,
        stat(
            "Prefill time saved",
            total("kvreturn_prefill_saved_seconds_total"),
            "s",
            [(GREY, None), (GREEN, 1)],
            "In the time that is shown: what P would have computed longer, estimated from its other legs.",
        ),
    ),
    (
        3,
        stat(
            "Tokens saved",
            total("kvreturn_prefill_saved_tokens_total"),
            "short",
            [(GREY, None), (GREEN, 1)],
            "In the time that is shown.",
        ),
    ),
    (
        3,
        stat(
            "Router adds (p99)",
            quantile(0.99, "kvreturn_router_added_seconds", 'side="request"'),
            "s",
            [(GREEN, None), (YELLOW, 0.02), (RED, 0.05)],
            "To a request, the session store included, without waiting for P.",
        ),
    ),
    (
        3,
        stat(
            "Store",
            gauge("kvreturn_store_breaker_open", "max"),
            "none",
            [(GREEN, None), (RED, 1)],
            "Whether some router does without its store, so that all its turns are cold.",
            mappings=[{"type": "value", "options": {"0": {"text": "ok"}, "1": {"text": "away"}}}],
        ),
    ),
]

SECOND = [  # why not, and whether it shows
    (
        14,
        lines(
            "Turns by outcome",
            [(rate("kvreturn_turns_total", by="outcome"), "{{outcome}}")],
            "reqps",
            "What became of reuse; each word is explained in README.md.",
            stack=True,
        ),
    ),
    (
        10,
        bars(
            "Why follow-up turns did not reuse",
            f"sort_desc({total('kvreturn_turns_total', f'{FOLLOW_UP},{NOT_REUSED}', 'outcome')})",
            "{{outcome}}",
            "short",
            "In the time that is shown. What to do about each: docs/alerts.md.",
        ),
    ),
    (
        12,
        lines(
            "Time to first token",
            [
                (
                    quantile(q, "kvreturn_time_to_first_token_seconds", f'{which},streamed="true"'),
                    f"{legend}, p{q * 100:.0f}",
                )
                for which, legend in ((REUSED, "reused"), (NOT_REUSED, "others"))
                for q in (0.5, 0.95)
            ],
            "s",
            "As clients of streams see it. First turns are among the others, and may have shorter prompts.",
        ),
    ),
    (
        12,
        lines(
            "Where prompts' tokens come from",
            [
                (rate("kvreturn_computed_tokens_total"), "computed by P"),
                (rate("kvreturn_read_back_tokens_total"), "read back from D"),
                (rate("kvreturn_returned_tokens_total"), "gone back eagerly"),
            ],
            "short",
            "Tokens a second. What P has in its own cache is the rest of the prompts.",
            stack=True,
        ),
    ),
]
