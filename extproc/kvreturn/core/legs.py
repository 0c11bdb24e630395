"""The two legs of a turn that an orchestrator runs: each is a request of its own, perhaps at another router.

What joins them is P's answer, which the orchestrator hands on to D whole: P's engine and request ids in it are where
the P leg leaves a note for the D leg. The note is found only if both legs have the same prompt. Where it is not found,
nobody can tell whether what D pulled from P belongs to what D says that it holds, so D's handle is not kept.

P lets its blocks be read once, so the note is taken, as a handle is: a D leg that is sent again may go to another D,
which would read what stands in those blocks by then.
"""

import json
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

from kvreturn.core import wire
from kvreturn.core.api import Completions
from kvreturn.core.api.base import BadRequestError, shaping
from kvreturn.core.attach import Attached
from kvreturn.core.capture import Capture
from kvreturn.core.fingerprint import canonical, keyed_hash
from kvreturn.core.handle import PARAMS
from kvreturn.core.jsontext import JSONTextError, ObjectText, loads
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Ask, Effect, Forward, Put, Record, Refuse, Reply, Result, Take, Taken, expect
from kvreturn.core.prefill import PrefillError, read_prefill
from kvreturn.core.scrub import may_hold_params, scrub_nested
from kvreturn.core.turn import SLACK_TOKENS, Turn

_NOTE = 60.0  # seconds; P's own lease of its blocks is 30
_OWN = ("remote_block_ids", "remote_engine_id", "remote_request_id", "do_remote_prefill", wire.MEMBER)
"""Members of which a cold P leg sets none."""
_ERRORS, _SERVER_ERRORS, _GATEWAY_TIMEOUT = 400, 500, 504


class _Leg(Turn):
    """What both have in common: the orchestrator's own parameters stay, and what cannot be read is for the node.

    The one thing that is refused is a body that cannot be read, and might bring a node parameters of a client's.
    """

    theirs = b"null"
    shape = b""  # digest of all that shapes the prompt, nothing left out

    def request(self, body: bytes) -> Generator[Effect, Result, Forward | Refuse]:
        """See `Turn.request`. What cannot be read goes on: the node says what is wrong with it."""
        try:
            self.body = scrub_nested(ObjectText(body))
        except JSONTextError as e:
            self.facts.outcome = Outcome.REJECTED
            # The node may read what we do not: it knows no bounds of ours, and more encodings.
            unread = Refuse(400, self.api.error(f"kvreturn: {e}", "BadRequestError", 400))
            return unread if may_hold_params(body) else Forward(body)
        try:
            prompt = self._read(self.body)
            self.theirs = self.body.get(PARAMS) or b"null"
            self.shape = keyed_hash(self._scope.key, canonical(shaping(self.body, ())))
            params = loads(self.theirs)
            if prompt.alone:
                self.facts.outcome, self.facts.detail = Outcome.DECODE_ALONE, prompt.alone
            elif isinstance(params, dict):
                return (yield from self._joined(params))
            else:
                self.facts.outcome, self.facts.detail = Outcome.DISABLED, "no_transfer_params"
            return Forward(self.body.text)
        except (JSONTextError, BadRequestError):
            self.facts.outcome = Outcome.REJECTED
            return Forward(self.body.text)

    def _joined(self, params: Mapping[str, Any]) -> Generator[Effect, Result, Forward]:
        """The request side of a leg with these parameters."""
        raise NotImplementedError

    def _note_key(self, params: Mapping[str, Any]) -> bytes:
        engine, request = (str(params.get(name) or "") for name in ("remote_engine_id", "remote_request_id"))
        return self._scope.leg_key(engine, request, self.shape)


