"""What a client may not send: transfer parameters in any form that vLLM reads, and headers that steer routing.

And what it may not leave out: whose the request is, for the engines' prefix caches.
"""

import json
from collections.abc import Iterable

from kvreturn.core.address import RANK_HEADER
from kvreturn.core.api.base import API, BadRequestError, load
from kvreturn.core.capture import HIDDEN
from kvreturn.core.fingerprint import Scope
from kvreturn.core.jsontext import JSONTextError, ObjectText, drop_nested

# vLLM copies members of these into `SamplingParams.extra_args`, where its connectors look for `kv_transfer_params`.
_CONTAINERS = ("vllm_xargs", "extra_args", "sampling_params", "extra_body", "metadata")
_CONTAINER_BYTES = 256 * 1024  # of all of these together: parsing them takes time, and nobody needs more
_HINTS = (b"transfer_params", b"\\u")  # a name can be written with escapes

OWN_HEADERS = "x-kvreturn-"
# Where other routers write what they have decided. A node or a sidecar that finds one of these in a client's request
# goes, or sends the prompt, where the client says.
ROUTING_PREFIXES = (
    OWN_HEADERS,
    "x-gateway-destination-endpoint",  # Gateway API inference extension; also -subset, -served, -scores
    "x-dynamo-",  # NVIDIA Dynamo
    "x-smg-",  # SGLang's model gateway
)
ROUTING_HEADERS = frozenset(
    {
        "x-prefiller-host-port",  # llm-d's sidecars
        "x-prefiller-url",
        "x-encoder-hosts-ports",
        "x-data-parallel-host-port",
        "x-kv-cache-source-host-port",
        "x-llm-d-reserved-host-port",
        "x-llm-d-model-name-rewrite",
        "x-gateway-model-name-rewrite",
        "x-session-token",
        RANK_HEADER,
        "x-worker-instance-id",  # Dynamo's older names
        "x-prefill-instance-id",
        "x-dp-rank",
        "x-prefill-dp-rank",
        "x-enable-local-updates",
        "x-sglang-routing-key",
        "target-pod",  # AIBrix
        "target-cluster",
        "routing-strategy",
        "external-filter",
        "x-went-into-req-headers",
    }
)


def scrub_body(body: ObjectText) -> ObjectText:
    """The body without transfer parameters, however the client wrote them. All else byte for byte.

    Raises:
        JSONTextError: a member that might hold them cannot be read.
    """
    body = scrub_nested(body)
    return body.edited(HIDDEN) if any(name in body for name in HIDDEN) else body


def scrub_nested(body: ObjectText) -> ObjectText:
    """The same, but that members of the body itself stay: an orchestrator's are there, and nowhere else.

    Raises:
        JSONTextError: as above.
    """
    values = [body.text[m.value : m.end] for m in body.members if m.name in _CONTAINERS]
    if sum(map(len, values)) > _CONTAINER_BYTES:
        raise JSONTextError(f"{', '.join(_CONTAINERS)} hold more than {_CONTAINER_BYTES} bytes")
    if any(hint in value for value in values for hint in _HINTS):
        return ObjectText(body.map_values(_CONTAINERS, lambda raw: drop_nested(raw, HIDDEN)))
    return body


def stamped(body: ObjectText, api: API, scope: Scope | None) -> ObjectText:
    """A turn's body without what is not for nodes, and with its tenant's `cache_salt`.

    Args:
        body: of the request.
        api: that it is for.
        scope: whose request it is; None where tenants share the engines' prefix caches.

    Raises:
        BadRequestError: the client's own `cache_salt` is none.
    """
    drop = [name for name in api.ours if name in body]
    put = {"cache_salt": json.dumps(scope.salt(_own_salt(body))).encode()} if scope else {}
    return body.edited(drop, put) if drop or put else body


def _own_salt(body: ObjectText) -> str:
    own = load(body, "cache_salt")
    # vLLM refuses this, but would not see it behind ours.
    if own is not None and (not isinstance(own, str) or not own):
        raise BadRequestError("`cache_salt` must be a text that is not empty")
    return own or ""


def foreign_headers(names: Iterable[str]) -> list[str]:
    """Those of these (lower-case) header names that only the router or another router may set."""
    return sorted({n for n in names if n.startswith(ROUTING_PREFIXES) or n in ROUTING_HEADERS})


def may_hold_params(body: bytes) -> bool:
    """Whether transfer parameters can be in this text at all. Quick, and never wrong when it says no."""
    # Python's `json`, with which vLLM's server reads bodies, takes UTF-16 and UTF-32 too. They have zero bytes in them.
    return any(hint in body for hint in _HINTS) or b"\0" in body
