"""What D keeps for turns to come: which finished requests hold which blocks, and who may still read them.

Written by the scheduler and by the side channel's thread; no vLLM in here.
"""

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_CLAIM_SECONDS = 30.0  # how long a confirmed pin is kept for its reader
_LAST_SECONDS = 2.0  # a pin this close to its end is not confirmed any more


def ticket(engine_id: str, request_id: str, blocks: Sequence[int], tokens: int, digests: bytes) -> bytes:
    """Stands for one handle's contents: D gives blocks only to who names exactly what it pinned. 16 bytes."""
    text = json.dumps([engine_id, request_id, list(blocks), tokens], separators=(",", ":")).encode()
    return hashlib.sha256(text + digests).digest()[:16]


@dataclass
class _Pin:
    blocks: Sequence[int]
    ticket: bytes
    expires: float
    releasable: bool
    claimed: bool = False


@dataclass
class PinCounts:
    """Counters since the start."""

    early_releases: int = 0
    refused: int = 0
    claims: int = 0
    denied: int = 0


@dataclass
class Orders:
    """What the workers are to do with pins that they watch.

    Attributes:
        release: requests whose blocks may go at once.
        extend: requests to keep until another time, in seconds of the scheduler's clock.
    """

    release: set[str] = field(default_factory=set)
    extend: dict[str, float] = field(default_factory=dict)


class PinTable:
    """Pins of one engine.

    Args:
        budget: blocks that may be pinned at most.
        ttl: seconds for which a pin is kept.
        clock: the scheduler's clock.
    """

    def __init__(self, budget: int, ttl: float, clock: Callable[[], float]) -> None:
        self.budget = budget
        self.counts = PinCounts()
        self._ttl = ttl
        self._clock = clock
        self._lock = threading.Lock()
        self._pins: OrderedDict[str, _Pin] = OrderedDict()  # oldest first
        self._uses: Counter[int] = Counter()  # pins share blocks with each other
        self._orders = Orders()

    @property
    def pins(self) -> int:
        """Number of pins."""
        return len(self._pins)

    @property
    def blocks(self) -> int:
        """Number of distinct blocks that are pinned."""
        return len(self._uses)

    def pin(self, request_id: str, blocks: Sequence[int], mark: bytes, *, releasable: bool) -> bool:
        """Pin the blocks of a finished request, letting go of older pins if there is no room.

        Args:
            request_id: whose blocks.
            blocks: their ids.
            mark: see `ticket`.
            releasable: whether its reader asks before it reads, so that the pin may be let go early.

        Returns:
            False if they cannot be pinned: the turn gets no handle.
        """
        with self._lock:
            need = set(blocks)
            while len(need - self._uses.keys()) + len(self._uses) > self.budget:
                oldest = next((r for r, p in self._pins.items() if p.releasable and not p.claimed), None)
                if oldest is None or len(need) > self.budget:
                    self.counts.refused += 1
                    return False
                self._drop(oldest)
                self._orders.release.add(oldest)
                self.counts.early_releases += 1
            self._pins[request_id] = _Pin(tuple(blocks), mark, self._clock() + self._ttl, releasable)
            self._uses.update(need)
            return True

    def claim(self, request_id: str, mark: bytes) -> str | None:
        """A reader asks for the blocks. Each pin is given once.

        Returns:
            None if they are held for it now, else the reason why not.
        """
        with self._lock:
            pin = self._pins.get(request_id)
            now = self._clock()
            reason = None
            if pin is None or pin.claimed:
                reason = "used"
            elif pin.ticket != mark:
                reason = "mac"
            elif now + _LAST_SECONDS >= pin.expires:
                reason = "expired"
            if reason or pin is None:
                self.counts.denied += 1
                return reason
            self.counts.claims += 1
            pin.claimed = True
            pin.expires = max(pin.expires, now + _CLAIM_SECONDS)
            self._orders.extend[request_id] = pin.expires
            return None

    def release(self, request_id: str, mark: bytes) -> bool:
        """Nobody will read these blocks. Returns whether they were held, and by this ticket."""
        with self._lock:
            pin = self._pins.get(request_id)
            if pin is None or pin.ticket != mark:
                return False
            self._drop(request_id)
            self._orders.release.add(request_id)
            return True

    def freed(self, request_id: str) -> None:
        """The workers let go of these blocks: read, expired, or on our order."""
        with self._lock:
            if request_id in self._pins:
                self._drop(request_id)
            self._orders.release.discard(request_id)
            self._orders.extend.pop(request_id, None)

    def take_orders(self) -> Orders:
        """What has come up for the workers since the last call."""
        with self._lock:
            orders, self._orders = self._orders, Orders()
            return orders

    def _drop(self, request_id: str) -> None:
        pin = self._pins.pop(request_id)
        self._orders.extend.pop(request_id, None)
        for block in set(pin.blocks):
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
