"""One turn: the client's request and its answer. Bytes and events in, decisions out.

`Turn.request` is a generator: it yields effects (`ports.Effect`), is sent their results, and returns a decision. So the
order of things is read from top to bottom, and whoever drives it owns sockets, clocks and deadlines.
"""

import json
from collections.abc import Callable, Generator

from kvreturn.core.api.base import API, Answer, BadRequestError, Prompt, TooLongError, read_model
from kvreturn.core.api.completions import Completions, prefill_tokens
from kvreturn.core.attach import Attached, Objection, prove_with_tokens, read_tokens
from kvreturn.core.capture import Capture
from kvreturn.core.ending import leave
from kvreturn.core.facts import Facts
from kvreturn.core.fingerprint import Scope, Trail
from kvreturn.core.handle import PARAMS, Handle, HandleError, cold, direct, read_handle, sealed
from kvreturn.core.identity import Session
from kvreturn.core.idplan import IdPlan, plan_ids
from kvreturn.core.ids import Ids
from kvreturn.core.jsontext import JSONTextError, ObjectText
from kvreturn.core.outcome import Outcome
from kvreturn.core.policy import Policy
from kvreturn.core.ports import (
    Ask,
    Await,
    Awaited,
    Effect,
    Failure,
    Forward,
    Judge,
    Put,
    Recall,
    Record,
    Refuse,
    Reply,
    Result,
    Take,
    Taken,
    expect,
)
from kvreturn.core.prefill import PrefillAnswer, PrefillError, read_prefill
from kvreturn.core.scrub import scrub_body, stamped

# How much busier than the idlest node one may be that the conversation was on last, and one that only its session was:
# that one's cache spares part of a prompt at best. In tokens on P, in requests on D.
SLACK_TOKENS, _SLACK_REQUESTS = (131_072, 16_384), (16, 4)
_TOKENIZE_SECONDS = 2.0  # /tokenize took 27 ms for 8,800 tokens; a node that takes longer is no help
_BAD = 400, "BadRequestError", "refused"
_TOO_LONG = 413, "RequestEntityTooLarge", "history"


