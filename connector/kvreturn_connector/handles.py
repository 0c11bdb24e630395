"""Handles as they arrive: checked before anything is opened, allocated or read. No vLLM in here."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvreturn_connector import wire
from kvreturn_connector.pins import ticket
from kvreturn_connector.settings import Settings, peer_allowed

REMOTE = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_PARALLEL = ("tp_size", "dcp_size", "pp_size")
_TEXT = 512  # longest engine id, request id or host
_PORTS = range(1, 65536)


@dataclass(frozen=True)
class Offer:
    """A handle that may be used, and as far as it is proven.

    Attributes:
        params: D's object.
        blocks: block ids of its one KV cache group.
        held: tokens that D holds.
        proven: how many of them are the prefix of our prompt.
        block_size: tokens per block.
        ticket: what D is asked with.
    """

    params: Mapping[str, Any]
    blocks: Sequence[int]
    held: int
    proven: int
    block_size: int
    ticket: bytes

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of D's side channel."""
        return self.params["remote_host"], self.params["remote_port"]

    @property
    def request_id(self) -> str:
        """D's request."""
        return str(self.params["remote_request_id"])

    def remote_fields(self) -> dict[str, Any]:
        """The members that vLLM reads with: the blocks of the proven prefix, and the count lowered with them."""
        fields = {key: self.params[key] for key in (*REMOTE, *_PARALLEL) if key in self.params}
        fields["remote_block_ids"] = [list(self.blocks[: -(-self.proven // self.block_size)])]
        fields["remote_num_tokens"] = self.proven
        # D holds the blocks for us from the moment it confirmed them; its own deadline no longer counts.
        fields["remote_blocks_expiry_time"] = None
        return fields


def to_free(params: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The handle that a request wants to be freed; None if it is another request."""
    member = params.get(wire.MEMBER)
    return open_offer(params) if isinstance(member, Mapping) and member.get("free") is True else None


def open_offer(params: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The handle in a P request's parameters: sealed inside `kvreturn`, or in vLLM's own form; None without one."""
    member = params.get(wire.MEMBER)
    if isinstance(member, Mapping) and isinstance(member.get("handle"), Mapping):
        handle: Mapping[str, Any] = member["handle"]
        return handle
    return params if params.get("remote_block_ids") else None


def check_peer(params: Mapping[str, Any], settings: Settings) -> None:
    """Check what a connection would be opened with.

    Raises:
        wire.WireError: `malformed`, or `peer` if we may not connect there.
    """
    for key in ("remote_engine_id", "remote_request_id", "remote_host"):
        value = params.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= _TEXT:
            raise wire.WireError("malformed", f"{key} is no text")
    if type(params.get("remote_port")) is not int or params["remote_port"] not in _PORTS:
        raise wire.WireError("malformed", "remote_port is no port")
    for key in _PARALLEL:
        if type(params.get(key, 1)) is not int or not 0 < params.get(key, 1) < 2**16:
            raise wire.WireError("malformed", f"{key} is no count")
    if params.get("transfer_mode", "pull") != "pull":
        raise wire.WireError("malformed", "transfer_mode is not pull")
    if not peer_allowed(params["remote_host"], settings.allowed_peers):
        raise wire.WireError("peer", "remote_host is not in allowed_peers")


def check_blocks(params: Mapping[str, Any]) -> list[list[int]]:
    """The block ids, by KV cache group.

    Raises:
        wire.WireError: `malformed`.
    """
    groups = params.get("remote_block_ids")
    if not isinstance(groups, list | tuple) or not groups:
        raise wire.WireError("malformed", "remote_block_ids is no list of groups")
    for group in groups:
        if not isinstance(group, list | tuple) or not all(type(b) is int and 0 <= b < 2**31 for b in group):
            raise wire.WireError("malformed", "remote_block_ids holds something else than block ids")
    return [list(group) for group in groups]


def check_handle(params: Mapping[str, Any], settings: Settings) -> tuple[Offer, wire.Proof]:
    """Check all of D's object that can be checked without a prompt.

    Returns:
        The handle, none of it proven yet: D can be asked about it.

    Raises:
        wire.WireError: the handle cannot be used for anything; `reason` says why.
    """
    check_peer(params, settings)
    groups = check_blocks(params)
    proof = wire.load_proof(params.get(wire.MEMBER))
    wire.check_mac(settings.secret, params, proof)
    held = params.get("remote_num_tokens")
    if type(held) is not int or not 0 < held < 2**31:
        raise wire.WireError("malformed", "remote_num_tokens is no count")
    if len(groups) != 1:
        raise wire.WireError("groups", "several KV cache groups cannot be proven")
    if not len(groups[0]) == -(-held // proof.block_size) == proof.blocks:
        raise wire.WireError("malformed", f"{len(groups[0])} blocks and {proof.blocks} digests for {held} tokens")
    mark = ticket(params["remote_engine_id"], params["remote_request_id"], groups[0], held, proof.digests)
    return Offer(params, groups[0], held, 0, proof.block_size, mark), proof


def prove(
    offer: Offer,
    proof: wire.Proof,
    tokens: Sequence[int],
    block_size: int,
    seed: bytes,
    extra: Mapping[int, bytes] | None,
) -> Offer:
    """Compare a handle with our own prompt.

    Args:
        offer: from `check_handle`.
        proof: as `offer`.
        tokens: our prompt.
        block_size: our tokens per block.
        seed: our chain's seed.
        extra: by block, what else our prompt's blocks depend on.

    Returns:
        The offer with its proven prefix.

    Raises:
        wire.WireError: the two cannot be compared; `reason` says why.
    """
    if proof.block_size != block_size:
        raise wire.WireError("block_size", f"D has blocks of {proof.block_size} tokens, we have {block_size}")
    return replace(offer, proven=wire.proven_tokens(proof, offer.held, tokens, seed, extra))


class Once:
    """Tells what comes for the first time.

    Args:
        limit: how many of the latest it remembers.
    """

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def first(self, key: Hashable) -> bool:
        """Whether `key` was not here before."""
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)
        return True
