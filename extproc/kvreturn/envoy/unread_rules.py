"""The lint's rules against what reaches nodes or clients without the router."""

from collections.abc import Iterator

from kvreturn.envoy import names
from kvreturn.envoy.reading import FULL_DUPLEX
from kvreturn.envoy.subject import Finding, Subject

_EFFECT = "a client's own kv_transfer_params can reach a node"


def _unread_requests(s: Subject) -> Iterator[Finding]:
    effect = "an answer can reach a client with its handle" if s.called else _EFFECT
    if "grpc_service" not in s.config:
        yield s.where, f"http_service sends no bodies: {effect}; use grpc_service"
    for key in ("failure_mode_allow", "observability_mode", "disable_immediate_response"):
        if s.config.get(key):
            yield s.where, f"{key}: {effect} whenever the router fails or refuses; remove it"
    for where, override in s.overrides:
        if override.get("failure_mode_allow"):
            yield where, f"failure_mode_allow: {effect} whenever the router fails; remove it"
    if not s.called:
        yield from _unsent(s)


def _unsent(s: Subject) -> Iterator[Finding]:
    """What the filter must send where no script of ours tells of requests in its place."""
    if "xds_matcher" in s.entry:
        what = (
            f"a matcher leaves the filter out, and no script of ours takes requests in its place: {_EFFECT}; take it "
            "out by routes (ExtProcPerRoute, disabled), or use the scripts too (docs/lanes.md)"
        )
        yield s.where, what
    for where, m in s.modes:
        if m.request_header == "SKIP":
            yield where, f"request_header_mode SKIP: {_EFFECT}; use SEND"
        if m.request_body not in {"BUFFERED", "STREAMED", FULL_DUPLEX}:
            yield where, f"request_body_mode {m.request_body}: {_EFFECT}; use BUFFERED"


def _other_way_in(s: Subject) -> Iterator[Finding]:
    for chain in s.everything:
        if chain is not s.chain and chain.local_only:
            continue  # the router's own way to the nodes
        for route in chain.routes:
            unread = not s.reads(route, chain)
            unknown = route.action is not None and not route.clusters
            if unread and not route.without_body and (route.clusters & s.guarded or unknown):
                what = (
                    "requests with a body reach the decode nodes without the router; restrict the route to GET, HEAD "
                    "and OPTIONS, or enable the filter, or the script that takes requests in its place"
                )
                yield route.where, what


def _stored_responses(s: Subject) -> Iterator[Finding]:
    seen: set[int] = set()  # virtual hosts in which an earlier route has taken them
    for route in s.chain.routes:
        if not route.takes(names.STORED_RESPONSES) or id(route.host) in seen:
            continue
        if s.reads(route, bodiless=True):
            if "headers" not in route.route["match"]:
                seen.add(id(route.host))
        elif route.clusters & s.guarded and s.node_key(route) == names.DECODE_NODE_KEY:
            what = (
                f"GET {names.STORED_RESPONSES}... reaches the decode nodes without the router, and a stored response "
                "has its handle in it; put a route with that prefix before this one, with the filter, and not of the "
                "name `plain`"
            )
            yield route.where, what


RULES = {
    "31-unread-requests": _unread_requests,
    "31-other-way-in": _other_way_in,
    "p-stored-responses": _stored_responses,
}
