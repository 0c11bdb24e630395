"""Lines of kvreturn's turn log, as text and as JSON, and of Envoy's access log in its default form and Istio's."""

import re
from collections.abc import Mapping
from typing import Any

from kvreturn.analyze.fields import to_seconds
from kvreturn.analyze.observation import LineError, Measured, Observation, Sizes
from kvreturn.core.api.base import is_count
from kvreturn.core.fingerprint import keyed_hash
from kvreturn.core.outcome import Outcome

BYTES_PER_TOKEN = 4
"""Of JSON with English text or code in it; a rule of thumb."""
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_OK = range(200, 300)
_OUTCOME = re.compile(r"\boutcome=([a-z_]+)")
_COUNTS = ("prompt", "read", "local", "returned")
_MEMBER = re.compile(rf" ({'|'.join(_COUNTS)})=([0-9]+)(?= |$)")
TURN_LOG = "kvreturn.turn"
"""Name of its logger, in each form."""
_DECODE_LEG = "leg=decode "  # the second line of a turn whose legs an orchestrator sends; the first one has the outcome
# Istio puts four more fields between the response flags and the bytes.
_ACCESS = re.compile(
    r'\[(?P<start_time>[^\]]+)\] "(?P<method>\S+) (?P<path>\S+) [^"]*" (?P<response_code>\d+) \S+ '
    r'(?:\S+ \S+ "[^"]*" )?(?P<bytes_received>\d+) \d+ \S+ \S+ "(?P<x_forwarded_for>[^"]*)" "(?P<user_agent>[^"]*)"'
)
# A line of our processes, whatever a collector has put in front of it.
_OWN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ (?:worker \d+ )?(?P<logger>[\w.]+) (?P<message>.*)")
# What else is in our output: `kvreturn up` names the source; Envoy's access log as `kvreturn envoy-config` configures
# it (of P legs too, so its lines are no turns); Envoy's own log as `kvreturn up` has it, and in its default form.
_BESIDE = re.compile(
    r" *(?:router|envoy|kvreturn) \| "
    r"|\S+ .*-> \d+ .*\bnode=\S+ .*\bin=\d+ out=\d+"
    r"|\d\d:\d\d:\d\d\.\d{3} [a-z]+ \S+: "
    r"|\[\d{4}-\d\d-\d\d [\d:.]+\]\[\d+\]\[[a-z]+\]\[\w+\] "
)
_HEAD, _WHOLE = 400, 4_096  # characters that hold a line's beginning with what a collector put there; a line of Envoy's


def read_text(text: str) -> Measured | Observation | None:
    """What a line tells; None if it is a request but no turn, or of our own output without a turn.

    Raises:
        LineError: it tells nothing.
    """
    own = _OWN.search(text[:_HEAD])
    if own and (own["logger"] != TURN_LOG or own["message"].startswith(_DECODE_LEG)):
        return None
    outcome = _OUTCOME.search(text)
    if outcome:
        return _measured(outcome[1], text)
    if own:
        raise LineError("a turn without an outcome")
    access = _ACCESS.match(text)
    if access:
        return read_access(access.groupdict())
    if _BESIDE.match(text[:_WHOLE]):
        return None
    raise LineError("neither JSON nor a line of a turn log or an access log")


def is_own(text: str) -> bool:
    """Whether a line is of our own output. Text behind it that is none of these belongs to it: a traceback."""
    return bool(_OWN.search(text[:_HEAD]) or _BESIDE.match(text[:_WHOLE]))


def is_access(obj: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a line of an Envoy access log, named as Envoy's and Istio's documentation does."""
    return "bytes_received" in obj and "response_code" in obj


def is_turn(access: Mapping[str, Any]) -> bool:
    """Whether an access log's line is of a request that a model answered."""
    path = str(access.get("path") or "").partition("?")[0]
    code = str(access["response_code"])
    return access.get("method", "POST") == "POST" and path.endswith(_PATHS) and code.isdigit() and int(code) in _OK


def access_tokens(access: Mapping[str, Any]) -> int:
    """Tokens of a request, by its bytes.

    Raises:
        LineError: no bytes.
    """
    received = str(access["bytes_received"])
    if not received.isdigit():
        raise LineError("`bytes_received` is not a number")
    return min(int(received) // BYTES_PER_TOKEN, 2**31 - 1)


def read_access(access: Mapping[str, Any]) -> Observation | None:
    """A turn of an access log that names no conversation; None for what is no turn."""
    if not is_turn(access):
        return None
    tokens = access_tokens(access)
    address = access.get("x_forwarded_for") or ""
    if address in {"", "-"}:
        address = str(access.get("downstream_remote_address") or "").rpartition(":")[0]
    client = keyed_hash(b"", f"{address}\0{access.get('user_agent') or ''}".encode())
    sizes = Sizes(tokens, tokens, estimated=True)
    return Observation(to_seconds(access.get("start_time"), "auto"), sizes, client=client)


def read_turn(obj: Mapping[str, Any]) -> Measured | None:
    """What a JSON line of the turn log tells; None if it is a decode leg's, whose turn has a line already.

    Raises:
        LineError: it cannot be read.
    """
    if obj.get("leg") == "decode":
        return None
    return _word(str(obj.get("outcome")), {name: obj[name] for name in _COUNTS if is_count(obj.get(name))})


def _measured(outcome: str, text: str) -> Measured:
    return _word(outcome, {name: int(value) for name, value in _MEMBER.findall(text)})


def _word(outcome: str, counts: Mapping[str, int]) -> Measured:
    try:
        word = Outcome(outcome)
    except ValueError:
        raise LineError("an outcome in it that kvreturn does not write") from None
    return Measured(word, *(counts.get(name) for name in _COUNTS))
