"""What became of reuse in a turn: one word, the same in metrics, traces, logs and the admin view."""

from enum import StrEnum


class Outcome(StrEnum):
    """Every turn ends in exactly one of these."""

    HIT = "hit"
    """P read back all that D holds of this conversation, or proved it and had part of it already; or it had all of it,
    after an eager return."""
    PARTIAL_HIT = "partial_hit"
    """P read back a prefix; behind it the prompt is another one than D's (dropped reasoning, an edit)."""
    FIRST_TURN = "first_turn"
    """The request holds no earlier answer, and nothing is known of it."""
    NO_HANDLE_FROM_DECODE = "no_handle_from_decode"
    """The turn before ended without a handle: a stop string, a stock stream, `bidirectional_kv_xfer` off on D."""
    EXPIRED = "expired"
    """The handle was there, but older than its TTL."""
    NOT_A_CONTINUATION = "not_a_continuation"
    """No stored turn is a prefix of this request, or P found that not even the first block is the same."""
    UNPROVEN = "unproven"
    """A handle was found, but nothing proves that it fits: no digests, a stock P, another format, block size or key."""
    ALREADY_TAKEN = "already_taken"
    """Another request took the handle before: a retry, a branch, concurrent turns."""
    BELOW_THRESHOLD = "below_threshold"
    """Too few tokens to be worth a read."""
    LOCAL_HIT = "local_hit"
    """P had everything in its own prefix cache."""
    OVER_LIMIT = "over_limit"
    """The tenant left more turns than `limits.sessions_per_tenant`; this was the oldest of them."""
    STORE_UNAVAILABLE = "store_unavailable"
    """The session store failed, or did not answer within its deadline."""
    NODE_GONE = "node_gone"
    """The decode node left the pool, restarted or cannot be reached by P."""
    BREAKER_OPEN = "breaker_open"
    """Reads from this decode engine failed too often lately."""
    MULTIPLE_CHOICES = "multiple_choices"
    """The turn before had several choices or prompts, whose handle may belong to any of them."""
    DISABLED = "disabled"
    """`proof: off` for this model."""
    FOREIGN_HANDLE = "foreign_handle"
    """The orchestrator's prefill request carries a handle of its own (docs/roles.md); ours stays where it is."""
    DECODE_ALONE = "decode_alone"
    """Only D can run this request; the detail says why: `previous_response_id`, `background`, `several_prompts`, ..."""
    READ_FAILED = "read_failed"
    """P failed the request that carried the handle; the turn was prefilled cold."""
    PREFILL_FAILED = "prefill_failed"
    """No P answered; by policy, D did the turn alone or the client got an error."""
    RETURNED = "returned"
    """The turn went to the P that had read everything back before; that P does not tell how much it still had."""
    EVICTED = "evicted"
    """As `returned`, but P no longer had it: its prefix cache is too small for what goes back to it."""
    RETURN_FAILED = "return_failed"
    """What was on its way back to P had not arrived in time, or never did; P computed instead."""
    SLOWER = "slower"
    """Reading from this D took longer lately than computing would."""
    REJECTED = "rejected"
    """The request was refused: by the router, or by P with a 4xx that went to the client."""
    CANCELLED = "cancelled"
    """The client left before the prefill leg was done."""


REUSED = frozenset({Outcome.HIT, Outcome.PARTIAL_HIT, Outcome.LOCAL_HIT, Outcome.RETURNED})
"""Outcomes of turns for which P had, or read, what an earlier turn had computed."""
FRESH = frozenset(
    {
        *(Outcome.FIRST_TURN, Outcome.BELOW_THRESHOLD, Outcome.DECODE_ALONE, Outcome.DISABLED),
        *(Outcome.REJECTED, Outcome.CANCELLED),
    }
)
"""Outcomes of turns for which there was nothing, or nothing worth it, to read back. All others are follow-up turns."""
