"""Counters of a node, and the picture of it that tests and demos look at."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What one engine has done since it started.

    Attributes:
        requests: generations started.
        queried_tokens: prompt tokens that were looked up in the prefix cache.
        prompt_tokens: prompt tokens of the generations that have started to answer.
        computed_tokens: prompt tokens computed here.
        recomputed_tokens: of these, those that vLLM does not count as computed: the last one of a prompt that was
            loaded whole, and all that was computed again after a preemption.
        local_tokens: prompt tokens found in the own prefix cache.
        read_tokens: prompt tokens loaded from a peer.
        generated_tokens: tokens generated.
        running: generations being computed now.
        preemptions: generations that had to give their blocks to others.
        waiting: generations that wait for blocks or for a load now.
        loading: of these, those whose blocks are being loaded.
        hung_requests: of these, those that wait for a load that nobody will start.
        leaked_blocks: blocks lost for good to such requests.
        refused_pins: finished turns that got no handle, for want of room (kvreturn's connector).
        transfers: completed reads.
        transfer_seconds: time they took.
        transferred_bytes: how much they moved.
        failed_transfers: reads that failed.
        failed_notifications: peers that could not be told to free blocks.
        expired_reads: reads declined because the peer's blocks had expired or nearly so.
        late_notifications: readers that came after their blocks had been given up.
    """

    requests: int = 0
    queried_tokens: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    local_tokens: int = 0
    read_tokens: int = 0
    generated_tokens: int = 0
    running: int = 0
    preemptions: int = 0
    waiting: int = 0
    loading: int = 0
    hung_requests: int = 0
    leaked_blocks: int = 0
    refused_pins: int = 0
    transfers: int = 0
    transfer_seconds: float = 0.0
    transferred_bytes: int = 0
    failed_transfers: int = 0
    failed_notifications: int = 0
    expired_reads: int = 0
    late_notifications: int = 0


@dataclass(slots=True, kw_only=True)
class NodeStats(Counters):
    """A node at one moment: its counters since the last restart, and its blocks.

    Attributes:
        engine_alive: False once the engine has died.
        blocks_free: blocks that nobody uses.
        blocks_used: blocks in use or kept.
        blocks_pinned: of these, kept for a peer.
        pins: D's finished requests that wait to be read back.
        leases: P's finished requests that wait for D.
        expired_holds: pins and leases that nobody came for in time.
        early_releases: pins let go before their time, for want of room (kvreturn's connector).
    """

    engine_alive: bool
    blocks_free: int
    blocks_used: int
    blocks_pinned: int
    pins: int
    leases: int
    expired_holds: int
    early_releases: int


@dataclass(slots=True)
class BlockUse:
    """All blocks of a node but the null block, each counted once: under the first that holds of the last four.

    Attributes:
        free: free, and nothing is known of what they hold.
        cached: free, and known to the prefix cache.
        pinned: kept by D for the next turn.
        leased: kept by P for D.
        running: of requests that are not over, and of loads that outlive their request.
        leaked: nobody will ever free them.
    """

    free: int = 0
    cached: int = 0
    pinned: int = 0
    leased: int = 0
    running: int = 0
    leaked: int = 0
