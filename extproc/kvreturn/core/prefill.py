"""P's answer to the P leg: what D needs of it, or how it failed."""

import json
from dataclasses import dataclass, replace
from typing import Any

from kvreturn.core import wire
from kvreturn.core.address import host_of, is_local
from kvreturn.core.api.base import API, Usage, is_count
from kvreturn.core.handle import PARAMS
from kvreturn.core.jsontext import JSONTextError, ObjectText, loads
from kvreturn.core.ports import Failure, Refuse, Reply
from kvreturn.core.refusal import strip_refusal

_CLIENT_ERRORS = range(400, 500)
_OK = 200
_IDS = "prompt_token_ids"
_CACHED = "remote_prefill_cached_tokens"  # in P's parameters since vLLM 0.32.0


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """P did its part.

    Attributes:
        node: address of the node.
        params: its `kv_transfer_params`, for D.
        usage: token counts as P has them.
        report: what our connector on P says; None from a stock P.
        engine: P's `remote_engine_id`, which changes when it restarts.
        prompt_ids: the prompt's token ids as vLLM on P has them, raw; None if it was not asked for them.
        reported_ids: the same from our connector on P; None also if the prompt is more than tokens.
    """

    node: str | None
    params: ObjectText
    usage: Usage
    report: wire.Report | None
    engine: str = ""
    prompt_ids: bytes | None = None
    reported_ids: bytes | None = None

    @property
    def local(self) -> int | None:
        """Tokens that P had in its own prefix cache, of a request that carried no handle; None if nobody tells."""
        if self.report:
            return self.report.local
        cached = self.params.load(_CACHED) if self.usage.cached is None else self.usage.cached
        return cached if is_count(cached) else None

    def decode_params(self, ids: bytes | None, *, keep: bool) -> bytes:
        """P's object for D: whole.

        Args:
            ids: token ids of the prompt, raw, so that D need not tokenize and means the same prompt; None to let it.
            keep: whether D's blocks will be wanted after the turn. If not, our connector on D pins nothing.
        """
        put = {} if ids is None else {"prompt_token_ids": ids}
        if not keep:
            report = {} if self.report is None else wire.dump_report(self.report)
            put[wire.MEMBER] = json.dumps({"v": wire.VERSION, **report, "keep": False}).encode()
        return self.params.edit(put=put) if put else self.params.text


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
        raw, usage = body.get(PARAMS), Usage()
        obj = None if raw is None else loads(raw)
        usage.read(body.load("usage"))
        if raw is None or obj in (None, {}):
            return PrefillError(reply.node, "no_kv_transfer_params")
        params = ObjectText(raw)
    except JSONTextError:
        return PrefillError(reply.node, "malformed")
    host = obj.get("remote_host")
    if reply.node and isinstance(host, str) and is_local(host):
        # vLLM's default is `localhost`, which names no machine to D (protocol.md, "Addresses").
        params = params.edited(put={"remote_host": json.dumps(host_of(reply.node)).encode()})
    try:
        report = wire.load_report(obj.get(wire.MEMBER))
    except wire.WireError:
        report = None
    reported = None
    if report and report.ids is not None:
        reported, report = json.dumps(report.ids, separators=(",", ":")).encode(), replace(report, ids=None)
        params = params.edited(put={wire.MEMBER: json.dumps(wire.dump_report(report)).encode()})
    return PrefillAnswer(
        reply.node, params, usage, report, str(obj.get("remote_engine_id") or ""), _prompt_ids(body), reported
    )


def _prompt_ids(body: ObjectText) -> bytes | None:
    """Chat has them beside the choices, completions have them in each (vLLM 0.32.0)."""
    ids = body.get(_IDS)
    if ids is None:
        try:
            choices: list[dict[str, Any]] = body.load("choices")
            ids = json.dumps(choices[0][_IDS], separators=(",", ":")).encode()
        except (JSONTextError, KeyError, IndexError, TypeError):
            return None
    return ids if ids[:1] == b"[" else None
