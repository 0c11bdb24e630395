"""D's handle: reading it, and the forms in which the prefill leg carries `kv_transfer_params`."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvreturn.core import wire
from kvreturn.core.address import is_local
from kvreturn.core.jsontext import JSONTextError, ObjectText, loads

PARAMS = "kv_transfer_params"

# What P needs so that it keeps its blocks for D (protocol.md, "One turn, on the wire", 1).
COLD = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
_DIRECTIONS = {
    prefill: {
        "do_remote_decode": b"false" if prefill else b"true",
        "do_remote_prefill": b"true" if prefill else b"false",
    }
    for prefill in (False, True)
}
# vLLM reads from a peer only if all of these are there (NixlPullConnectorScheduler, vLLM 0.32.0).
_REQUIRED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class HandleError(ValueError):
    """A `kv_transfer_params` object from D that is no usable handle."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A usable handle.

    Attributes:
        raw: D's object, byte for byte but for `remote_host`.
        tokens: how many tokens of KV D holds (`remote_num_tokens`).
        engine: D's `remote_engine_id`.
        groups: number of KV cache groups.
        proof: what our connector on D added, None if it is missing or unusable.
    """

    raw: bytes
    tokens: int
    engine: str
    groups: int
    proof: wire.Proof | None


def read_handle(raw: bytes, answered_by: str | None = None) -> Handle:
    """Read D's object.

    Args:
        raw: the JSON text of `kv_transfer_params`.
        answered_by: address of the node that answered. It replaces a `remote_host` that names no machine to anybody
            else: vLLM's default for it is `localhost`. Nothing else is ever rewritten.

    Raises:
        HandleError: nothing that P could read with.
    """
    try:
        text = ObjectText(raw)
        params = loads(raw)
    except JSONTextError as e:
        raise HandleError(str(e)) from None
    missing = [k for k in _REQUIRED if params.get(k) in (None, "")]
    if missing:
        raise HandleError(f"without {', '.join(missing)}")
    groups, tokens = params.get("remote_block_ids"), params.get("remote_num_tokens")
    if not (isinstance(groups, list) and any(isinstance(g, list) and g for g in groups)):
        raise HandleError("without blocks")
    if type(tokens) is not int or tokens <= 0:
        raise HandleError("without remote_num_tokens")
    if answered_by and isinstance(params["remote_host"], str) and is_local(params["remote_host"]):
        raw = text.edit(put={"remote_host": json.dumps(answered_by).encode()})
    try:
        proof = wire.load_proof(params.get(wire.MEMBER))
    except wire.WireError:
        proof = None
    return Handle(raw, tokens, str(params["remote_engine_id"]), len(groups), proof)


def cold(*, ids: bool) -> bytes:
    """Parameters for a prompt that P computes.

    Args:
        ids: whether our connector on P is to tell the prompt's token ids.
    """
    return b'%s,"%s":{"v":%d,"ids":true}}' % (COLD[:-1], wire.MEMBER.encode(), wire.VERSION) if ids else COLD


def sealed(handle: Handle, *, keep: bool = True, free: bool = False, ids: bool = False) -> bytes:
    """Parameters that are cold to a stock P and carry the whole handle to a P with our connector.

    So nothing depends on knowing what runs on P: only who can prove reads (docs/handle-format.md).

    Args:
        handle: D's.
        keep: whether P is to keep its blocks for a D.
        free: whether P is to have D free the blocks, and to read nothing.
        ids: as for `cold`.
    """
    words = b"".join([b'"keep":false,' * (not keep), b'"free":true,' * free, b'"ids":true,' * ids])
    member = b'{"v":%d,%s"handle":%s}' % (wire.VERSION, words, handle.raw)
    return b'%s,"%s":%s}' % (COLD[:-1], wire.MEMBER.encode(), member)


def direct(handle: Handle) -> bytes:
    """The published form: D's object whole, with the direction flags for P."""
    return ObjectText(handle.raw).edit(put=_DIRECTIONS[False])


def published(handle: Handle, *, prefill: bool) -> bytes:
    """D's object without our member.

    Args:
        handle: D's.
        prefill: the direction: whether P loads as a D would (`do_remote_prefill`), or reads back and then prefills.
    """
    return ObjectText(handle.raw).edit(drop=[wire.MEMBER], put=_DIRECTIONS[prefill])


def clipped(handle: Handle, tokens: int) -> bytes:
    """The published form for the first `tokens` tokens: fewer blocks, and the count lowered with them.

    The `kvreturn` member stays at home: its digests would be for another count.

    Raises:
        HandleError: several KV cache groups, or no block size to clip by, or another number of blocks than digests: P's
            worker counts blocks from the end of the list, so it would read in the wrong place.
    """
    if handle.proof is None or handle.groups != 1:
        raise HandleError("clipping needs a block size and exactly one KV cache group")
    text = ObjectText(direct(handle))
    blocks: list[list[int]] = text.load("remote_block_ids")
    if len(blocks[0]) != handle.proof.blocks:
        raise HandleError(f"{len(blocks[0])} blocks for {handle.proof.blocks} digests")
    if tokens >= handle.tokens:
        return text.without([wire.MEMBER])
    keep = [blocks[0][: -(-tokens // handle.proof.block_size)]]
    return text.edit(
        drop=[wire.MEMBER],
        put={
            "remote_block_ids": json.dumps(keep, separators=(",", ":")).encode(),
            "remote_num_tokens": str(tokens).encode(),
        },
    )


def digest_seed(proof: wire.Proof, secret: bytes, *, lora: str, cache_salt: str) -> bytes:
    """The seed under which D made its digests; where none fits, one that `wire.proven_tokens` refuses.

    Args:
        proof: D's.
        secret: shared with D; empty where none is configured.
        lora: the request's model, which names the adapter if it is one.
        cache_salt: of the request, empty if it has none.
    """
    seeds = [wire.chain_seed(secret, lora=name, cache_salt=cache_salt) for name in ("", lora)]
    return next((s for s in seeds if wire.scope_tag(s) == proof.scope), seeds[0])


def secret_scope(secret: bytes) -> str:
    """What tells one secret from another without telling it: nodes have it as `scope` in `about`, base64."""
    return base64.b64encode(wire.scope_tag(wire.chain_seed(secret))).decode()


def check_mac(secret: bytes, handle: Handle) -> None:
    """Check the handle's MAC where a secret is configured.

    Raises:
        wire.WireError: it is missing or wrong.
    """
    if secret:
        if handle.proof is None:
            raise wire.WireError("no_digests", "no usable kvreturn member")
        params: Mapping[str, Any] = loads(handle.raw)
        wire.check_mac(secret, params, handle.proof)
