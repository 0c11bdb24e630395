"""Turns that `auto` left on D: what goes back after all once D runs out of blocks.

A calm D keeps a lazy turn's blocks for minutes, and many of them for conversations that are over. When D fills up,
new turns return at once, but these stay where they are until their TTL, or until the connector's retention budget is
used up, and there is so much less room for turns that run.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvreturn.core.ports import Record
from kvreturn.core.returning import Job

# A D of 131,000 tokens (8,192 blocks of 16) keeps half of it for such turns. Token ids take some 6 bytes each.
_TOKENS, _TURNS = 8_000_000, 4_096


@dataclass(frozen=True, slots=True)
class Return:
    """A turn whose KV may go back at once, or later.

    Attributes:
        ticket: of its record.
        job: what to send.
        record: the record, with the handle.
        credentials: headers of the turn's request that the node may want.
        watched: whether what becomes of it tells of other turns that end so.
        until: when the record ends, in monotonic seconds.
    """

    ticket: bytes
    job: Job
    record: Record
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    watched: bool = True
    until: float = math.inf


class LeftTurns:
    """The latest of them, of all decode nodes together."""

    def __init__(self) -> None:
        self._turns: OrderedDict[bytes, Return] = OrderedDict()
        self._tokens = 0

    def add(self, left: Return) -> None:
        """A turn stays lazy."""
        self._turns[left.ticket] = left
        self._tokens += left.job.handle.tokens
        while self._tokens > _TOKENS or len(self._turns) > _TURNS:
            self.drop(next(iter(self._turns)))

    def drop(self, ticket: bytes) -> None:
        """Somebody came for it, or it goes back; without effect for others."""
        left = self._turns.pop(ticket, None)
        if left:
            self._tokens -= left.job.handle.tokens

    def oldest(self, decode_node: str, now: float) -> Return | None:
        """The one that has been on this node for longest, of those that D still has."""
        for left in list(self._turns.values()):
            if left.until <= now:
                self.drop(left.ticket)
            elif left.job.decode_node == decode_node:
                return left
        return None
