"""What is told of a finished turn: the attributes of its trace, and its line in the log."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AttributeValue

from kvreturn.core.legs import PrefillLeg
from kvreturn.core.outcome import Outcome
from kvreturn.core.turn import Turn
from kvreturn.telemetry import genai

Field = str | int | float | bool | None


class Where(TypedDict):
    """What finds a turn in the logs of Envoy and of the nodes."""

    prefill_node: str | None
    decode_node: str | None
    request: str | None


# What is wrong with a deployment more often than with a turn.
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


@dataclass(slots=True)
class Times:
    """Seconds that the parts of a turn took, None for what there was not.

    Attributes:
        prefill: waiting for prefill nodes.
        waited: waiting for prefill nodes and for eager returns.
        first_token: from the client's headers to the first byte of content that the client gets.
        total: from the client's headers to the end.
        lane: how the events of a streamed answer passed, `portable` or `fast`; None if it was not streamed.
    """

    prefill: float = 0.0
    waited: float = 0.0
    first_token: float | None = None
    total: float = 0.0
    lane: str | None = None

    @property
    def streamed(self) -> bool:
        """Whether the answer came as events."""
        return self.lane is not None


def hint(turn: Turn) -> str | None:
    """What an operator should do about a turn's outcome, if it is the deployment that is wrong."""
    return _HINTS.get((turn.facts.outcome, turn.facts.detail or ""))


def attributes(turn: Turn, times: Times, *, answered: bool) -> dict[str, AttributeValue]:
    """What a trace tells of a turn; of what nobody told, nothing.

    Args:
        turn: the turn.
        times: of it.
        answered: whether a decode node answered, to its end or not.
    """
    facts = turn.facts
    prompt = facts.prefill.prompt
    told = genai.of_request(turn.body, turn.prompt) if turn.prompt else {}
    if answered and turn.prompt:
        told |= genai.of_answer(turn.answer, turn.prompt.choices, facts.prefill if prompt is not None else None)
    if times.streamed and times.first_token is not None:
        told["gen_ai.response.time_to_first_chunk"] = times.first_token
    return told | genai.known(
        {
            "kvreturn.outcome": facts.outcome.value,
            "kvreturn.detail": facts.detail,
            "kvreturn.proof": turn.policy.proof,
            "kvreturn.return": facts.going,
            "kvreturn.tokens.prompt": prompt,
            "kvreturn.tokens.computed": facts.computed,
            "kvreturn.tokens.read_back": facts.read,
            "kvreturn.tokens.local": facts.local,
            "kvreturn.tokens.returned": facts.brought or None,
            "kvreturn.handle.age": facts.handle_age,
            "kvreturn.handle.captured": facts.captured,
            "kvreturn.prefill.retries": facts.retries,
            "kvreturn.prefill.fallback": facts.fallback,
        }
    )


def fields(turn: Turn, times: Times, status: int | None, error: str | None, where: Where) -> dict[str, Field]:
    """What a line of the log tells of a turn: flat, the same names in each form of log.

    Args:
        turn: the turn.
        times: of it.
        status: what the client got, None if nothing.
        error: code or type of an error.
        where: it was.
    """
    facts = turn.facts
    return {
        "outcome": facts.outcome.value,
        "detail": facts.detail if facts.detail != facts.outcome else None,
        "api": turn.api.name,
        # A name that no node knows is just what a client wrote.
        "model": printable(turn.prompt.model) if turn.prompt and status == _OK else None,
        "status": status,
        "prompt": facts.prefill.prompt,
        "read": facts.read,
        "local": facts.local,
        "returned": facts.brought or None,
        # P's own answer to a P leg is one token, which is not the turn's.
        "completion": None if isinstance(turn, PrefillLeg) else turn.answer.usage.completion,
        "prefill_ms": _ms(times.prefill),
        "first_token_ms": _ms(times.first_token),
        "total_ms": _ms(times.total),
        "retries": facts.retries,
        "fallback": facts.fallback,
        "captured": facts.captured,
        "lane": times.lane,
        "return": facts.going,
        "session": facts.session,
        "prefill_node": where["prefill_node"],
        "decode_node": where["decode_node"],
        "request": where["request"],
        "error": printable(error) if error else None,
    }


def ids(context: SpanContext) -> dict[str, Field]:
    """A span's ids as fields of a line; none if there is no span."""
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def line(told: Mapping[str, Field]) -> str:
    """The fields as text for people, with `-` for what is not known."""
    shown = {name: value for name, value in told.items() if value is not None or name not in _SOMETIMES}
    detail = shown.pop("detail", None)
    if detail:
        shown["outcome"] = f"{shown['outcome']}({detail})"
    return " ".join(f"{name}={'-' if value is None else value}" for name, value in shown.items())


_OK = 200
# What a line leaves out if there is none; the rest it always has, so that its columns can be found by eye.
_SOMETIMES = frozenset({"completion", "error", "trace_id", "span_id"})


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def printable(text: str) -> str:
    """Text from outside as it may stand in a log line."""
    return "".join(c if c.isprintable() and c != " " else "?" for c in text[:80])
