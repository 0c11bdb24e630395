"""What one line of any log tells. Each line is told apart by itself, so that logs of several kinds may be mixed."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from kvreturn.analyze.fields import CACHED, COMPLETION, CONVERSATION, PROMPT, Unit, first, read_count, read_time
from kvreturn.analyze.observation import MAX_TOKENS, LineError, Measured, Observation, Sizes
from kvreturn.analyze.textlogs import (
    BYTES_PER_TOKEN,
    TURN_LOG,
    access_tokens,
    is_access,
    is_own,
    is_turn,
    read_access,
    read_text,
    read_turn,
)
from kvreturn.core.api import API, Answer, BadRequestError, Chat, Completions
from kvreturn.core.fingerprint import Scope, Trail, canonical
from kvreturn.core.jsontext import JSONTextError, ObjectText, loads

# What a line of `--log-format json` has, if it is text. The other fields of ours have a logger of ours.
_LOG = frozenset({"ts", "level", "logger", "worker", "message", "exception"})
_REQUEST = ("request", "request_body", "body", "input")
_RESPONSE = ("response", "response_body", "output")
_TRACE_BLOCK = 512  # tokens per hash of a Mooncake trace
# The first block of a trace is a system prompt that most conversations share: it finds nothing.
_TRACE_SHARED = 1
_SEGMENT_TOKENS = 64  # of the 256 bytes that `Completions` takes for an item


class LineReader:
    """Reads lines.

    Args:
        unit: of times that are numbers.
    """

    def __init__(self, unit: Unit = "auto") -> None:
        self._unit: Unit = unit
        self._scope = Scope(secrets.token_bytes(16), b"")
        self._own = False  # whether the last line was of our own output

    def read(self, text: bytes) -> Observation | Measured | None:
        """What a line tells; None if it is a request but no turn, or of our own output without a turn.

        Raises:
            LineError: it cannot be used.
        """
        if not text.startswith(b"{"):
            return self._text(text.decode(errors="replace"))
        self._own = False
        try:
            obj = loads(text)
        except JSONTextError:
            raise LineError("not JSON") from None
        if obj.get("logger") == TURN_LOG:
            return read_turn(obj)
        if _is_log(obj):
            return None
        return self._trace(obj) if "hash_ids" in obj else self._object(obj)

    def _text(self, text: str) -> Observation | Measured | None:
        before, self._own = self._own, is_own(text)
        try:
            return read_text(text)
        except LineError:
            if not before or self._own:
                raise
            self._own = True
            return None

    def _object(self, obj: Mapping[str, Any]) -> Observation | None:
        access = is_access(obj)
        if access and not is_turn(obj):
            return None
        conversation, sizes = first(obj, CONVERSATION), _sizes(obj)
        named = conversation not in (None, "")
        if named and sizes:
            return self._named(obj, conversation, sizes)
        inner = _member(obj, _REQUEST)
        for body in (inner, obj):
            if isinstance(body.get("messages"), list):
                return self._request(obj, body, Chat())
            if isinstance(body.get("prompt"), str | list):
                return self._request(obj, body, Completions())
        if not access:
            missing = "`prompt_tokens`" if named else "`conversation_id`, nor a request to find the conversation by"
            raise LineError(f"no {missing}")
        if not named:
            return read_access(obj)
        tokens = access_tokens(obj)
        return self._named(obj, conversation, Sizes(tokens, tokens, estimated=True))

    def _named(self, obj: Mapping[str, Any], conversation: Any, sizes: Sizes) -> Observation:  # noqa: ANN401 - JSON
        # A conversation that changes its model starts anew: the KV is another one.
        key = canonical([conversation, obj.get("model")])
        return Observation(read_time(obj, self._unit), sizes, hashlib.blake2b(key, digest_size=8).digest())

    def _request(self, obj: Mapping[str, Any], body: Mapping[str, Any], api: API) -> Observation:
        ts = read_time(obj, self._unit)
        text = ObjectText(canonical(body))
        try:
            prompt = api.read(text, strict=False)
        except BadRequestError:
            raise LineError("a request that no node would take") from None
        trail = self._scope.trail(prompt.root, prompt.items)
        response = _member(obj, _RESPONSE)
        sizes = _sizes(obj) or _sizes(response)
        if sizes is None:
            tokens = min(sum(map(len, prompt.items)) // BYTES_PER_TOKEN, MAX_TOKENS - 1)
            sizes = Sizes(tokens, tokens, estimated=True)
        if isinstance(api, Completions):
            sizes.known = min(sizes.known, trail.depth * _SEGMENT_TOKENS)
        answer = _answer(response, api)
        whole = api.extend(trail, text, answer, strict=False) if answer.finish_reasons else None
        return Observation(ts, sizes, digests=trail.digests[1:], answered=whole.digests[-1] if whole else None)

    def _trace(self, obj: Mapping[str, Any]) -> Observation:
        """A line of a Mooncake trace: times in ms, and ids of the prompt's blocks in place of the prompt."""
        ts = read_time(obj, "ms" if self._unit == "auto" else self._unit)
        sizes, ids = _sizes(obj), obj["hash_ids"]
        if sizes is None:
            raise LineError("no `input_length`")
        if not isinstance(ids, list) or len(ids) < sizes.prompt // _TRACE_BLOCK:
            raise LineError("`hash_ids` does not fit `input_length`")
        whole = sizes.prompt // _TRACE_BLOCK
        sizes.known = whole * _TRACE_BLOCK
        trail: Trail = self._scope.trail(["hash_ids"], map(canonical, ids[:whole]))
        return Observation(ts, sizes, digests=trail.digests[1 + _TRACE_SHARED :])


def _is_log(obj: Mapping[str, Any]) -> bool:
    """Whether a line is of another logger of ours, or of a library in our processes: they write text."""
    return "level" in obj and (
        str(obj.get("logger")).partition(".")[0] == "kvreturn" or {"logger", "message"} <= obj.keys() <= _LOG
    )


def _sizes(obj: Mapping[str, Any]) -> Sizes | None:
    """Token counts of a line, or of an OpenAI response's `usage`."""
    usage = obj.get("usage")
    source: Mapping[str, Any] = {**obj, **usage} if isinstance(usage, dict) else obj
    prompt = read_count(source, PROMPT)
    if prompt is None:
        return None
    details = source.get("prompt_tokens_details")
    cached = read_count(details if isinstance(details, dict) else source, CACHED)
    return Sizes(prompt, prompt, read_count(source, COMPLETION), cached)


def _member(obj: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A member that is an object, or its JSON as text; one level down where a whole HTTP message was logged."""
    value = first(obj, names)
    if isinstance(value, str):
        try:
            value = loads(value.encode(errors="surrogatepass"))
        except JSONTextError:
            return {}
    if not isinstance(value, dict):
        return {}
    inner = value.get("body")
    return inner if isinstance(inner, dict) else value


def _answer(response: Mapping[str, Any], api: API) -> Answer:
    answer = api.answer()
    answer.read(response, stream=False)
    return answer
