"""Counters of a node, and the picture of it that tests and demos look at."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What one engine has done since it started.

    Attributes:
        requests: generations started.
        prompt_tokens: prompt tokens of all of them.
        computed_tokens: prompt tokens computed here.
        local_tokens: prompt tokens found in the own prefix cache.
        read_tokens: prompt tokens loaded from a peer.
        generated_tokens: tokens generated.
        running: generations being computed now.
        waiting: generations that wait for blocks or for a load now.
        hung_requests: of these, those that wait for a load that nobody will start.
        leaked_blocks: blocks lost for good.
        transfers: completed reads.
        transfer_seconds: time they took.
        transferred_bytes: how much they moved.
        failed_transfers: reads that failed.
        failed_notifications: peers that could not be told to free blocks.
        expired_reads: reads declined because the peer's blocks had expired or nearly so.
        late_notifications: readers that came after their blocks had been given up.
    """

    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    local_tokens: int = 0
    read_tokens: int = 0
    generated_tokens: int = 0
    running: int = 0
    waiting: int = 0
    hung_requests: int = 0
    leaked_blocks: int = 0
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
    """

    engine_alive: bool
    blocks_free: int
    blocks_used: int
    blocks_pinned: int
    pins: int
    leases: int
    expired_holds: int
