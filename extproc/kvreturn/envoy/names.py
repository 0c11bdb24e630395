"""Names that the router and Envoy's configuration must agree on. Cheap to import: the server needs them too."""

from typing import Final

METADATA_NAMESPACE = "kvreturn"
"""Dynamic metadata namespace; Envoy takes no other from the router."""

DECODE_NODE_KEY = "decode_node"
"""Key in the namespace by which the router names the decode node, `ip:port` as Envoy knows it."""

PREFILL_NODE_KEY = "prefill_node"
"""Key in the namespace by which the prefill listener names the prefill node."""

NODE_HEADER = "x-kvreturn-node"
"""Request header by which the router names the prefill node, `ip:port` as Envoy knows it."""

ONLY_KEY = "only"
"""Key in the namespace that is there if no other node than the named one will do."""

ONLY_HEADER = "x-kvreturn-only"
"""Request header by which the router says so."""

TURN_KEY = "turn"
"""Key in the namespace under which a turn's name stands that may go by the fast lane: a secret of router and script."""

CALL_KEY = "router"
"""Key in the namespace that names the cluster of the router that has the turn."""

EARLY_KEY = "early"
"""Key in the namespace that is there if the router must know an answer's first event before the client does."""

LANE_KEY = "lane"
"""Key in the namespace by which the script says that it has taken an answer on; its value is the turn's name."""

FAST_SERVICE = "kvreturn.FastLane"
"""The gRPC service of the script's calls."""

TURN_HEADER = "x-kvreturn-turn"
PART_HEADER = "x-kvreturn-part"
"""gRPC metadata of the script's calls: the turn's name, and what the message is (envoy/lua/part.lua)."""

UPSTREAM_HEADER = "x-kvreturn-upstream"
"""Response header by which the prefill listener tells the router the `ip:port` of the node that answered."""

HEADER_PREFIX = "x-kvreturn-"
"""Prefix of our own headers; no client may send one."""

ROLE_HEADER = "x-kvreturn-role"
"""gRPC metadata by which an ext_proc filter or a route says which role the router has there; gateway if it does not."""

GATEWAY: Final = "gateway"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
"""The roles."""

UPSTREAM_ADDRESS = "upstream.address"
"""Attribute that comes with the response headers: `ip:port` of the node that Envoy chose."""

EXT_PROC_FILTER = "envoy.filters.http.ext_proc"
"""The filter's name, and the key under which its attributes arrive."""

DECODE_CLUSTER = "decode"
PREFILL_CLUSTER = "prefill"
ROUTER_CLUSTER = "kvreturn_router"

STORED_RESPONSES = "/v1/responses/"
"""Paths below this are about responses that a node keeps, and these have handles in them."""

UNTAKEN = ("connect-failure", "refused-stream", "reset-before-request")
"""Envoy's conditions for a retry under which no server has seen anything of the request."""

READY = "/kvreturn/ready"
"""Path by which load balancers ask Envoy whether turns can be served. No path of vLLM's begins so."""


def one_router(listen: str) -> str:
    """The cluster of one router alone: where a turn is that the fast lane tells of."""
    return f"{ROUTER_CLUSTER}@{listen}"
