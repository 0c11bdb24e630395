"""The `kvreturn` member of `kv_transfer_params`, format version 1 (docs/handle-format.md).

D puts it into its handle, the router carries it, P reads it and answers with a report under the same key. Router,
simulator and connector share this module, so it needs nothing but the standard library.
"""

import base64
import hashlib
import hmac
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import Any

MEMBER = "kvreturn"
VERSION = 1
DIGEST_BYTES = 8
_TOKEN_BYTES = 4
_NO_TOKEN = b"\xff\xff\xff\xff"  # no vocabulary has a token 2**32-1: it keeps extra keys apart from token ids

# What the MAC leaves out: the router sets the direction flags, and may replace a loopback `remote_host` by the address
# of the node that really answered (protocol.md, "Addresses").
_UNSIGNED = frozenset({"do_remote_prefill", "do_remote_decode", "remote_host"})


class WireError(ValueError):
    """A `kvreturn` member that cannot be used. `reason` is one word for metrics and reports."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Proof:
    """What D says about the blocks of one handle.

    Attributes:
        block_size: tokens per block on D.
        scope: 8 bytes that name LoRA and `cache_salt` (see `scope_tag`).
        digests: 8 bytes per block, chained; the last block may be partial.
        generated: the token ids that D generated, in order. The KV of the last one is usually not computed.
        ttl: seconds for which D keeps the blocks, from the moment the turn finished.
        mac: HMAC over the handle, or None where no secret is configured.
    """

    block_size: int
    scope: bytes
    digests: bytes
    generated: tuple[int, ...]
    ttl: float
    mac: bytes | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks that have a digest."""
        return len(self.digests) // DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Report:
    """What P did with a handle (all counts in tokens).

    Attributes:
        proven: length of the prefix that P found equal to its own prompt.
        read: how much of it P read from D.
        local: how much P had in its own prefix cache before.
        reason: one word that says why `read` is not `proven`, or None.
        prompt: what P's prompt was (see `prompt_digest`), for D to compare; None if P cannot tell.
        expires: when P's lease on its blocks ends, in seconds of P's monotonic clock, for D; None if P cannot tell.
        ids: the prompt's token ids, for the router; None if it did not ask, or the prompt is more than tokens.
        about: what runs on the node (docs/handle-format.md); None if nobody asked.
    """

    proven: int
    read: int
    local: int
    reason: str | None = None
    prompt: str | None = None
    expires: float | None = None
    ids: Sequence[int] | None = None
    about: Mapping[str, Any] | None = None


def chain_seed(secret: bytes, *, lora: str = "", cache_salt: str = "") -> bytes:
    """State before the first block: everything besides the tokens that vLLM's own block hash depends on.

    Args:
        secret: shared by router and nodes; empty where none is configured.
        lora: name of the LoRA adapter, empty for the base model.
        cache_salt: vLLM's request field of that name, empty where it is absent.

    Returns:
        32 bytes.
    """
    scope = json.dumps([MEMBER, VERSION, lora, cache_salt], separators=(",", ":")).encode()
    return hmac.digest(secret, scope, "sha256")


def scope_tag(seed: bytes) -> bytes:
    """8 bytes by which two sides compare their seeds without telling them."""
    return hashlib.sha256(b"scope" + seed).digest()[:DIGEST_BYTES]


def block_digests(
    tokens: Sequence[int], block_size: int, seed: bytes, extra: Mapping[int, bytes] | None = None
) -> bytes:
    """Digest every block of `tokens`; the last one may be partial.

    A block's state is SHA-256 over the state before it and its token ids (unsigned 32 bit, little endian); the digest
    is its first 8 bytes. So a digest vouches for all tokens up to its block's end.

    Args:
        tokens: token ids, each in 0..2**32-2.
        block_size: tokens per block.
        seed: see `chain_seed`.
        extra: by block index, what else the block's KV depends on (multimodal hashes); at most 32 bytes of digest.

    Returns:
        8 bytes per block.

    Raises:
        OverflowError: a token id does not fit in 32 bits.
    """
    data = memoryview(_octets_of(tokens))
    step = block_size * _TOKEN_BYTES
    sha256 = hashlib.sha256
    state, out = seed, bytearray()
    for index, start in enumerate(range(0, len(data), step)):
        block = state + data[start : start + step]
        if extra and index in extra:
            block += _NO_TOKEN + extra[index]
        state = sha256(block).digest()
        out += state[:DIGEST_BYTES]
    return bytes(out)


