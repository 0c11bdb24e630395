"""Blocks kept after their request has ended, until somebody has read them or their time is over."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvreturn.sim.clock import Clock

Kind = Literal["lease", "pin"]


@dataclass(slots=True)
class _Hold:
    kind: Kind
    blocks: list[int]
    deadline: float
    releasable: bool
    timer: asyncio.Task[None] | None = None


class Holds:
    """All that a node keeps: P's `lease`s for D, and D's `pin`s for the next turn.

    Args:
        clock: the node's.
        release: gives blocks back to the pool.
    """

    def __init__(self, clock: Clock, release: Callable[[Sequence[int]], None]) -> None:
        self._clock = clock
        self._release = release
        self._holds: dict[str, _Hold] = {}
        self.expired = 0
        self.released_early = 0

    def count(self, kind: Kind) -> int:
        """Number of holds of a kind."""
        return sum(hold.kind == kind for hold in self._holds.values())

    def held(self, *kinds: Kind) -> set[int]:
        """The blocks kept by holds of these kinds."""
        return {block for hold in self._holds.values() if hold.kind in kinds for block in hold.blocks}

    def __contains__(self, request_id: str) -> bool:
        """Whether blocks are kept for that request."""
        self.reap()
        return request_id in self._holds

    def add(self, request_id: str, kind: Kind, blocks: list[int], seconds: float, *, releasable: bool = False) -> None:
        """Keep blocks of a request for so long; `releasable`: `make_room` may let go of them before."""
        hold = self._holds[request_id] = _Hold(kind, blocks, self._clock.now() + seconds, releasable)
        # Requests that wait for blocks need them at the deadline, even if nothing else happens on the node.
        hold.timer = asyncio.create_task(self._expire(hold))

    def free(self, request_id: str) -> bool:
        """Stop keeping a request's blocks.

        Returns:
            False if nothing was kept for it.
        """
        self.reap()
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return False
        if hold.timer is not None:
            hold.timer.cancel()
        self._release(hold.blocks)
        return True

    def make_room(self, blocks: Sequence[int], budget: int) -> bool:
        """Let go of the oldest releasable pins until all pins together with `blocks` keep at most `budget` blocks.

        These are the rules of the connector's pin table (kvreturn_connector/pins.py). Pins share blocks.

        Returns:
            False if there cannot be room.
        """
        self.reap()
        need = set(blocks)
        while len(need | self.held("pin")) > budget:
            oldest = next((request_id for request_id, hold in self._holds.items() if hold.releasable), None)
            if oldest is None or len(need) > budget:
                return False
            self.free(oldest)
            self.released_early += 1
        return True

    def renew(self, request_id: str, seconds: float) -> bool:
        """Keep blocks at least `seconds` longer from now on. Returns whether there are any."""
        hold = self._holds.get(request_id)
        if hold is None:
            return False
        hold.deadline = max(hold.deadline, self._clock.now() + seconds)
        return True

    def reap(self) -> None:
        """Free what is overdue."""
        now = self._clock.now()
        for request_id in [key for key, hold in self._holds.items() if hold.deadline <= now]:
            self._release(self._holds.pop(request_id).blocks)
            self.expired += 1

    async def _expire(self, hold: _Hold) -> None:
        while (left := hold.deadline - self._clock.now()) > 0:
            await self._clock.sleep(left)
        self.reap()

    def stop(self) -> None:
        """Cancel all timers."""
        for hold in self._holds.values():
            if hold.timer is not None:
                hold.timer.cancel()
