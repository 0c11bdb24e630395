"""What is counted on either side, and what it is called on vLLM's `/metrics` page (`vllm:` before it). No vLLM here."""

from collections import Counter
from collections.abc import Mapping

GAUGES: Mapping[str, str] = {
    "kvreturn_pins": "Finished turns whose KV blocks are pinned for the next prefill.",
    "kvreturn_pinned_blocks": "Distinct KV blocks that finished turns keep pinned.",
}
COUNTERS: Mapping[str, str] = {
    "kvreturn_early_releases": "Pins let go before their time, for want of room (retention_budget).",
    "kvreturn_pins_refused": "Finished turns that got no handle, for want of room (retention_budget).",
    "kvreturn_claims": "Pins given to a prefill node that asked for them.",
    "kvreturn_claims_denied": "Prefill nodes that asked for a pin that is not there, was used, or is another.",
    "kvreturn_handles": "Prefill requests that brought a handle.",
    "kvreturn_proofs": "Handles whose digests proved a prefix of the prompt, or all of it.",
    "kvreturn_proven_tokens": "Tokens that handles were proven to hold of the prompt.",
    "kvreturn_reads": "Prefill requests that read from a decode node.",
    "kvreturn_read_tokens": "Tokens that they read.",
}
UNREAD = "kvreturn_unread"
UNREAD_DOC = "Handles of which nothing was read, by reason."
REASONS = (
    *("local_hit", "below_threshold", "not_a_continuation", "expired", "used", "node_gone", "read_failed"),
    *("mac", "scope", "peer", "disabled", "refused"),
)
"""Values of the label `reason`; what is malformed or of another version is `refused`, as is all that is not listed."""


class ReadCounts:
    """What became of the handles that came to a prefill node, since it started.

    Attributes:
        totals: by name of the counter.
        unread: by reason.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()

    def add(self, proven: int, read: int, reason: str | None) -> None:
        """A request that brought a handle is over.

        Args:
            proven: tokens that the handle was proven to hold of its prompt.
            read: tokens that were read.
            reason: why not all of that was, None if there is nothing to say.
        """
        self.totals["kvreturn_handles"] += 1
        self.totals["kvreturn_proofs"] += proven > 0
        self.totals["kvreturn_proven_tokens"] += proven
        self.totals["kvreturn_reads"] += read > 0
        self.totals["kvreturn_read_tokens"] += read
        if reason is not None and not read:
            self.unread[reason if reason in REASONS else "refused"] += 1
