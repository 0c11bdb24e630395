"""What is told of a turn: metrics, one log line, and the record that the next turn finds."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from kvreturn.core.capture import Capture
from kvreturn.core.choice import Fate
from kvreturn.core.fingerprint import keyed_hash
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Reply
from kvreturn.core.turn import Turn
from kvreturn.server import summary
from kvreturn.server.board import Phase, TurnView
from kvreturn.server.world import World
from kvreturn.telemetry.tracing import fail, headers_of

log = logging.getLogger("kvreturn.turn")
CREDENTIALS = ("authorization", "x-api-key")
"""Headers that vLLM's `--api-key` looks at."""
PREFILL_HEADERS = (*CREDENTIALS, "traceparent", "tracestate")
"""What the P leg takes along from the client's request."""
_OK = 200
_FATES: dict[Outcome, Fate] = {
    Outcome.HIT: "used",
    Outcome.PARTIAL_HIT: "used",
    Outcome.RETURNED: "used",
    Outcome.EVICTED: "evicted",
}
"""What the outcome of the next turn says of an eager return."""
_ERRORS = 400
_STATUS = re.compile("[1-5][0-9]{2}")
_LEGS = {"/tokenize": "tokenize"}


class TurnRecord:
    """Follows one turn from its headers to its end.

    Args:
        world: what all exchanges share.
        turn: the turn.
        headers: of its request.

    Attributes:
        request: id that D gets as `x-request-id`; P gets it with `-p1` behind it, and `-p2` and so on when asked again.
    """

    def __init__(self, world: World, turn: Turn, headers: Mapping[str, str]) -> None:
        self.size = 0
        self.request = self._name(world, headers)
        self.late = 0.0  # seconds since what `body` is told of
        self._world = world
        self._turn = turn
        self._credentials = {h: headers[h] for h in CREDENTIALS if h in headers}
        self.trace = world.tracing.turn(turn.api.name, headers)
        self._begun = world.clock()
        self._times = summary.Times()
        self._forwarded_at: float | None = None
        self._status: int | None = None
        self._node: str | None = None
        self._asked = False  # a prefill node
        self._stored = False
        self._ended = False
        self._closed = False
        self._leg: Span = INVALID_SPAN
        self._added = {"request": 0.0, "response": 0.0}
        self._failure: str | None = None
        self._received = 0  # bytes of D's body
        self._moved = self._begun  # when something last happened
        world.board.began(self)

    def _name(self, world: World, headers: Mapping[str, str]) -> str:
        del headers  # vLLM's engine fails on two live requests of one id, so no client's id goes there
        return world.new_id()

    @property
    def kept(self) -> bool:
        """Whether D keeps the response, so that the client may ask for it."""
        return self._turn.api.keeps and self._turn.body.load("store") is not False

    @contextmanager
    def prefill_leg(self, path: str = "") -> Iterator[Mapping[str, str]]:
        """Times a request to a prefill node. Gives the headers that make the node's spans part of the trace."""
        facts, before, self._asked = self._turn.facts, self._times.waited, True
        try:
            with self.waiting(), self.trace.step(_LEGS.get(path, "prefill"), SpanKind.CLIENT) as self._leg:
                self._leg.set_attribute("kvreturn.handle.attached", facts.held is not None and not facts.retries)
                yield headers_of(self._leg)
        finally:
            self._times.prefill += self._times.waited - before
            self._moved = self._world.clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Times what the request waits for others."""
        begun = self._world.clock()
        try:
            yield
        finally:
            self._moved = self._world.clock()
            self._times.waited += self._moved - begun

    def took(self, seconds: float) -> None:
        """A message of Envoy's was under way here for so long."""
        self._added["request" if self._status is None else "response"] += seconds

    def replied(self, reply: Reply) -> None:
        """A prefill node has answered, or not."""
        if reply.status:
            self._leg.set_attribute("http.response.status_code", reply.status)
        error = reply.failure.value if reply.failure else str(reply.status) if reply.status >= _ERRORS else None
        if error:
            fail(self._leg, error)

    def forwarded(self) -> None:
        """The request goes to D."""
        self._forwarded_at = self._world.clock()
        facts = self._turn.facts
        metrics = self._world.metrics
        metrics.retries.inc(facts.retries)
        metrics.fallbacks.inc(facts.fallback)
        metrics.read_tokens.inc(facts.read or 0)
        metrics.prompt_tokens.inc(facts.prefill.prompt or 0)
        if self._asked:  # D alone can run some, which would be legs of 0 s
            metrics.prefill_seconds.observe(self._times.prefill)
        metrics.computed_tokens.inc(facts.computed or 0)
        metrics.saved_tokens.inc(facts.saved)
        if facts.handle_age is not None:
            metrics.handle_age.observe(facts.handle_age)
        self._free()
        self._learn()

    def _free(self) -> None:
        """D need not keep what nobody will read."""
        while self._turn.spare:
            self._world.returns.free(self._turn.spare.pop(), self._credentials)

    def _learn(self) -> None:
        """What this prefill leg tells about those to come."""
        turn, facts, world = self._turn, self._turn.facts, self._world
        record, prefill = turn.taken.record, turn.prefill_node
        if prefill and facts.returned and turn.taken.ticket is not None and facts.outcome in _FATES:
            world.returns.came(turn.taken.ticket, _FATES[facts.outcome], prefill)
        if prefill and record and record.handle and prefill == record.prefill_node and not facts.retries:
            kept = facts.kept(record.prompt)
            if kept is not None:
                world.returns.chooser.noticed(prefill, kept=kept, now=world.clock())
        computed = facts.computed
        if prefill is None or computed is None or facts.retries:
            return  # P did not tell what it did, or did it twice
        read = facts.read or 0
        decode = record.decode_node if record and read else None
        world.cost.observe(prefill, decode, computed=computed, read=read, seconds=self._times.prefill)
        if facts.saved:
            world.metrics.saved_seconds.inc(max(world.cost.seconds_saved(prefill, decode, facts.saved) or 0.0, 0.0))

    def refused(self, status: int) -> None:
        """The client gets an answer from here."""
        self._status = status
        self._ended = True
        if self._forwarded_at is None:
            self._world.metrics.retries.inc(self._turn.facts.retries)

    def responded(self, status: int, node: str | None, content_type: str = "") -> None:
        """The node's headers are here."""
        self._status, self._node, self._moved = status, node, self._world.clock()
        self._times.lane = "portable" if content_type.startswith("text/event-stream") else None
        self.trace.responded(status)

    def passes_in_envoy(self) -> None:
        """The answer takes the fast lane."""
        self._times.lane = "fast"

    def body(self, data: bytes) -> None:
        """Bytes of D's body pass, as D sent them."""
        self._received += len(data)
        self._moved = self._world.clock() - self.late
        if self._times.first_token is None and data and self._begins(data):
            self._times.first_token = self._moved - self._begun
            self.trace.event("first_token", self.late)
            outcome = self._turn.facts.outcome.value
            self._world.metrics.first_token_seconds.labels(outcome, str(self._times.streamed).lower()).observe(
                self._times.first_token
            )

    def _begins(self, data: bytes) -> bool:
        """Whether the client gets content with these bytes. A stream may begin long before its first token."""
        return self._status == _OK and (not self._times.streamed or self._turn.api.begun.search(data) is not None)

    async def settle(self, capture: Capture, *, end: bool) -> None:
        """The handle has passed, or the response has ended: store what there is to store."""
        metrics = self._world.metrics
        if not self._stored and self._status == _OK:
            try:
                await self._leave(capture)
            except Exception:
                # The client's stream goes on; only the next turn of this conversation is cold.
                metrics.capture_failed.inc()
                log.exception("could not settle a turn")
                self._stored = True
        if end and not self._ended:
            self._ended = True
            metrics.capture_failed.inc(capture.failed is not None)
            metrics.oversize.inc(capture.oversize)

    async def _leave(self, capture: Capture) -> None:
        """Store what the turn leaves, and have it go back if that is best."""
        put = self._turn.settle(capture, self._node)
        self._free()
        if put is None:
            return
        self._stored = True
        self.trace.event("terminal_event")
        put = replace(put, record=replace(put.record, trace=self.trace.name))
        # Where the session was is a hint, which costs up to three store calls: the client's answer waits for one only.
        self._world.tasks.start(self._world.note_session(self._turn, put.record))
        with self.trace.step("store") as span:
            ticket = await self._world.put(put, self._turn.tenant)
            if ticket is None:
                fail(span, "store_unavailable")
        metrics = self._world.metrics
        (metrics.captured if put.record.handle and ticket is not None else metrics.missing).inc()
        # Without a ticket, it may be in the store all the same: what is late has not failed. So D keeps its blocks.
        if ticket is not None:
            self._turn.facts.going = self._world.returns.offer(put, ticket, self._credentials)

    def close(self) -> None:
        """The stream is over: say what became of the turn, once."""
        if self._closed:
            return
        self._closed = True
        turn, facts, metrics = self._turn, self._turn.facts, self._world.metrics
        if self._forwarded_at is None:
            if self._status is None:
                facts.outcome = Outcome.CANCELLED
            elif facts.outcome is Outcome.FIRST_TURN:
                facts.outcome = Outcome.REJECTED  # by us, by P, or by D before it had the whole request
        elif self._status is None and not facts.fallback:
            metrics.stranded.inc()
        if self._times.lane:
            metrics.streamed.labels(self._times.lane).inc()
        error = self._failure = self._error()
        self._world.board.ended(self)
        model = turn.prompt.model if turn.prompt else ""
        metrics.turn(facts.outcome, turn.api.name, model, served=self._status == _OK)
        self._tell(error)

    @property
    def _model(self) -> str:
        """The model's name. One that no node knows is just what a client wrote."""
        return summary.printable(self._turn.prompt.model) if self._turn.prompt and self._status == _OK else ""

    def _error(self) -> str | None:
        """What the client got in place of an answer, counted."""
        answer, metrics = self._turn.answer, self._world.metrics
        error = answer.error or (str(self._status) if (self._status or 0) >= _ERRORS else None)
        # Clients may close as soon as they have the end, which is no loss to anybody.
        if self._status is not None and not error and not self._ended and not answer.finish_reasons:
            metrics.incomplete.inc()
            error = "incomplete"
        if error:
            metrics.errors.labels(error if _STATUS.fullmatch(error) or error == "incomplete" else "in_band").inc()
        return error

    def _tell(self, error: str | None) -> None:
        turn, times, now = self._turn, self._times, self._world.clock()
        times.total = now - self._begun
        if self._forwarded_at is not None:
            self._observe(now - self._forwarded_at)
        if self.trace.on:
            self.trace.follows(turn.taken.record.trace if turn.taken.record else None)
            self.trace.end(self._model, summary.attributes(turn, times, answered=self._answered), error)
        advice = summary.hint(turn)
        if advice:
            self._world.warn_once(advice)
        if log.isEnabledFor(logging.INFO):
            told = summary.fields(turn, times, self._status, error, self._where())
            told |= summary.ids(self.trace.context)
            log.info("%s", summary.line(told), extra={"fields": told})

    def _where(self) -> summary.Where:
        """What finds the turn in the logs of others."""
        return {
            "prefill_node": self._turn.prefill_node,
            "decode_node": self._node or self._turn.decode_node,
            "request": self.request or None,
        }

    def view(self) -> TurnView:
        """The turn as it is now, for the admin view."""
        turn, facts, times, now = self._turn, self._turn.facts, self._times, self._world.clock()
        trace = self.trace.name
        return TurnView(
            phase=self._phase(),
            age=now - self._begun,
            quiet=now - self._moved,
            api=turn.api.name,
            model=summary.printable(turn.prompt.model) if turn.prompt else "",
            tenant=keyed_hash(self._world.key, turn.tenant)[:6].hex(),
            session=turn.conversation_key.hex()[-16:] if turn.conversation_key else None,
            outcome=facts.outcome,
            detail=facts.detail if facts.detail != facts.outcome else None,
            status=self._status,
            error=self._failure and summary.printable(self._failure),
            **self._where(),
            request_bytes=self.size,
            response_bytes=self._received,
            prompt=facts.prefill.prompt,
            read=facts.read,
            local=facts.local,
            prefill_ms=times.prefill * 1e3,
            first_token_ms=None if times.first_token is None else times.first_token * 1e3,
            going=facts.going,
            captured=facts.captured,
            trace=trace.split("-")[1] if trace else None,
        )

    def _phase(self) -> Phase:
        if self._closed:
            return "ended"
        if self._received:
            return "streaming"
        if self._forwarded_at is not None or self._status is not None:
            return "decode"
        return "prefill" if self.size else "arriving"

    @property
    def _answered(self) -> bool:
        """Whether a decode node answered, to its end or not."""
        return self._forwarded_at is not None and self._status == _OK

    def _observe(self, decode: float) -> None:
        """Time a turn whose request went on, and to D for so long."""
        metrics = self._world.metrics
        metrics.decode_seconds.observe(decode)
        metrics.added_seconds.labels("request").observe(max(self._added["request"] - self._times.waited, 0.0))
        if self._status is not None:
            metrics.added_seconds.labels("response").observe(self._added["response"])
