"""The vLLM nodes, and what is sent to them."""

from typing import Literal

from pydantic import Field

from kvreturn.settings.types import Count, Positive, Section


class Prefill(Section):
    """The prefill leg."""

    via: Literal["envoy", "direct"] = Field(
        "envoy",
        description="`envoy`: through the loopback prefill listener, so that mTLS, circuit breaking, access logs and "
        "tracing apply. `direct`: the router connects to the node itself.",
    )
    timeout: Positive = Field(60.0, description="Seconds for the whole leg, its one cold retry included.")
    on_failure: Literal["fallback", "error"] = Field(
        "fallback",
        description="When prefill failed twice: `fallback` lets the decode node do the turn alone, `error` answers 502 "
        "or 504.",
    )

    pass_token_ids: bool = Field(
        default=True,
        description="Have the prefill node tell the decode node the token ids of a text chat's prompt: it need not "
        "tokenize again, and both mean the same prompt even if the template puts in the time of day.",
    )


class Breaker(Section):
    """Stops attaching the handles of a decode engine whose reads fail (field report 83)."""

    failures: Count = Field(5, description="So many failed reads of one engine's handles within `window` open it.")
    window: Positive = Field(60.0, description="Seconds over which failures count, and for which it stays open.")


class Health(Section):
    """Health checks of the nodes by the router; Envoy has its own (docs/pools.md)."""

    path: str = Field("/health", pattern="^/", description="Path that answers 200 on a node that can serve.")
    interval: Positive = Field(5.0, description="Seconds between two checks of a node.")
    timeout: Positive = Field(2.0, description="Seconds that a check may take.")
    errors: Count = Field(
        5, description="Prefill legs that a node answers with 5xx in a row; then it is out until a check says yes."
    )
