"""How many turns may run at a time, of one tenant and of all."""

from collections import Counter

from kvreturn.core.api import API
from kvreturn.core.ports import Refuse
from kvreturn.settings.limits import Limits

_LATER = {"retry-after": "1"}


class Admission:
    """Counts live turns.

    Args:
        limits: the settings' upper bounds.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tenants: Counter[bytes] = Counter()
        self.live = 0

    def apply(self, limits: Limits) -> None:
        """Turns that come from now on are counted against these bounds."""
        self._limits = limits

    def enter(self, tenant: bytes, api: API) -> Refuse | None:
        """Let a turn begin, to be followed by `leave`; or its refusal, and nothing is to follow."""
        limits = self._limits
        if self._tenants[tenant] >= limits.live_turns_per_tenant:
            text = f"kvreturn: {limits.live_turns_per_tenant} requests of yours are being processed; try again later"
            return Refuse(429, api.error(text, "TooManyRequests", 429), headers=_LATER, why="tenant_turns")
        if self.live >= limits.live_turns:
            text = f"kvreturn: {limits.live_turns} requests are being processed; try again later"
            return Refuse(503, api.error(text, "ServiceUnavailable", 503), headers=_LATER, why="turns")
        self._tenants[tenant] += 1
        self.live += 1
        return None

    def leave(self, tenant: bytes) -> None:
        """A turn that had entered is over."""
        self.live -= 1
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
