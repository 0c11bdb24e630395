"""Upper bounds."""

from typing import Annotated

from pydantic import Field

from kvreturn.settings.types import Count, Section


class Limits(Section):
    """Upper bounds."""

    request_bytes: Count = Field(32 << 20, description="Largest request body; beyond it the client gets 413.")
    event_bytes: Count = Field(
        4 << 20,
        description="Largest response event that is parsed. A larger one is passed on as it comes, without its handle.",
    )
    response_bytes: Count = Field(16 << 20, description="As `event_bytes`, for a JSON response body.")
    header_bytes: Annotated[int, Field(ge=1024, le=8 << 20)] = Field(
        56 << 10, description="Largest request headers, names and values together; beyond it the client gets 431."
    )
    history: Count = Field(50_000, description="Messages or input items of the longest request; beyond it, 413.")
    live_turns: Count = Field(10_000, description="Turns at a time; beyond it the client gets 503.")
    live_turns_per_tenant: Count = Field(1_000, description="Turns of one tenant at a time; beyond it, 429.")
    sessions_per_tenant: Count = Field(
        10_000,
        description="Turns of one tenant that may wait for their continuation, as far as one router knows; beyond it "
        "that tenant's oldest goes (outcome `over_limit`).",
    )
    min_tokens: Annotated[int, Field(ge=0)] = Field(
        64, description="Handles for fewer tokens are not attached (vLLM's `kv_recompute_threshold`, same default)."
    )
