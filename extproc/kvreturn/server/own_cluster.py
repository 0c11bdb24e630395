"""By which cluster Envoy calls this router and no other: only that one can be told of its turns."""

from kvreturn.config import Settings
from kvreturn.core.address import split_address
from kvreturn.envoy import names
from kvreturn.envoy.ports import is_ip, is_own, is_unspecified, may_be_several

NO_CLUSTER = (
    "envoy.lane: fast has no effect on this router: its `listen`, {listen}, is not among envoy.routers, so that Envoy "
    "could not tell it from the others. Make it the same there and here, or set envoy.lane: portable"
)
"""What to do about it."""


def own_cluster(settings: Settings) -> str | None:
    """The cluster by which Envoy calls this router and no other; None if there is no fast lane here."""
    if settings.envoy.lane != "fast":
        return None
    known = settings.envoy.routers or [settings.listen]
    found = [settings.listen] if settings.listen in known else _of_this_machine(known, settings.listen)
    if len(found) == 1:
        return names.one_router(found[0])
    return None


def _of_this_machine(known: list[str], listen: str) -> list[str]:
    """Those of `envoy.routers` that a router which listens on all addresses may be; a name may stand for several."""
    if not may_be_several(known):
        return known
    if listen.startswith("unix:") or not is_unspecified(listen):
        return []
    there = [(address, *split_address(address)) for address in known if not address.startswith("unix:")]
    port = split_address(listen)[1]
    return [address for address, host, its in there if its == port and is_ip(host) and is_own(host)]