class PrefillLeg(_Leg):
    """The request to P: gets the conversation's handle, if it brings none of its own.

    Attributes:
        attached: the handle that went with it.
    """

    attached: Attached | None = None
    _cold = False  # it is one that we could attach to

    def _joined(self, params: Mapping[str, Any]) -> Generator[Effect, Result, Forward]:
        if any(params.get(name) for name in _OWN):
            self.facts.outcome = Outcome.FOREIGN_HANDLE
            self.facts.detail = "decode_leg" if params.get("do_remote_prefill") else None
            return Forward(self.body.text)
        if params.get("do_remote_decode") is not True:
            self.facts.outcome, self.facts.detail = Outcome.DISABLED, "no_transfer_params"
            return Forward(self.body.text)
        self._cold = True
        self.attached = yield from self._find()
        text = self.body.edit(put=self._put(self.attached)) if self.attached else self.body.text
        return Forward(text, self.prefill_node, SLACK_TOKENS[self._hinted])

    def _put(self, attached: Attached) -> dict[str, bytes]:
        """The members of the body that carry the handle."""
        ours = ObjectText(attached.params)
        put = {m.name: ours.text[m.value : m.end] for m in ours.members}
        more = {}
        if attached.prompt is not None:  # P must compute just the prompt that was proven
            ids = json.dumps(attached.prompt, separators=(",", ":")).encode()
            if self.api.path == Completions.path:
                more["prompt"] = ids
            else:
                put["prompt_token_ids"] = ids
        return {PARAMS: ObjectText(self.theirs).edit(put=put), **more}

    def is_ours(self, status: int) -> bool:
        """Whether it may be the handle that P, or Envoy for it, answers with this status to."""
        # What P says against tokens is none of the orchestrator's business, which did not send them.
        if self.attached is None:
            return False
        return status >= (_SERVER_ERRORS if self.attached.prompt is None else _ERRORS)

    def failed(self, status: int) -> Ask:
        """P did not process the request for its handle.

        Returns:
            The same request without it.
        """
        assert self.attached
        if status in {_SERVER_ERRORS, _GATEWAY_TIMEOUT}:  # with others, P never saw it, so that D is not to blame
            self.judge.read_failed(self.attached.handle, hung=status == _GATEWAY_TIMEOUT)
        self.facts.outcome, self.facts.detail = Outcome.READ_FAILED, str(status)
        self.facts.retries += 1
        self.attached = None
        return Ask(self.api.path, self.body.text, tokens=len(self.body.text) // 4, last=True)

    def answered(self, reply: Reply) -> Put | None:
        """P's answer: what came of the handle. Gives the note for the D leg, if there is one to give.

        `facts.fallback` then says that P's prompt was not the one that was proven: D must not get P's parameters.
        """
        if not self._cold:
            return None
        answer = read_prefill(reply, self.api)
        if isinstance(answer, PrefillError):
            self.facts.outcome = Outcome.REJECTED if answer.refusal else Outcome.PREFILL_FAILED
            self.facts.detail = answer.reason
            return None
        self._forward(answer, self.attached)
        if self.facts.fallback:
            return None
        turns = self.taken.record.turns if self.taken.record else 0
        note = Record(
            _NOTE,
            b"",
            decode_node=self.decode_node,
            prefill_node=answer.node,
            prompt=answer.usage.prompt or 0,
            turns=turns,
        )
        return Put([self._note_key(loads(answer.params.text))], note)

    def settle(self, capture: Capture, decode_node: str | None) -> Put | None:
        """See `Turn.settle`: this leg leaves nothing."""
        del capture, decode_node
        return None


class DecodeLeg(_Leg):
    """The request to D: it goes on as it is, and what it leaves is kept if its P leg is known."""

    _known = False

    def _joined(self, params: Mapping[str, Any]) -> Generator[Effect, Result, Forward]:
        taken = expect(Taken, (yield Take([self._note_key(params)])))
        note = taken.record
        if taken.reason is Outcome.ALREADY_TAKEN:
            return Forward(self.body.without([PARAMS]))  # D computes by itself
        if note:
            self._known, self.taken = True, taken
            self.decode_node, self.prefill_node = note.decode_node, note.prefill_node
            self.facts.prefill.prompt = note.prompt
        assert self.prompt
        keep = self._known and self.reads_later and self.prompt.choices == 1
        return Forward(self.body.text if keep else self._unkept(params), self.decode_node, self._slack)

    def _unkept(self, params: Mapping[str, Any]) -> bytes:
        """The body, with the word for our connector on D that nobody will come back for its blocks."""
        report = params.get(wire.MEMBER)
        member = {"v": wire.VERSION, **(report if isinstance(report, dict) else {}), "keep": False}
        put = {wire.MEMBER: json.dumps(member, separators=(",", ":")).encode()}
        return self.body.edit(put={PARAMS: ObjectText(self.theirs).edit(put=put)})

    def settle(self, capture: Capture, decode_node: str | None) -> Put | None:
        """See `Turn.settle`."""
        put = super().settle(capture, decode_node)
        if put is None or put.record.handle is None or (self._known and self._counted_alike):
            return put
        self.facts.captured = False
        self.spare.append(put.record)
        return replace(put, record=replace(put.record, handle=None, reason=Outcome.UNPROVEN))

    @property
    def _counted_alike(self) -> bool:
        """Whether P and D, which both tokenize, got as many tokens, as far as they tell: a template may have a date."""
        return self.answer.usage.prompt in {None, self.facts.prefill.prompt}
