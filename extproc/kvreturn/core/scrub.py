"""What a client may not send: transfer parameters in any form that vLLM reads, and headers that steer routing."""

from collections.abc import Iterable

from kvreturn.core.capture import HIDDEN
from kvreturn.core.jsontext import JSONTextError, ObjectText, drop_nested

# vLLM copies members of these into `SamplingParams.extra_args`, where its connectors look for `kv_transfer_params`.
_CONTAINERS = ("vllm_xargs", "extra_args", "sampling_params", "extra_body", "metadata")
_CONTAINER_BYTES = 256 * 1024  # of all of these together: parsing them takes time, and nobody needs more
_HINTS = (b"transfer_params", b"\\u")  # a name can be written with escapes

OWN_HEADERS = "x-kvreturn-"
_ROUTING_HEADERS = frozenset(
    {
        "x-prefiller-host-port",  # llm-d's decode sidecar
        "x-prefiller-url",
        "x-data-parallel-host-port",
        "x-gateway-destination-endpoint",  # Gateway API inference extension
        "x-gateway-destination-endpoint-subset",
        "x-session-token",
        "x-data-parallel-rank",  # vLLM
    }
)


def scrub_body(body: ObjectText) -> ObjectText:
    """The body without transfer parameters, however the client wrote them. All else byte for byte.

    Raises:
        JSONTextError: a member that might hold them cannot be read.
    """
    values = [body.text[m.value : m.end] for m in body.members if m.name in _CONTAINERS]
    if sum(map(len, values)) > _CONTAINER_BYTES:
        raise JSONTextError(f"{', '.join(_CONTAINERS)} hold more than {_CONTAINER_BYTES} bytes")
    if any(hint in value for value in values for hint in _HINTS):
        body = ObjectText(body.map_values(_CONTAINERS, lambda raw: drop_nested(raw, HIDDEN)))
    return ObjectText(body.without(HIDDEN)) if any(name in body for name in HIDDEN) else body


def foreign_headers(names: Iterable[str]) -> list[str]:
    """Those of these (lower-case) header names that only the router or another router may set."""
    return sorted({n for n in names if n.startswith(OWN_HEADERS) or n in _ROUTING_HEADERS})


def may_hold_params(body: bytes) -> bool:
    """Whether transfer parameters can be in this text at all. Quick, and never wrong when it says no."""
    # Python's `json`, with which vLLM's server reads bodies, takes UTF-16 and UTF-32 too. They have zero bytes in them.
    return any(hint in body for hint in _HINTS) or b"\0" in body
