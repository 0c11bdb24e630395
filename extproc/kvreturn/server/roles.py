"""Roles `prefill` and `decode`: exchanges of an orchestrator that sends both legs of a turn through Envoy.

docs/roles.md has the picture. The orchestrator is trusted: its transfer parameters, request ids and headers stay.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    HttpHeaders,
    ProcessingRequest,
)
from kvreturn.core.address import split_seat
from kvreturn.core.api import API
from kvreturn.core.capture import BodyCapture
from kvreturn.core.handle import PARAMS
from kvreturn.core.identity import find_session
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.legs import DecodeLeg, PrefillLeg
from kvreturn.core.policy import Policy
from kvreturn.core.ports import Put, Refuse, Reply
from kvreturn.core.refusal import strip_refusal
from kvreturn.core.scrub import OWN_HEADERS
from kvreturn.envoy.names import PREFILL_NODE_KEY
from kvreturn.server import summary
from kvreturn.server.drive import drive
from kvreturn.server.exchange import Exchange
from kvreturn.server.intake import stored_response, turn_api
from kvreturn.server.messages import (
    CONTINUE_RESPONSE_HEADERS,
    Headers,
    Message,
    headers_answer,
    immediate,
    read_headers,
    read_upstream,
    towards,
)
from kvreturn.server.record import PREFILL_HEADERS, TurnRecord
from kvreturn.server.request import Mode, RequestSide
from kvreturn.server.response import ResponseSide
from kvreturn.server.world import World

log = logging.getLogger("kvreturn.turn")
_OK, _ERRORS = 200, 400
L = TypeVar("L", PrefillLeg, DecodeLeg)


class _LegExchange(Exchange):
    """What both roles have in common. Little is refused: what Envoy's set-up makes impossible, and what `_Leg` does."""

    _keeps = False  # nodes of this role keep responses for clients

    async def _request_headers(self, message: HttpHeaders) -> list[Message]:
        self._headers = read_headers(message.headers)
        if self._keeps and stored_response(self._headers):
            return await super()._request_headers(message)
        api = turn_api(self._headers)
        changes = self._own()
        if message.end_of_stream or not api:
            return self._leave(changes)
        self._looks = True
        request = self._request = RequestSide(self._config, self._limits.request_bytes)
        if not request.readable or self._config.response_body_mode == Mode.NONE:
            return self._refuse_setup()
        self._begin(api)
        if not request.routes_first:
            return request.open()
        return request.open(self._outward(changes), self._metadata(changes, None))

    def _own(self) -> Headers:
        return Headers(remove=[name for name in self._headers if name.startswith(OWN_HEADERS)])

    def _refusal(self) -> Refuse | None:
        return None

    def _read_as(self, kind: type[L], api: API) -> L:
        world, self._api = self._world, api
        session = partial(find_session, self._headers, own=world.settings.session_header)
        return kind(api, world.scope(self._headers), self._policy, world.judge, session)

    def _policy(self, model: str) -> Policy:
        """As for the gateway, but lazy: for an eager return one must be there when both legs are over."""
        policy = replace(self._world.policy(model), returns="lazy")
        tenant = self._world.settings.tenant_header
        if tenant and not self._headers.get(tenant.lower()):
            self._world.warn_once(f"requests on routes of roles come without {tenant}: nothing is reused for them")
            return replace(policy, proof="off")
        return policy

    async def _proceed(self, request: RequestSide) -> list[Message]:
        if self._turn is None or self._record is None:
            return await super()._proceed(request)
        if not request.complete or self._forwarded:
            return []
        self._forwarded = True
        headers = {h: self._headers[h] for h in PREFILL_HEADERS if h in self._headers}
        decision = await drive(self._turn, request.take(), self._world, self._record, headers)
        if isinstance(decision, Refuse):
            return self._answer(decision)
        changes = self._outward(self._own())
        return request.forward(decision.body, changes, self._metadata(changes, decision.decode_node, decision.slack))


