"""What kvreturn's connector looks at in `kv_transfer_params` before it acts on them."""

from collections.abc import Mapping
from typing import Any

from kvreturn.core import wire

_PARALLEL = ("tp_size", "dcp_size", "pp_size")
_REQUIRED = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "remote_num_tokens": int,
    "remote_block_ids": list,
}


def says(params: Mapping[str, Any], key: str, *, value: bool) -> bool:
    """Whether the router says so in the `kvreturn` member."""
    member = params.get(wire.MEMBER)
    return isinstance(member, Mapping) and member.get(key) is value


def lease_end(params: Mapping[str, Any]) -> float | None:
    """When P's lease ends, by P's clock; None if P does not say."""
    member = params.get(wire.MEMBER)
    return wire.seconds(member.get("expires")) if isinstance(member, Mapping) else None


def well_formed(handle: Mapping[str, Any]) -> bool:
    """Whether a handle has all that a peer is found and read with, of the right types."""
    if any(type(handle.get(key)) is not kind for key, kind in _REQUIRED.items()):
        return False
    if any(type(handle.get(key, 1)) is not int or handle.get(key, 1) < 1 for key in _PARALLEL):
        return False
    groups = handle["remote_block_ids"]
    return len(groups) > 0 and all(
        isinstance(group, list) and len(group) > 0 and all(type(block) is int and block > 0 for block in group)
        for group in groups
    )
