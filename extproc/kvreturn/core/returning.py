"""Eager return: P reads back at once what D holds, while the client is still thinking.

P is asked for a completion of exactly D's own tokens, with D's handle. So there is nothing to prove, and the next turn
is an ordinary hit in P's prefix cache, checked by P's own block hashes.

Which request P must get depends on what runs there, and the wrong one hangs it for good (vLLM 0.32.0): see `Form`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from kvreturn.core import wire
from kvreturn.core.handle import PARAMS, Handle, digest_seed, published, sealed
from kvreturn.core.jsontext import JSONTextError, ObjectText, loads

PATH = "/v1/completions"
_NOBODYS_MODEL = "kvreturn-frees-blocks"
_TOKENS_A = 64  # enough for P to be still at it when its first token is here and the request is closed
_LIMITS = range(2**32 - 1)


class Form(StrEnum):
    """How a prefill node reads back without serving a turn."""

    SEALED = "sealed"
    """Our connector runs on P: the sealed handle, and a word that P need not keep the blocks for a D."""
    STREAMED = "streamed"
    """A stock P with `bidirectional_kv_xfer`: the published handle, streamed and closed after the first token. Closed
    earlier, P has not cached the blocks yet; not closed, P keeps them for a D that never comes."""
    LOADED = "loaded"
    """A stock P without the flag: as D loads from P, so P loads from D. With the flag, P would pin them for its TTL."""


class ReturnError(Exception):
    """Nothing can be returned; `reason` is one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Job:
    """What is needed to return what D holds after a turn.

    Attributes:
        handle: D's.
        prefill_node: address of the P that computed the prompt, and will get the next turn.
        engine: that P's engine id.
        decode_node: address of the D.
        kept: JSON object with the members of the request that must be the same: model, `cache_salt`.
        prompt: token ids of the prompt, a raw JSON list.
        generated: token ids that D generated.
        tenant: whose turn it was.
        secret: under which D made its digests.
        salt: the request's `cache_salt`.
        finish_reason: why the answer ended.
        gap: seconds between the turn before and this one, None if there was none.
        turns: how many turns of the conversation are known.
        lazy: whether the next turn may read the blocks if they stay where they are.
        mode: the policy's: always, or by what is best.
        ttl: seconds for which the blocks can be read if they stay on D.
    """

    handle: Handle
    prefill_node: str
    engine: str
    decode_node: str | None
    kept: bytes
    prompt: bytes
    generated: Sequence[int]
    tenant: bytes
    secret: bytes
    salt: str
    finish_reason: str | None
    gap: float | None
    turns: int
    lazy: bool = True
    mode: Literal["eager", "auto"] = "eager"
    ttl: float = 450.0

    @property
    def model(self) -> str:
        """The request's model."""
        return ObjectText(self.kept).load("model") or ""

    def tokens(self) -> list[int]:
        """The token ids that D holds, and the last one, whose KV it usually has not.

        Raises:
            ReturnError: they cannot be told.
        """
        try:
            tokens = loads(self.prompt)
        except JSONTextError:
            tokens = None
        if not isinstance(tokens, list) or not all(type(t) is int and t in _LIMITS for t in tokens):
            raise ReturnError("no_tokens")
        tokens += self.generated
        if len(tokens) < self.handle.tokens:
            raise ReturnError("too_few_tokens")
        if self.handle.proof and not self._are_these(self.handle.proof, tokens):
            raise ReturnError("other_tokens")
        return tokens

    def _are_these(self, proof: wire.Proof, tokens: Sequence[int]) -> bool:
        """Whether D's digests are those of these tokens: P and D may have rendered two prompts."""
        seed = digest_seed(proof, self.secret, lora=self.model, cache_salt=self.salt)
        try:
            return wire.proven_tokens(proof, self.handle.tokens, tokens, seed) == self.handle.tokens
        except wire.WireError as e:
            if e.reason == "scope":
                raise ReturnError("scope") from None
            return False


def return_body(form: Form, job: Job, tokens: Sequence[int], priority: int | None = None) -> bytes:
    """Body of the `/v1/completions` request that makes P read back.

    Args:
        form: what P understands.
        job: the turn's.
        tokens: `job.tokens()`.
        priority: vLLM's. It counts where the scheduling policy is `priority`; vLLM 0.32.0 overlooks it elsewhere.
    """
    put: dict[str, bytes] = {"max_tokens": b"1", "temperature": b"0"}
    if form is Form.SEALED:
        params = sealed(job.handle, keep=False)
    elif form is Form.STREAMED:
        params = published(job.handle, prefill=False)
        put |= {"stream": b"true", "ignore_eos": b"true", "max_tokens": b"%d" % _TOKENS_A}
    else:
        params = published(job.handle, prefill=True)
        tokens = tokens[: job.handle.tokens]
    put |= {"prompt": _json(tokens), PARAMS: params}
    if priority is not None:
        put["priority"] = b"%d" % priority
    return ObjectText(job.kept).edit(put=put)


def probe_body(model: str) -> bytes:
    """Body of a request that tells whether a stock P has `bidirectional_kv_xfer`.

    To such a P it is a decode request that leaves a handle (one block, for P's `decoder_kv_blocks_ttl`); to another one
    the parameters mean nothing, and its answer has none.
    """
    return json.dumps(
        {
            "model": model,
            "prompt": [1],
            "max_tokens": 1,
            "temperature": 0,
            PARAMS: {"do_remote_prefill": False, "do_remote_decode": False},
        }
    ).encode()


def read_probe(status: int, body: bytes) -> Form | None:
    """What a stock P is, from its answer; None if that does not tell."""
    try:
        answer = ObjectText(body)
        if status != 200 or "choices" not in answer:  # noqa: PLR2004
            return None
        return Form.STREAMED if answer.load(PARAMS) else Form.LOADED
    except JSONTextError:
        return None


def free_body(form: Form | None, handle: Handle) -> bytes:
    """Body of a request by which P tells D to free the blocks, reading nothing.

    A stock P does so for a request that it rejects after it has looked at its parameters: one for a model that nobody
    serves. (To a D's front end such a request is one whose blocks on P would be stranded.)
    """
    if form is Form.SEALED:
        return b'{"prompt":[1],"max_tokens":1,"%s":%s}' % (PARAMS.encode(), sealed(handle, free=True))
    params = published(handle, prefill=True)
    return b'{"model":%s,"prompt":[1],"max_tokens":1,"%s":%s}' % (_json(_NOBODYS_MODEL), PARAMS.encode(), params)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
