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
"""Key in the namespace under which the name of a turn stands whose answer matters: a secret of router and scripts."""

CALL_KEY = "router"
"""Key in the namespace that names the router that has the turn: its address, as Envoy knows it."""

LANE_KEY = "lane"
"""Key in the namespace that is there if a script may take the answer on."""

EARLY_KEY = "early"
"""Key in the namespace that is there if the router must know an answer's first event before the client does."""

UPSTREAM_KEY = "upstream"
"""Key in the namespace under which Envoy tells which decode node it has chosen, where that was not the named one."""

REQUEST_ID_KEY = "request_id"
"""Key in the namespace for the client's own id of its request."""

SCRIPTS = "2"
"""Version of what scripts and router tell each other."""

REQUEST_PATH = "/kvreturn/request"
PART_PATH = "/kvreturn/part"
HEALTH_PATH = "/kvreturn/health"
"""Where the scripts call the router, and its health there."""

HEAD_HEADER = "x-kvreturn-head"
"""Header of a call: `VERSION KIND HEADERS`; whether the request's body is that of the call (`whole`), there is none
(`none`), or none that the router looks at (`left`); and the request's headers, in base64."""

REPLY_HEADER = "x-kvreturn-reply"
"""Header of all that the router answers to a call: what lacks it is Envoy's own."""

TURN_HEADER = "x-kvreturn-turn"
PART_HEADER = "x-kvreturn-part"
"""Headers of a call: the turn's name, and what the message is (envoy/lua/part.lua)."""

PASSES_HEADER = "x-kvreturn-passes"
"""Response header between filters: the answer needs no router, so ext_proc is left out. No client sees it."""

TO_HEADER = "x-kvreturn-to"
"""gRPC metadata by which Envoy sends an answer to the router that has its turn."""

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
    """The cluster of one router alone: where Envoy logs the ends of its turns."""
    return f"{ROUTER_CLUSTER}@{listen}"


CALLS_CLUSTER = "kvreturn_calls"
"""All addresses at which scripts call routers: by their health Envoy tells whether turns can be served."""


def requests_of(listen: str) -> str:
    """The cluster by which scripts tell one router of requests: none goes to one that drains or is gone."""
    return f"kvreturn_requests@{listen}"


def calls_of(listen: str) -> str:
    """The cluster by which scripts tell one router of its turns' answers, to its last moment."""
    return f"{CALLS_CLUSTER}@{listen}"