class PrefillExchange(_LegExchange):
    """Role `prefill`: a request to a prefill node gets the handle of its conversation."""

    _leg: PrefillLeg

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._timer = ExitStack()
        self._traced: Mapping[str, str] | None = None
        self._chosen: str | None = None
        self._tokens = 0
        self._reply = Reply(None)
        self._note: Put | None = None

    def _begin(self, api: API) -> None:
        self._turn = self._leg = self._read_as(PrefillLeg, api)
        self._record = PrefillRecord(self._world, self._leg, self._headers)

    def _outward(self, changes: Headers) -> Headers:
        assert self._record
        if self._traced is None:
            self._traced = self._timer.enter_context(self._record.prefill_leg())
        changes.set.update(self._traced)
        changes.remove.append("accept-encoding")  # a compressed answer could not be looked into
        return changes

    def _metadata(self, changes: Headers, prefer: str | None, slack: int | None = None) -> list[tuple[str, str]]:
        if self._chosen is None:
            self._chosen = self._world.prefill.choose(prefer, slack=slack)
            if self._chosen:
                length = self._headers.get("content-length", "")
                self._tokens = int(length) // 4 if length.isascii() and length.isdigit() else 0
                self._world.prefill.started(self._chosen, self._tokens)
        return towards(self._chosen, changes, PREFILL_NODE_KEY)

    def close(self) -> None:
        """See `Exchange.close`."""
        if self._chosen:
            self._world.prefill.finished(self._chosen, self._tokens)
            self._chosen = None
        self._timer.close()
        super().close()

    async def _response_headers(self, message: ProcessingRequest) -> list[Message]:
        if not self._looks:
            return [CONTINUE_RESPONSE_HEADERS]
        assert self._record
        headers = read_headers(message.response_headers.headers)
        status, node = int(headers.get(":status", "0") or 0), self._answered_by(read_upstream(message))
        if self._leg.is_ours(status):
            again = await self._again(status)
            if again:
                return again
        self._record.responded(status, node)
        self._reply = Reply(node, status)
        self._record.replied(self._reply)
        capture = BodyCapture(self._leg.answer, self._limits.response_bytes, rewrite=self._read_answer)
        self._response = ResponseSide(self._config.response_body_mode, capture, None)
        if message.response_headers.end_of_stream:
            await self._settle(end=True)
        return [headers_answer(response=True, common=CommonResponse())]

    def _answered_by(self, upstream: str | None) -> str | None:
        """The engine that answered, by the node that Envoy names and the rank that was asked for."""
        if upstream is None or self._chosen is None:
            return upstream or self._chosen
        return self._world.prefill.seat(upstream, split_seat(self._chosen)[1])

    async def _again(self, status: int) -> list[Message] | None:
        """Ask once more, cold: what our handle breaks is not the orchestrator's fault. None if that fails too."""
        assert self._record
        ask = replace(self._leg.failed(status), avoid=self._chosen)
        headers = {h: self._headers[h] for h in PREFILL_HEADERS if h in self._headers}
        headers["x-request-id"] = self._world.new_id()  # the first request may be alive still
        reply = await self._world.client.ask(ask, headers, self._world.settings.prefill.timeout)
        if reply.status != _OK:
            return None
        self._record.responded(reply.status, reply.node)
        self._reply = reply
        body = self._read_answer(reply.body)
        await self._keep_note()
        self._record.refused(reply.status)
        self.over = True
        return [immediate(reply.status, body, "retried", {"content-type": reply.content_type})]

    def _read_answer(self, body: bytes) -> bytes:
        assert self._record
        self._timer.close()
        self._note = self._leg.answered(replace(self._reply, body=body))
        if self._reply.status >= _ERRORS:
            return strip_refusal(body, self._api, self._reply.status)
        self._record.forwarded()
        # P's prompt was not the one that was proven. Without its parameters, D computes by itself.
        return ObjectText(body).without([PARAMS]) if self._leg.facts.fallback else body

    async def _settle(self, *, end: bool) -> None:
        await self._keep_note()
        await super()._settle(end=end)

    async def _keep_note(self) -> None:
        """Before the orchestrator has P's answer: it cannot send the D leg earlier."""
        if self._note:
            note, self._note = self._note, None
            await self._world.guard.put(note)  # no session of a tenant's, so past the quota


class DecodeExchange(_LegExchange):
    """Role `decode`: the handle is taken out of the decode node's answer, and kept."""

    _keeps = True

    def _begin(self, api: API) -> None:
        self._turn = self._read_as(DecodeLeg, api)
        self._record = DecodeRecord(self._world, self._turn, self._headers)

    def _outward(self, changes: Headers) -> Headers:
        if self._record:
            changes.set.update(self._record.trace.decode())
        changes.remove.append("accept-encoding")
        return changes


class _LegRecord(TurnRecord):
    """Of a turn, one leg is seen."""

    def body(self, data: bytes) -> None:
        """See `TurnRecord.body`: P answers no client, and D's leg does not tell when the turn began."""
        self._received += len(data)
        self._moved = self._world.clock()

    def _name(self, world: World, headers: Mapping[str, str]) -> str:
        del world  # the orchestrator's goes on to the node
        return summary.printable(headers.get("x-request-id", ""))


class PrefillRecord(_LegRecord):
    """The turn up to P's answer: what is behind that is seen where its D leg passes."""

    @property
    def _answered(self) -> bool:
        return False

    def _observe(self, decode: float) -> None:
        del decode
        self._world.metrics.added_seconds.labels("request").observe(self._added["request"])


class DecodeRecord(_LegRecord):
    """The turn's outcome is counted where its P leg passes; here, what it leaves."""

    def close(self) -> None:
        """See `TurnRecord.close`."""
        if self._closed:
            return
        self._closed = True
        facts, error = self._turn.facts, self._error()
        self._world.board.left(self)
        told: dict[str, summary.Field] = {
            "leg": "decode",
            "api": self._turn.api.name,
            "model": summary.printable(self._model),
            "status": self._status,
            "captured": facts.captured,
            "session": facts.session,
            "decode_node": self._node,
            "request": self.request or None,
            "error": summary.printable(error) if error else None,
        }
        told |= summary.ids(self.trace.context)
        self.trace.end(self._model, {"kvreturn.handle.captured": facts.captured}, error)
        log.info("%s", summary.line(told), extra={"fields": told})