def _octets_of(tokens: Sequence[int]) -> bytes:
    ids = array("I", tokens)
    if byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def prompt_digest(tokens: Sequence[int], seed: bytes, inputs: bytes = b"") -> str:
    """Stands for a whole prompt. P reports it, and D loads P's blocks only if its own prompt gives the same.

    The two render the request each for itself: a date in the template, another tokenizer or template version, and the
    blocks would be another prompt's.

    Args:
        tokens: as for `block_digests`.
        seed: see `chain_seed`.
        inputs: what else the prompt's KV depends on (multimodal inputs), in an unambiguous form.

    Returns:
        16 hexadecimal digits.
    """
    return hashlib.sha256(seed + _octets_of(tokens) + _NO_TOKEN + inputs).hexdigest()[:16]


def proven_tokens(
    proof: Proof, held: int, tokens: Sequence[int], seed: bytes, extra: Mapping[int, bytes] | None = None
) -> int:
    """How many tokens of the prompt `tokens` are proven to be what D holds.

    A full block is proven by its digest. D's last block may be partial; it is proven only if the prompt has at least
    as many tokens there and they give the same digest.

    Args:
        proof: D's member.
        held: `remote_num_tokens` of the handle.
        tokens: P's own prompt.
        seed: P's own seed.
        extra: as for `block_digests`, for P's own prompt.

    Returns:
        Number of tokens, 0 if even the first block differs.

    Raises:
        WireError: the member contradicts itself or was made under another scope.
    """
    if held <= 0 or proof.blocks != -(-held // proof.block_size):
        raise WireError("malformed", f"{proof.blocks} digests for {held} tokens of block size {proof.block_size}")
    if not hmac.compare_digest(proof.scope, scope_tag(seed)):
        raise WireError("scope", "the handle was made under another LoRA, cache_salt or secret")
    shared = min(held, len(tokens))
    if shared < held:
        shared -= shared % proof.block_size  # the prompt ends inside a block: no digest of D's covers that much
    mine = block_digests(tokens[:shared], proof.block_size, seed, extra)
    if mine == proof.digests[: len(mine)]:
        return shared
    size = DIGEST_BYTES
    same = next(i for i in range(0, len(mine), size) if mine[i : i + size] != proof.digests[i : i + size])
    return same // size * proof.block_size


def _count(obj: Mapping[str, Any], key: str, low: int = 0) -> int:
    value = obj.get(key)
    if type(value) is not int or not low <= value < 2**31:
        raise WireError("malformed", f"kvreturn.{key} is no whole number from {low} on")
    return value


def _octets(obj: Mapping[str, Any], key: str, length: int | None = None) -> bytes:
    value = obj.get(key)
    try:
        raw = base64.b64decode(value, validate=True) if isinstance(value, str) else None
    except ValueError:  # binascii.Error is one; text beyond ASCII raises another
        raw = None
    if raw is None or (length is not None and len(raw) != length):
        raise WireError("malformed", f"kvreturn.{key} is no base64 text of the right length")
    return raw


def seconds(value: object) -> float | None:
    """A point of a monotonic clock, None if `value` is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
        return None
    return float(value)


def _token_ids(obj: Mapping[str, Any], key: str) -> tuple[int, ...]:
    ids = obj[key]
    if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < 2**32 - 1 for t in ids):
        raise WireError("malformed", f"kvreturn.{key} is no list of token ids")
    return tuple(ids)


def _versioned(obj: object) -> Mapping[str, Any]:
    if not isinstance(obj, Mapping):
        raise WireError("no_digests", "no kvreturn member")
    if obj.get("v") != VERSION or type(obj.get("v")) is not int:
        raise WireError("version", f"kvreturn format {str(obj.get('v'))[:16]}, expected {VERSION}")
    return obj


def dump_proof(proof: Proof) -> dict[str, Any]:
    """The JSON object of `proof`."""
    out: dict[str, Any] = {
        "v": VERSION,
        "block_size": proof.block_size,
        "scope": base64.b64encode(proof.scope).decode(),
        "digests": base64.b64encode(proof.digests).decode(),
        "generated": list(proof.generated),
        "ttl": proof.ttl,
    }
    if proof.mac is not None:
        out["mac"] = base64.b64encode(proof.mac).decode()
    return out


def load_proof(obj: object) -> Proof:
    """Read the member of a handle.

    Raises:
        WireError: missing (`no_digests`), another format version (`version`), or malformed.
    """
    obj = _versioned(obj)
    digests = _octets(obj, "digests")
    if not digests or len(digests) % DIGEST_BYTES:
        raise WireError("malformed", "kvreturn.digests is no multiple of 8 bytes")
    generated, ttl = _token_ids(obj, "generated") if "generated" in obj else (), obj.get("ttl")
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < 2**31:
        raise WireError("malformed", "kvreturn.ttl is no positive number of seconds")
    return Proof(
        block_size=_count(obj, "block_size", 1),
        scope=_octets(obj, "scope", DIGEST_BYTES),
        digests=digests,
        generated=generated,
        ttl=float(ttl),
        mac=_octets(obj, "mac") if obj.get("mac") is not None else None,
    )


def dump_report(report: Report) -> dict[str, Any]:
    """The JSON object of `report`."""
    out: dict[str, Any] = {"v": VERSION, "proven": report.proven, "read": report.read, "local": report.local}
    if report.reason is not None:
        out["reason"] = report.reason
    if report.prompt is not None:
        out["prompt"] = report.prompt
    if report.expires is not None:
        out["expires"] = report.expires
    if report.ids is not None:
        out["ids"] = list(report.ids)
    if report.about is not None:
        out["about"] = dict(report.about)
    return out


def load_report(obj: object) -> Report:
    """Read P's report.

    Raises:
        WireError: missing (`no_digests`), another format version (`version`), or malformed.
    """
    obj = _versioned(obj)
    reason, prompt, about = obj.get("reason"), obj.get("prompt"), obj.get("about")
    word = isinstance(reason, str) and reason.isascii() and reason.isidentifier() and len(reason) <= 32  # noqa: PLR2004
    return Report(
        proven=_count(obj, "proven"),
        read=_count(obj, "read"),
        local=_count(obj, "local"),
        reason=reason if word else None,
        prompt=prompt if isinstance(prompt, str) else None,
        expires=seconds(obj.get("expires")),
        ids=_token_ids(obj, "ids") if "ids" in obj else None,
        about=about if isinstance(about, Mapping) else None,
    )


def sign(secret: bytes, handle: Mapping[str, Any]) -> bytes:
    """MAC over what must not be forged: the whole handle but for `_UNSIGNED` and the MAC itself. 16 bytes.

    JSON with sorted keys and no spaces; numbers as Python writes them, which a round trip through JSON keeps.
    """
    signed = {k: v for k, v in handle.items() if k not in _UNSIGNED}
    if isinstance(signed.get(MEMBER), Mapping):
        signed[MEMBER] = {k: v for k, v in signed[MEMBER].items() if k != "mac"}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    return hmac.digest(secret, text.encode(), "sha256")[:16]


def check_mac(secret: bytes, handle: Mapping[str, Any], proof: Proof) -> None:
    """Check the MAC of a handle where a secret is configured.

    Raises:
        WireError: (`mac`) it is missing or wrong.
    """
    if secret and not (proof.mac and hmac.compare_digest(proof.mac, sign(secret, handle))):
        raise WireError("mac", "the handle's MAC is missing or wrong: is the same secret configured on all nodes?")
