"""Eager return."""

from pydantic import Field

from kvreturn.settings.types import Count, Positive, Section


class Returns(Section):
    """Eager return: reading back right after a turn, before the next one asks."""

    concurrency: Count = Field(2, description="Returns that one prefill node runs at a time.")
    queue: Count = Field(1_000, description="Returns that may wait; beyond it, turns stay lazy.")
    per_tenant: Count = Field(100, description="Returns of one tenant that may wait or run.")
    max_tokens: Count = Field(262_144, description="Longer conversations stay lazy.")
    prefill_load: Count = Field(
        32_768, description="A return waits while the prefill node has more tokens of clients' prompts before it."
    )
    rate: Positive | None = Field(
        None, description="Tokens per second that go back to one prefill node, on average; none for no bound."
    )
    patience: Positive = Field(5.0, description="Seconds for which a return waits for its turn; then it stays lazy.")
    deadline: Positive = Field(30.0, description="Seconds that a return may take.")
    wait: Positive = Field(
        2.0, description="Seconds that the next turn waits for a return that is under way, before it goes on without."
    )
    ttl: Positive = Field(
        3600.0, description="Seconds for which the router remembers which prefill node a conversation went back to."
    )
    pressure_interval: Positive = Field(
        2.0, description="Seconds between two looks at each node's `/metrics`, for `return: auto`."
    )
    priority: int | None = Field(
        None,
        description="vLLM's `priority` for returns (higher is later), for prefill nodes with `--scheduling-policy "
        "priority`.",
    )
