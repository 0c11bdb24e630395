"""What the turn needs to know of an API."""

import abc
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvreturn.core.fingerprint import Trail
from kvreturn.core.jsontext import JSONTextError, ObjectText, loads

HISTORY = 50_000
"""Messages of the longest request, if nothing else is set."""
_WORD = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""A type or code of an error, and no sentence of its text: it goes to traces and logs."""
_APART = ("cache_read_input_tokens", "cache_creation_input_tokens")


class BadRequestError(ValueError):
    """The client's request cannot be processed; the message tells the client why."""


class TooLongError(BadRequestError):
    """The request holds more messages than are taken."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What shapes the prompt of a request.

    Attributes:
        model: the request's `model`, empty if it names none.
        root: what the whole prompt depends on besides `items`.
        items: the prompt in parts, canonical, oldest first.
        has_answer: whether it holds an earlier answer, so that a turn before it must have been.
        choices: how many answers are asked for.
        stream: whether the answer is streamed.
        tokenizable: whether `/tokenize` of vLLM renders exactly this prompt.
        tokens: the prompt's token ids, where the client sent just these.
        passes_ids: whether D takes P's token ids in place of its own tokenizing (vLLM 0.32.0: chat without media).
        identifiable: whether vLLM's answers name the prompt's token ids if asked (`return_token_ids`), and they are all
            that it depends on.
        alone: why only D can run the request, in one word; None if P can do its leg.
        stored: id of the response that the prompt begins with, where that is stored at a node.
    """

    model: str
    root: Any
    items: Sequence[bytes]
    has_answer: bool
    choices: int
    stream: bool
    tokenizable: bool
    tokens: Sequence[int] | None = None
    passes_ids: bool = False
    identifiable: bool = False
    alone: str | None = None
    stored: str | None = None


