"""What each tenant keeps in a store: beyond its share its own oldest record goes, and nobody else's."""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice


@dataclass(slots=True)
class _Share:
    ends: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # by ticket, oldest first
    soonest: list[tuple[float, bytes]] = field(default_factory=list)  # heap; of some that have left or go on, too


class Quota:
    """Counts records by tenant.

    Args:
        share: how many records a tenant may have.
        clock: monotonic seconds.
    """

    def __init__(self, share: int, clock: Callable[[], float]) -> None:
        self._share = share
        self._clock = clock
        self._shares: OrderedDict[bytes, _Share] = OrderedDict()  # the one that put least lately first
        self._whose: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        """Number of records that are counted."""
        return len(self._whose)

    def apply(self, share: int) -> None:
        """A tenant may have so many from now on. What it has too many goes when it puts the next one."""
        self._share = share

    def put(self, tenant: bytes, ticket: bytes, ttl: float) -> list[bytes]:
        """A record was put.

        Args:
            tenant: whose it is.
            ticket: the store's name for it.
            ttl: seconds until it goes by itself.

        Returns:
            Tickets of the tenant's records that are to go now.
        """
        share = self._shares.setdefault(tenant, _Share())
        self._shares.move_to_end(tenant)
        self._whose[ticket] = tenant
        self._until(share, ticket, ttl)
        self._sweep(tenant)
        if self._shares:
            self._sweep(
                next(iter(self._shares))
            )  # in time it is each tenant's turn, those who never come back included
        over = list(islice(share.ends, max(len(share.ends) - self._share, 0)))
        for ticket_over in over:
            self.gone(ticket_over)
        return over

    def renewed(self, ticket: bytes, ttl: float) -> None:
        """A record was replaced by one that lives so long from now."""
        tenant = self._whose.get(ticket)
        if tenant is not None:
            self._until(self._shares[tenant], ticket, ttl)

    def gone(self, ticket: bytes) -> None:
        """A record is no longer there."""
        tenant = self._whose.pop(ticket, None)
        if tenant is not None:
            del self._shares[tenant].ends[ticket]

    def _until(self, share: _Share, ticket: bytes, ttl: float) -> None:
        end = self._clock() + ttl
        share.ends[ticket] = end
        heapq.heappush(share.soonest, (end, ticket))

    def _sweep(self, tenant: bytes) -> None:
        share, now = self._shares[tenant], self._clock()
        while share.soonest and share.soonest[0][0] <= now:
            end, ticket = heapq.heappop(share.soonest)
            if share.ends.get(ticket) == end:
                self.gone(ticket)
        if not share.ends:
            del self._shares[tenant]