class Turn:
    """The state of one turn.

    Args:
        api: adapter of the API that the client uses.
        scope: whose conversations these are.
        policy: gives the policy for a model.
        judge: knows the nodes.
        session: finds the session that the client names, in its body or in what else is known of the request.
    """

    def __init__(
        self,
        api: API,
        scope: Scope,
        policy: Callable[[str], Policy],
        judge: Judge,
        session: Callable[[ObjectText], Session | None] = lambda _: None,
    ) -> None:
        self.api = api
        self.facts = Facts()
        self.answer: Answer = api.answer()
        self.prompt: Prompt | None = None
        self.decode_node: str | None = None
        self.prefill_node: str | None = None
        self.policy = Policy(proof="off")
        self.body = ObjectText(b"{}")
        self.trail: Trail | None = None
        self.taken = Taken()
        self.ids = IdPlan()
        self.engine = ""  # P's id
        self.prompt_ids: bytes | None = None  # as P has them, raw
        self.spare: list[Record] = []  # with handles that will not be used
        self.session_key: bytes | None = None
        self.conversation_key: bytes | None = None
        self._find_session = session
        self._hinted = False  # the nodes are those that the session used last: no reason to wait for them
        self._scope = scope
        self._policy_for = policy
        self.judge = judge
        self._settled = False

    # --- the request ---

    def request(self, body: bytes) -> Generator[Effect, Result, Forward | Refuse]:
        """Run the request side: find the predecessor, prefill, rewrite for D.

        Args:
            body: the client's whole body.
        """
        try:
            return (yield from self._decide(body))
        # The latter also late: how deep is too deep for a parser depends on how deep the stack is where it is called.
        except (JSONTextError, BadRequestError) as e:
            self.facts.outcome = Outcome.REJECTED
            status, kind, why = _TOO_LONG if isinstance(e, TooLongError) else _BAD
            return Refuse(status, self.api.error(f"kvreturn: {e}", kind, status), why=why)

    def _decide(self, body: bytes) -> Generator[Effect, Result, Forward | Refuse]:
        prompt = self._read(scrub_body(ObjectText(body)))
        self.ids = plan_ids(prompt, self.policy, self.body)
        if prompt.alone:
            self.facts.outcome, self.facts.detail = Outcome.DECODE_ALONE, prompt.alone
            return self._alone()
        attached = yield from self._find()
        return (yield from self._prefill(attached))

    def _read(self, body: ObjectText) -> Prompt:
        """Whose request this is, as far as nodes and the store need to know, and what shapes its prompt."""
        model = read_model(body)
        self.policy = self._policy_for(model)
        session = self._find_session(body)
        if session and self.policy.remembers:
            self.facts.session, self.session_key = session.source, self._scope.session_key(model, session.id)
            self.conversation_key = self._scope.conversation_key(session.id)
        self.body = stamped(body, self.api, self._scope if self.policy.salts else None)
        prompt = self.prompt = self.api.read(self.body, strict=self.policy.strict, longest=self.policy.history)
        self.trail = self._scope.trail(prompt.root, prompt.items)
        return prompt

    def _find(self) -> Generator[Effect, Result, Attached | None]:
        """Take the predecessor's handle, and see whether and how it may be attached."""
        assert self.prompt
        assert self.trail
        if not self.policy.remembers:
            self.facts.outcome = Outcome.DISABLED
            return None
        taken = self.taken = expect(Taken, (yield Take(self.trail.candidates(self.session_key))))
        record = taken.record
        if record:
            self.decode_node, self.prefill_node = record.decode_node, record.prefill_node
        if record and record.returned:
            yield from self._returned(record)
            return None
        if record is None or record.handle is None:
            unknown = Outcome.NOT_A_CONTINUATION if self.prompt.has_answer else Outcome.FIRST_TURN
            self.facts.outcome = (record.reason if record else taken.reason) or unknown
            if record is None and self.session_key:
                yield from self._follow(self.session_key)
            return None
        self.facts.handle_age = taken.age
        try:
            attached = yield from self._attach(self._vetted(record, record.handle))
        except Objection as e:
            self.facts.outcome, self.facts.detail = e.outcome, e.detail
            if e.outcome is not Outcome.NODE_GONE:
                self.spare.append(record)
            return None
        self.facts.held, self.facts.proven = attached.handle.tokens, attached.proven
        return attached

    def _follow(self, session: bytes) -> Generator[Effect, Result, None]:
        """Nothing is known of the conversation, but of its session: go where that was last, if it costs no waiting."""
        known = expect(Taken, (yield Recall(session))).record
        if known:
            self._hinted = True
            self.decode_node, self.prefill_node = known.decode_node, known.prefill_node
            if self.facts.outcome is Outcome.NOT_A_CONTINUATION:
                self.facts.detail = "session_known"

    def _returned(self, record: Record) -> Generator[Effect, Result, None]:
        """P has the blocks, or will have them in a moment: the turn goes there without a handle."""
        assert self.taken.ticket is not None
        self.facts.returned, self.facts.brought = record.returned, record.brought
        self.facts.handle_age = self.taken.age
        self.facts.outcome = Outcome.RETURNED
        if record.pending:
            awaited = expect(Awaited, (yield Await(self.taken.ticket)))
            self.facts.unfinished, self.facts.brought = awaited.elsewhere, awaited.brought
            if awaited.reason:
                # Whatever became of it: all that it can leave on P is its own prompt's blocks.
                self.facts.outcome, self.facts.detail = Outcome.RETURN_FAILED, awaited.reason

    def _vetted(self, record: Record, raw: bytes) -> Handle:
        """The record's handle, if nothing speaks against using it now."""
        try:
            handle = read_handle(raw)
        except HandleError:
            raise Objection(Outcome.UNPROVEN, "malformed") from None
        objection = self.judge.objection(record, handle, self.taken.age)
        if objection or handle.tokens < self.policy.min_tokens:
            raise Objection(objection or Outcome.BELOW_THRESHOLD)
        return handle

    def _attach(self, handle: Handle) -> Generator[Effect, Result, Attached]:
        """What the P leg carries, by proof level."""
        if self.policy.proof == "off":
            raise Objection(Outcome.DISABLED, "not_returned")
        if self.policy.proof == "trusted":
            return Attached(handle, direct(handle), proven=handle.tokens)
        if self.policy.proof == "connector":
            if handle.proof is None:
                raise Objection(Outcome.UNPROVEN, "no_digests")
            return Attached(handle, sealed(handle, ids=self.ids.of_connector))
        assert self.prompt
        tokens, node = self.prompt.tokens, self.prefill_node
        if tokens is None:
            if not self.prompt.tokenizable:
                raise Objection(Outcome.UNPROVEN, "not_tokenizable")
            ask = Ask("/tokenize", self.api.tokenize_body(self.body), prefer=node, within=_TOKENIZE_SECONDS)
            reply = expect(Reply, (yield ask))
            tokens, node = read_tokens(reply), reply.node
        salt = self.body.load("cache_salt") or ""
        attached = prove_with_tokens(handle, tokens, self.policy.secret, lora=self.prompt.model, cache_salt=salt)
        if (attached.proven or 0) < self.policy.min_tokens:
            raise Objection(Outcome.BELOW_THRESHOLD)
        self.prefill_node = node
        return attached

    def _prefill(self, attached: Attached | None) -> Generator[Effect, Result, Forward | Refuse]:
        """Run the P leg: once, and once more cold if that failed."""
        assert self.prompt
        answer = yield from self._ask(attached, avoid=None, last=False)
        # What P says against a prompt of tokens is none of the client's business, who did not send one.
        if isinstance(answer, PrefillError) and not (answer.refusal and (not attached or attached.prompt is None)):
            if attached:
                # If P never saw the handle, or refused to look at it, D is not to blame.
                if answer.failure is not Failure.CONNECT and not answer.refusal:
                    self.judge.read_failed(attached.handle, hung=answer.failure is Failure.TIMEOUT)
                self.facts.outcome, self.facts.detail = Outcome.READ_FAILED, answer.reason
                attached = None
            self.facts.retries += 1
            answer = yield from self._ask(None, avoid=answer.node, last=True)
        if isinstance(answer, PrefillAnswer):
            return self._forward(answer, attached)
        if answer.refusal:
            self.facts.outcome = Outcome.REJECTED
            return answer.refusal
        self.facts.outcome, self.facts.detail = Outcome.PREFILL_FAILED, answer.reason
        self.prefill_node = None
        if self.policy.fallback:
            return self._alone()
        status = 504 if answer.failure is Failure.TIMEOUT else 502
        message = f"kvreturn: no prefill node could process the request ({answer.reason}); try again later"
        kind = "GatewayTimeout" if status == 504 else "BadGateway"  # noqa: PLR2004
        return Refuse(status, self.api.error(message, kind, status))

    def _ask(
        self, attached: Attached | None, avoid: str | None, *, last: bool
    ) -> Generator[Effect, Result, PrefillAnswer | PrefillError]:
        if attached and attached.prompt is not None:
            path, body = Completions.path, prefill_tokens(self.body, attached.prompt, attached.params)
        else:
            params = attached.params if attached else cold(ids=self.ids.of_connector)
            path, body = self.api.path, self.api.prefill_body(self.body, params, ids=self.ids.of_prefill)
        ask = Ask(
            path,
            body,
            tokens=len(self.body.text) // 4,
            prefer=self.prefill_node if self.prefill_node != avoid else None,
            avoid=avoid,
            last=last,
            slack=SLACK_TOKENS[self._hinted],
        )
        return read_prefill(expect(Reply, (yield ask)), self.api)

    def _forward(self, answer: PrefillAnswer, attached: Attached | None) -> Forward:
        assert self.prompt
        expected, self.prefill_node, self.engine = self.prefill_node, answer.node, answer.engine
        self.facts.prefill = answer.usage
        if answer.node:
            self.judge.prefilled(answer.node, answer.engine, proves=answer.report is not None)
        if answer.report or not attached:
            self.facts.local = answer.local
        self.prompt_ids = answer.prompt_ids if self.prompt.identifiable else answer.reported_ids
        if self.facts.outcome is Outcome.RETURNED:
            assert self.taken.record
            self.facts.grade_returned(self.taken.record.prompt, moved=answer.node != expected)
        if attached:
            self.judge.read_succeeded(attached.handle)
            counted = answer.usage.prompt
            if attached.prompt is not None and counted is not None and counted != len(attached.prompt):
                # P's prompt is not the one that was proven, so what it read may not be this prompt's prefix.
                self.facts.outcome, self.facts.detail = Outcome.UNPROVEN, "tokenize_mismatch"
                return self._alone()
            if self.policy.proof == "connector" or answer.report:
                self.facts.grade_report(answer.report)
            else:
                self.facts.grade()
            if attached.prompt is not None:
                self.prompt_ids = json.dumps(attached.prompt, separators=(",", ":")).encode()
        goes_back = self.policy.returns != "lazy" and (self.prompt.identifiable or self.ids.of_connector)
        keep = self.prompt.choices == 1 and (goes_back or self.reads_later)
        params = answer.decode_params(self.prompt_ids if self.ids.to_decode else None, keep=keep)
        put = {PARAMS: params}
        if self.ids.of_decode:
            put["return_token_ids"] = b"true"
        return Forward(self.body.edit(put=put), self.decode_node, self._slack)

    @property
    def _slack(self) -> int | None:
        return None if self.decode_node is None else _SLACK_REQUESTS[self._hinted]

    @property
    def reads_later(self) -> bool:
        """Whether a next turn of this kind may read what this one leaves on D."""
        assert self.prompt
        if self.policy.proof == "router":
            return self.prompt.tokenizable or self.prompt.tokens is not None
        return self.policy.proof != "off"

    @property
    def tenant(self) -> bytes:
        """Whose turn this is."""
        return self._scope.tenant

    @property
    def ids_in_answer(self) -> Ids | None:
        """Whether the answer brings all token ids, and whether the client asked for them."""
        if self.facts.fallback or not self.ids.in_answer:
            return None
        return "hidden" if self.ids.of_decode else "shown"

    def _alone(self) -> Forward:
        self.facts.fallback = True
        return Forward(self.body.text, self.decode_node, self._slack)

    # --- the response ---

    def settle(self, capture: Capture, decode_node: str | None) -> Put | None:
        """What to store, once the handle has passed or the response has ended. Gives something at most once.

        Args:
            capture: the response.
            decode_node: address of the D that really answered, None if that is not known.
        """
        if self._settled or self.trail is None or self.prompt is None or not self.policy.remembers:
            return None
        if self.prompt.alone:
            return None  # D kept nothing for us, and the items may be but a part of the prompt
        capture.collect()
        if self.answer.error or not (capture.handle or self.answer.finish_reasons):
            return None  # failed or cut off: it leaves nothing
        self._settled = True
        return leave(self, capture, decode_node)
