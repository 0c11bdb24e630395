"""Proof by the router: D's digests against the tokens that P's own `/tokenize` gives."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvreturn.core import wire
from kvreturn.core.handle import Handle, HandleError, check_mac, clipped, digest_seed
from kvreturn.core.jsontext import JSONTextError, loads
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Reply


class Objection(Exception):  # noqa: N818 - no error: a reason to go cold
    """Why a handle is not attached."""

    def __init__(self, outcome: Outcome, detail: str | None = None) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Attached:
    """A handle on its way to P.

    Attributes:
        handle: it.
        params: raw `kv_transfer_params` for the P leg.
        proven: tokens known to be the new prompt's prefix; None if P is to find out.
        prompt: the token ids for which that was proven here, and which P must therefore get; None if P proves itself.
    """

    handle: Handle
    params: bytes
    proven: int | None = None
    prompt: Sequence[int] | None = None


def read_tokens(reply: Reply) -> Sequence[int]:
    """The token ids of a `/tokenize` answer.

    Raises:
        Objection: there are none.
    """
    try:
        tokens = loads(reply.body)["tokens"] if reply.status == 200 else None  # noqa: PLR2004
    except (JSONTextError, KeyError, TypeError):
        tokens = None
    if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < 2**32 - 1 for t in tokens):
        raise Objection(Outcome.UNPROVEN, "tokenize_failed")
    return tokens


def prove_with_tokens(handle: Handle, tokens: Sequence[int], secret: bytes, *, lora: str, cache_salt: str) -> Attached:
    """Clip a handle to the prefix that these tokens prove.

    Args:
        handle: from a D with our connector.
        tokens: of the new prompt.
        secret: shared with D; empty where none is configured.
        lora: the request's model, which names the adapter if it is one.
        cache_salt: of the request, empty if it has none.

    Raises:
        Objection: nothing is proven.
    """
    if handle.proof is None:
        raise Objection(Outcome.UNPROVEN, "no_digests")
    seed = digest_seed(handle.proof, secret, lora=lora, cache_salt=cache_salt)
    try:
        check_mac(secret, handle)
        proven = wire.proven_tokens(handle.proof, handle.tokens, tokens, seed)
        if not proven:
            raise Objection(Outcome.NOT_A_CONTINUATION)
        return Attached(handle, clipped(handle, proven), proven, tokens)
    except wire.WireError as e:
        raise Objection(Outcome.UNPROVEN, e.reason) from None
    except HandleError:
        raise Objection(Outcome.UNPROVEN, "groups") from None