def is_count(value: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether this is a number of tokens that can be reckoned with, whatever a node says."""
    return type(value) is int and 0 <= value < 2**31


@dataclass(slots=True)
class Usage:
    """Token counts of a response, None where it does not say.

    Attributes:
        prompt: of the prompt, what was cached included.
        completion: of the answer.
        cached: of the prompt, read from a cache.
        written: of the prompt, written to a cache: Messages alone tells that.
    """

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    written: int | None = None

    def read(self, obj: Any) -> None:  # noqa: ANN401 - JSON
        """Take what a `usage` object says; keep what it does not.

        Chat and completions count `prompt_tokens`, Responses and Messages `input_tokens`. Messages alone leaves out of
        it what was cached, and counts that beside it.
        """
        if not isinstance(obj, dict):
            return
        details = obj.get("prompt_tokens_details", obj.get("input_tokens_details"))
        cached = details.get("cached_tokens") if isinstance(details, dict) else obj.get("cache_read_input_tokens")
        prompt = obj.get("prompt_tokens", obj.get("input_tokens"))
        if type(prompt) is int:
            prompt += sum(n for n in (obj.get(name) for name in _APART) if type(n) is int)
        completion = obj.get("completion_tokens", obj.get("output_tokens"))
        written = obj.get("cache_creation_input_tokens")
        counts = (("prompt", prompt), ("completion", completion), ("cached", cached), ("written", written))
        for name, value in counts:
            if is_count(value):
                setattr(self, name, value)


@dataclass(slots=True)
class Answer(abc.ABC):
    """An answer as the client saw it, collected chunk by chunk.

    Attributes:
        usage: as far as the response tells.
        finish_reasons: by choice index.
        error: type or code of an error that came inside a response with status 200, or None.
        id: of the response, in APIs whose responses can be asked for later.
    """

    usage: Usage = field(default_factory=Usage)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    id: str | None = None

    @abc.abstractmethod
    def read(self, obj: Mapping[str, Any], *, stream: bool) -> None:
        """Take a response body (`stream` False) or one chunk of a stream."""

    def read_error(self, error: Any) -> None:  # noqa: ANN401 - JSON
        """Take an `error` object; nothing and null are none."""
        if error:
            code = error.get("code") or error.get("type") if isinstance(error, Mapping) else None
            self.error = str(code) if _WORD.fullmatch(str(code or "")) else "error"

    @abc.abstractmethod
    def items(self, *, strict: bool) -> Sequence[bytes] | None:
        """What the next prompt holds in place of this answer, None if the answer tells nobody for sure.

        Args:
            strict: as for `API.read`.
        """


class API(abc.ABC):
    """An adapter. Stateless.

    Attributes:
        name: for metrics and logs.
        path: of its requests.
        begun: what a streamed answer has in it from its first token on, and not before.
        tokenize: members of a request that vLLM's `/tokenize` takes too.
        keeps: whether nodes may keep responses, to be asked for by their id.
        ours: members of a request that are not for nodes, whatever the client means by them.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    begun: ClassVar[re.Pattern[bytes]]
    tokenize: ClassVar[Collection[str]] = ()
    keeps: ClassVar[bool] = False
    ours: ClassVar[Collection[str]] = ("conversation_id",)

    @abc.abstractmethod
    def read(self, body: ObjectText, *, strict: bool, longest: int = HISTORY) -> Prompt:
        """Read a request.

        Args:
            body: the client's body.
            longest: how many messages or input items it may hold.
            strict: two prompts share items only if nothing at all speaks against equal token prefixes (proof level
                `trusted`). Otherwise tokens are compared later, and items leave out what clients change when they
                replay an answer.

        Raises:
            BadRequestError: the prompt is missing or has no shape the API knows.
            TooLongError: it holds too many messages.
        """

    @abc.abstractmethod
    def prefill_body(self, body: ObjectText, params: bytes, *, ids: bool) -> bytes:
        """The P leg's body: same prompt, one token, not streamed, with `params` as `kv_transfer_params`.

        Args:
            body: the client's body.
            params: raw.
            ids: whether P is to answer with the prompt's token ids; only if `Prompt.identifiable`.
        """

    def tokenize_body(self, body: ObjectText) -> bytes:
        """Body for vLLM's `/tokenize` that renders the same prompt; only if `Prompt.tokenizable`."""
        return body.without({m.name for m in body.members} - set(self.tokenize))

    def extend(self, prompt: Trail, body: ObjectText, answer: Answer, *, strict: bool) -> Trail | None:
        """The trail of the prompt with its answer, as the next request will have it. None if it cannot be known."""
        del body
        items = answer.items(strict=strict)
        return None if items is None else prompt.extend(items)

    @abc.abstractmethod
    def answer(self) -> Answer:
        """An empty answer to collect into."""

    def error(self, message: str, kind: str, code: int) -> bytes:
        """A JSON body in the API's error shape: the OpenAI API's, if it has none of its own."""
        return error_body(message, kind, code)


def prefill_edit(
    body: ObjectText,
    params: bytes,
    limits: Sequence[str],
    more: Mapping[str, bytes] | None = None,
    drop: Collection[str] = (),
) -> bytes:
    """What all APIs have in common on the P leg (protocol.md, "One turn, on the wire", 1).

    Args:
        body: the client's body.
        params: raw `kv_transfer_params`.
        limits: names of the API's output limits; the first is set to 1, the others where the client sent them.
        more: further raw members to set.
        drop: names of further members to drop.
    """
    put = {"stream": b"false", limits[0]: b"1", "kv_transfer_params": params, **(more or {})}
    put |= {name: b"1" for name in [*limits[1:], "n"] if name in body and name not in drop}
    return body.edit(drop=_PREFILL_DROPS.union(drop), put=put)


_PREFILL_DROPS = frozenset(
    {
        "stream_options",  # refused without `stream`
        "min_tokens",  # refused above `max_tokens`
        "logprobs",  # these only cost
        "top_logprobs",
        "prompt_logprobs",
        "echo",
        "best_of",  # several sequences: one handle could not be told from another's
        "use_beam_search",
    }
)

# Members of OpenAI requests that leave the prompt's tokens alone. What is not listed is taken to shape the prompt.
NOT_SHAPING = frozenset(
    {
        *("stream", "stream_options", "n", "best_of", "use_beam_search", "length_penalty", "seed", "user", "metadata"),
        *("temperature", "top_p", "top_k", "min_p", "typical_p", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logit_bias"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("skip_special_tokens", "spaces_between_special_tokens", "priority", "request_id", "return_token_ids"),
        *("return_tokens_as_token_ids", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("parallel_tool_calls", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "allowed_token_ids"),
        *("bad_words", "repetition_detection", "thinking_token_budget"),
        *("max_output_tokens", "max_tool_calls", "include", "stop_sequences", "session_id"),
        *("litellm_session_id", "litellm_metadata", "conversation_id"),
    }
)


def shaping_names(body: ObjectText) -> set[str]:
    """Names of all members that may shape the prompt."""
    return {m.name for m in body.members} - NOT_SHAPING


def shaping(body: ObjectText, besides: Sequence[str]) -> dict[str, Any]:
    """All members that may shape the prompt, decoded, but for those of these names."""
    return {name: body.load(name) for name in sorted(shaping_names(body) - set(besides))}


def read_model(body: ObjectText) -> str:
    """The request's `model`; empty where it names none, as vLLM then takes its own."""
    model = load(body, "model")
    if model is not None and not isinstance(model, str):
        raise BadRequestError("`model` must be a string")
    return model or ""


def read_common(body: ObjectText) -> tuple[int, bool]:
    """Number of choices asked for, and whether the answer is streamed."""
    choices = max(_count(load(body, name)) for name in ("n", "best_of"))
    if load(body, "use_beam_search"):
        choices = max(choices, 2)
    # vLLM also takes 1, "true" and the like for a yes.
    return choices, load(body, "stream") not in (None, False)


def read_list(body: ObjectText, name: str, also: str = "", *, longest: int = HISTORY) -> list[dict[str, Any]]:
    """The list of objects that makes the prompt.

    Args:
        body: the request.
        name: of the member.
        also: what else it may be, for the error's text.
        longest: how many objects it may hold.

    Raises:
        BadRequestError: it is missing, empty, or no list of objects.
        TooLongError: it holds too many.
    """
    value = load(body, name)
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise BadRequestError(f"`{name}` must be {also}a list of at least one object")
    if len(value) > longest:
        raise TooLongError(f"`{name}` holds {len(value)} objects; at most {longest} are taken (limits.history)")
    return value


def error_body(message: str, kind: str, code: int) -> bytes:
    """A JSON body in the OpenAI API's error shape, as vLLM writes it."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}, separators=(",", ":")).encode()


def _count(value: Any) -> int:  # noqa: ANN401 - JSON
    if type(value) is int:
        return value
    return 1 if value is None else 2  # vLLM also takes "3" and 3.0 for 3; what it makes of them is not ours to guess


def load(body: ObjectText, name: str) -> Any:  # noqa: ANN401 - JSON
    """A member of a request, None where it is absent.

    Raises:
        BadRequestError: it is no JSON that can be read.
    """
    raw = body.get(name)
    try:
        return None if raw is None else loads(raw)
    except JSONTextError as e:
        raise BadRequestError(f"`{name}`: {e}") from None
