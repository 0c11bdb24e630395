"""What is told of a turn: metrics, one log line, and the record that the next turn finds."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from opentelemetry.trace import SpanKind

from kvreturn.core.capture import Capture
from kvreturn.core.choice import Fate
from kvreturn.core.fingerprint import keyed_hash
from kvreturn.core.outcome import Outcome
from kvreturn.core.turn import Turn
from kvreturn.server.board import Phase, TurnView
from kvreturn.server.world import World
from kvreturn.telemetry.tracing import headers_of

log = logging.getLogger("kvreturn.turn")
CREDENTIALS = ("authorization", "x-api-key")
"""Headers that vLLM's `--api-key` looks at."""
_OK = 200
_FATES: dict[Outcome, Fate] = {
    Outcome.HIT: "used",
    Outcome.PARTIAL_HIT: "used",
    Outcome.RETURNED: "used",
    Outcome.EVICTED: "evicted",
}
"""What the outcome of the next turn says of an eager return."""
_ERRORS = 400
# What is wrong with a deployment more often than with a turn, said once.
_HINTS = {
    (
        Outcome.UNPROVEN,
        "mac",
    ): "handles fail their MAC: KVRETURN_SECRET must be the same on the router and on all nodes",
    (
        Outcome.UNPROVEN,
        "scope",
    ): "handles are made under another secret: KVRETURN_SECRET must be the same on the router and on all nodes",
    (Outcome.UNPROVEN, "no_digests"): "handles carry no digests: the decode nodes do not run the kvreturn connector",
    (Outcome.UNPROVEN, "no_report"): "P reads no sealed handles: the prefill nodes do not run the kvreturn connector; "
    "with stock prefill nodes set `proof: router`",
    (
        Outcome.EVICTED,
        "all",
    ): "nothing of what went back eagerly is left on P when the next turn comes: is its prefix cache on (vLLM's "
    "--enable-prefix-caching), and large enough?",
    (Outcome.READ_FAILED, "timeout"): "a prefill node did not answer a request that carried a handle: is "
    "bidirectional_kv_xfer on there? Handles of that decode engine are not used for a while",
    (Outcome.DISABLED, "no_transfer_params"): "requests on a route of role prefill ask for no transfer "
    "(do_remote_decode): is the orchestrator made for a KV connector?",
    (Outcome.FOREIGN_HANDLE, "decode_leg"): "decode legs arrive on a route of role prefill: are the two addresses "
    "swapped where the orchestrator is told of them?",
    (Outcome.PREFILL_FAILED, "no_kv_transfer_params"): "prefill nodes answer without kv_transfer_params: do they run "
    "with a KV connector?",
}


