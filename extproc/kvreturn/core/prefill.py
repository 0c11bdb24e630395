"""P's answer to the P leg: what D needs of it, or how it failed."""

import json
from dataclasses import dataclass

from kvreturn.core import wire
from kvreturn.core.address import is_local, split_address
from kvreturn.core.api.base import API, Usage
from kvreturn.core.handle import PARAMS
from kvreturn.core.jsontext import JSONTextError, ObjectText
from kvreturn.core.ports import Failure, Refuse, Reply
from kvreturn.core.refusal import strip_refusal

_CLIENT_ERRORS = range(400, 500)
_OK = 200


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """P did its part.

    Attributes:
        node: address of the node.
        params: its `kv_transfer_params`, raw, for D.
        usage: token counts as P has them.
        report: what our connector on P says; None from a stock P.
        prompt_ids: the prompt's token ids as P has them, raw; None if it was not asked for them.
    """

    node: str | None
    params: bytes
    usage: Usage
    report: wire.Report | None
    prompt_ids: bytes | None = None

    def decode_params(self, *, keep: bool) -> bytes:
        """P's object for D: whole, with the prompt's token ids, so that D need not tokenize and means the same prompt.

        Args:
            keep: whether D's blocks will be wanted after the turn. If not, our connector on D pins nothing.
        """
        put = {} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids}
        if not keep:
            report = {} if self.report is None else wire.dump_report(self.report)
            put[wire.MEMBER] = json.dumps({"v": wire.VERSION, **report, "keep": False}).encode()
        return ObjectText(self.params).edit(put=put) if put else self.params


@dataclass(frozen=True, slots=True)
class PrefillError:
    """P did not.

    Attributes:
        node: address of the node that was asked.
        reason: one word.
        refusal: set if the request itself is at fault, and the client gets P's answer.
        failure: set if there was no answer.
    """

    node: str | None
    reason: str
    refusal: Refuse | None = None
    failure: Failure | None = None


def read_prefill(reply: Reply, api: API) -> PrefillAnswer | PrefillError:
    """Read the answer to a request of this API."""
    if reply.failure:
        return PrefillError(reply.node, reply.failure.value, failure=reply.failure)
    if reply.status in _CLIENT_ERRORS:
        refusal = Refuse(reply.status, strip_refusal(reply.body, api, reply.status), reply.content_type, reply.headers)
        return PrefillError(reply.node, str(reply.status), refusal)
    if reply.status != _OK:
        return PrefillError(reply.node, str(reply.status))
    try:
        body = ObjectText(reply.body)
        params, obj, usage = body.get(PARAMS), body.load(PARAMS), Usage()
        usage.read(body.load("usage"))
        if params is None or obj in (None, {}):
            return PrefillError(reply.node, "no_kv_transfer_params")
        text = ObjectText(params)
    except JSONTextError:
        return PrefillError(reply.node, "malformed")
    host = obj.get("remote_host")
    if reply.node and isinstance(host, str) and is_local(host):
        # vLLM's default is `localhost`, which names no machine to D (protocol.md, "Addresses").
        params = text.edit(put={"remote_host": json.dumps(split_address(reply.node)[0]).encode()})
    try:
        report = wire.load_report(obj.get(wire.MEMBER))
    except wire.WireError:
        report = None
    ids = body.get("prompt_token_ids")
    return PrefillAnswer(reply.node, params, usage, report, ids if ids is not None and ids[:1] == b"[" else None)