class TurnRecord:
    """Follows one turn from its headers to its end.

    Args:
        world: what all exchanges share.
        turn: the turn.
        headers: of its request.
    """

    def __init__(self, world: World, turn: Turn, headers: Mapping[str, str]) -> None:
        self.size = 0
        self._world = world
        self._turn = turn
        self._credentials = {h: headers[h] for h in CREDENTIALS if h in headers}
        self.trace = world.tracing.turn(turn.api.name, headers)
        self._begun = world.clock()
        self._prefill = 0.0
        self._prefilled = False
        self._forwarded = False
        self._first_byte: float | None = None
        self._status: int | None = None
        self._node: str | None = None
        self._stored = False
        self._ended = False
        self._closed = False
        self._failure: str | None = None
        self._received = 0  # bytes of D's body
        self._moved = self._begun  # when something last happened
        world.board.began(self)

    @property
    def kept(self) -> bool:
        """Whether D keeps the response, so that the client may ask for it."""
        return self._turn.api.keeps and self._turn.body.load("store") is not False

    @contextmanager
    def prefill_leg(self) -> Iterator[Mapping[str, str]]:
        """Times a request to a prefill node. Gives the headers that make the node's spans part of the trace."""
        begun = self._world.clock()
        span = self.trace.step("prefill", SpanKind.CLIENT)
        try:
            yield headers_of(span)
        finally:
            span.end()
            self._moved = self._world.clock()
            self._prefill += self._moved - begun

    def forwarded(self) -> None:
        """The request goes to D."""
        self._forwarded = True
        facts = self._turn.facts
        metrics = self._world.metrics
        metrics.retries.inc(facts.retries)
        metrics.fallbacks.inc(facts.fallback)
        metrics.read_tokens.inc(facts.read or 0)
        metrics.prompt_tokens.inc(facts.prefill.prompt or 0)
        metrics.prefill_seconds.observe(self._prefill)
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
        if prefill is None or facts.prefill.prompt is None or facts.local is None or facts.retries:
            return  # P did not tell what it did, or did it twice
        read = facts.read or 0
        decode = record.decode_node if record and read else None
        computed = facts.prefill.prompt - read - facts.local
        world.cost.observe(prefill, decode, computed=computed, read=read, seconds=self._prefill)
        saved = read or (facts.local if facts.returned else 0)
        if saved:
            world.metrics.saved_seconds.inc(max(world.cost.seconds_saved(prefill, decode, saved) or 0.0, 0.0))

    def refused(self, status: int) -> None:
        """The client gets an answer from here."""
        self._status = status
        self._ended = True
        if not self._forwarded:
            self._world.metrics.retries.inc(self._turn.facts.retries)

    def responded(self, status: int, node: str | None) -> None:
        """D's headers are here."""
        self._status, self._node, self._moved = status, node, self._world.clock()

    def body(self, size: int) -> None:
        """So many bytes of D's body pass."""
        self._received += size
        self._moved = self._world.clock()
        if self._first_byte is None:
            self._first_byte = self._moved - self._begun
            self.trace.event("first_byte")
            self._world.metrics.first_byte_seconds.labels(self._turn.facts.outcome.value).observe(self._first_byte)

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
        with self.trace.step("store"):
            ticket = await self._world.put(put, self._turn.tenant)
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
        if not self._forwarded:
            if self._status is None:
                facts.outcome = Outcome.CANCELLED
            elif facts.outcome is Outcome.FIRST_TURN:
                facts.outcome = Outcome.REJECTED  # by us, by P, or by D before it had the whole request
        elif self._status is None and not facts.fallback:
            metrics.stranded.inc()
        error = self._failure = self._error()
        model = turn.prompt.model if turn.prompt else ""
        self._world.board.ended(self)
        metrics.turn(facts.outcome, turn.api.name, model, served=self._status == _OK)
        self.trace.follows(turn.taken.record.trace if turn.taken.record else None)
        self.trace.end(self._model, _attributes(turn), error)
        hint = _HINTS.get((facts.outcome, facts.detail or ""))
        if hint:
            self._world.warn_once(hint)
        log.info(
            "outcome=%s%s api=%s model=%s status=%s prompt=%s read=%s local=%s returned=%s prefill_ms=%.1f "
            "first_byte_ms=%s retries=%d fallback=%s captured=%s return=%s session=%s%s",
            facts.outcome.value,
            f"({facts.detail})" if facts.detail and facts.detail != facts.outcome else "",
            turn.api.name,
            printable(self._model),
            _told(self._status),
            _told(facts.prefill.prompt),
            _told(facts.read),
            _told(facts.local),
            _told(facts.returned or None),
            self._prefill * 1e3,
            "-" if self._first_byte is None else f"{self._first_byte * 1e3:.1f}",
            facts.retries,
            facts.fallback,
            facts.captured,
            facts.going or "-",
            facts.session or "-",
            f" error={printable(error)}" if error else "",
        )

    @property
    def _model(self) -> str:
        """The model's name. One that no node knows is just what a client wrote."""
        return self._turn.prompt.model if self._turn.prompt and self._status == _OK else ""

    def _error(self) -> str | None:
        """What the client got in place of an answer, counted."""
        answer, metrics = self._turn.answer, self._world.metrics
        error = answer.error or (str(self._status) if (self._status or 0) >= _ERRORS else None)
        # Clients may close as soon as they have the end, which is no loss to anybody.
        if self._status is not None and not error and not self._ended and not answer.finish_reasons:
            metrics.incomplete.inc()
            error = "incomplete"
        if error:
            metrics.errors.labels(error if error.isdigit() or error == "incomplete" else "in_band").inc()
        return error

    def view(self) -> TurnView:
        """The turn as it is now, for the admin view."""
        turn, facts, now = self._turn, self._turn.facts, self._world.clock()
        trace = self.trace.name
        return TurnView(
            phase=self._phase(),
            age=now - self._begun,
            quiet=now - self._moved,
            api=turn.api.name,
            model=printable(turn.prompt.model) if turn.prompt else "",
            tenant=keyed_hash(self._world.key, turn.tenant)[:6].hex(),
            session=turn.conversation_key.hex()[-16:] if turn.conversation_key else None,
            outcome=facts.outcome,
            detail=facts.detail if facts.detail != facts.outcome else None,
            status=self._status,
            error=self._failure and printable(self._failure),
            prefill_node=turn.prefill_node,
            decode_node=self._node or turn.decode_node,
            request_bytes=self.size,
            response_bytes=self._received,
            prompt=facts.prefill.prompt,
            read=facts.read,
            local=facts.local,
            prefill_ms=self._prefill * 1e3,
            first_byte_ms=None if self._first_byte is None else self._first_byte * 1e3,
            going=facts.going,
            captured=facts.captured,
            trace=trace.split("-")[1] if trace else None,
        )

    def _phase(self) -> Phase:
        if self._closed:
            return "ended"
        if self._received:
            return "streaming"
        if self._forwarded or self._status is not None:
            return "decode"
        return "prefill" if self.size else "arriving"


def _attributes(turn: Turn) -> dict[str, str | int | float | bool | Sequence[str]]:
    """What a trace tells of a turn; of what nobody told, nothing."""
    facts, usage = turn.facts, turn.answer.usage
    prompt = facts.prefill.prompt
    computed = None if prompt is None or facts.local is None else prompt - facts.local - (facts.read or 0)
    told: dict[str, str | int | float | bool | Sequence[str] | None] = {
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.output_tokens": usage.completion,
        "gen_ai.response.finish_reasons": [r for _, r in sorted(turn.answer.finish_reasons.items())] or None,
        "kvreturn.outcome": facts.outcome.value,
        "kvreturn.detail": facts.detail,
        "kvreturn.proof": turn.policy.proof,
        "kvreturn.return": facts.going,
        "kvreturn.tokens.prompt": prompt,
        "kvreturn.tokens.computed": computed,
        "kvreturn.tokens.read_back": facts.read,
        "kvreturn.tokens.local": facts.local,
        "kvreturn.tokens.returned": facts.returned or None,
        "kvreturn.handle.age": facts.handle_age,
        "kvreturn.handle.captured": facts.captured,
        "kvreturn.prefill.retries": facts.retries,
        "kvreturn.prefill.fallback": facts.fallback,
    }
    return {name: value for name, value in told.items() if value is not None}


def _told(value: int | None) -> str:
    return "-" if value is None else str(value)


def printable(text: str) -> str:
    """Text from outside as it may stand in a log line."""
    return "".join(c if c.isprintable() and c != " " else "?" for c in text[:80]) or "-"
