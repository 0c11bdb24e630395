"""`POST /v1/messages`, the API of Anthropic."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvreturn.core.api.base import (
    API,
    HISTORY,
    Answer,
    Prompt,
    load,
    prefill_edit,
    read_common,
    read_list,
    read_model,
    shaping,
)
from kvreturn.core.api.choices import read_index
from kvreturn.core.api.replay import by_value, cleaned, joined_text, kind_of, without_empty
from kvreturn.core.fingerprint import canonical
from kvreturn.core.jsontext import ObjectText

# Claude Code's, in the system prompt, with a hash that is another one in every request. vLLM renders it to nothing.
_BILLING = "x-anthropic-billing-header"
_SHAPE = ("model", "messages", "system", "cache_salt")
_THINKING = frozenset({"thinking", "redacted_thinking"})
# What a block has besides what the model gets of it. Clients move `cache_control` along from turn to turn.
_EXTRAS = ("cache_control", "citations")
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SERVER_ERROR = 500
# The members of a block that arrive in pieces, by the type of the piece.
_PIECES = {"text_delta": "text", "input_json_delta": "partial_json", "thinking_delta": "thinking"}


class Messages(API):
    """Messages are the items, the system prompt is the first."""

    name = "messages"
    path = "/v1/messages"
    begun = re.compile(rb'"content_block_delta"|"tool_use"')

    def read(self, body: ObjectText, *, strict: bool, longest: int = HISTORY) -> Prompt:
        """See `API.read`."""
        messages = read_list(body, "messages", longest=longest)
        system = load(body, "system")
        model, (_, stream) = read_model(body), read_common(body)
        root: list[Any] = [self.name, model, load(body, "cache_salt")]
        if strict:
            root.append(shaping(body, _SHAPE))
        said = [{"role": "system", "content": system}] if system else []
        return Prompt(
            model=model,
            root=root,
            items=[_message(m, strict=strict) for m in [*said, *messages]],
            has_answer=any(m.get("role") == "assistant" for m in messages),
            choices=1,
            stream=stream,
            tokenizable=False,
        )

    def prefill_body(self, body: ObjectText, params: bytes, *, ids: bool) -> bytes:
        """See `API.prefill_body`."""
        del ids
        return prefill_edit(body, params, ("max_tokens",))

    def answer(self) -> Answer:
        """See `API.answer`."""
        return MessagesAnswer()

    def error(self, message: str, kind: str, code: int) -> bytes:
        """See `API.error`. The kinds are Anthropic's."""
        kind = _ERRORS.get(code, "api_error" if code >= _SERVER_ERROR else "invalid_request_error")
        return json.dumps(
            {"type": "error", "error": {"type": kind, "message": message}}, separators=(",", ":")
        ).encode()


@dataclass(slots=True)
class MessagesAnswer(Answer):
    """The assistant's message."""

    blocks: dict[int, dict[str, Any]] = field(default_factory=dict)
    counted: dict[str, Any] = field(default_factory=dict)

    def read(self, obj: Mapping[str, Any], *, stream: bool) -> None:
        """See `Answer.read`."""
        self.read_error(obj.get("error"))
        message = obj.get("message") if stream else obj
        if isinstance(message, Mapping):
            self._read_message(message)
        self._read_usage(obj.get("usage"))
        delta, index = obj.get("delta"), read_index(obj, 0)
        if isinstance(obj.get("content_block"), dict):
            self.blocks[index] = obj["content_block"]
        elif isinstance(delta, Mapping):
            self._read_stop(delta)
            name = _PIECES.get(kind_of(delta))
            if name and isinstance(delta.get(name), str):
                block = self.blocks.setdefault(index, {})
                block[name] = block.get(name, "") + delta[name]

    def _read_message(self, message: Mapping[str, Any]) -> None:
        content = message.get("content")
        if isinstance(content, list):
            self.blocks = dict(enumerate(b for b in content if isinstance(b, dict)))
        self._read_usage(message.get("usage"))
        self._read_stop(message)

    def _read_stop(self, obj: Mapping[str, Any]) -> None:
        if isinstance(obj.get("stop_reason"), str):
            self.finish_reasons[0] = obj["stop_reason"]

    def _read_usage(self, usage: Any) -> None:  # noqa: ANN401 - JSON
        """Field by field: the first event counts the prompt, the last one perhaps the answer only."""
        if isinstance(usage, dict):
            self.counted |= {k: v for k, v in usage.items() if v is not None}
            self.usage.read(self.counted)

    def items(self, *, strict: bool) -> Sequence[bytes] | None:
        """See `Answer.items`. Under `strict`, an answer with thinking tells nothing: templates drop it later."""
        blocks = [_complete(b) for _, b in sorted(self.blocks.items())]
        if strict and any(kind_of(b) in _THINKING for b in blocks):
            return None
        return [_message({"role": "assistant", "content": blocks}, strict=strict)]


def _complete(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block as it is in a message: with its input, if that arrived in pieces."""
    out = dict(block)
    pieces = out.pop("partial_json", "")
    if pieces:
        value = by_value(pieces)
        out["input"] = value[0] if isinstance(value, list) else value
    return out


def _message(message: Mapping[str, Any], *, strict: bool) -> bytes:
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        return canonical(message)
    if strict:
        return canonical([role, [_strict(b) if isinstance(b, dict) else b for b in blocks]])
    return canonical([role, list(_loose(blocks))])


def _strict(block: Mapping[str, Any]) -> dict[str, Any]:
    """All of it, but for null and marks for caches. A call's input keeps its order, in which vLLM renders it."""
    out = without_empty(block, _EXTRAS)
    return out | {"input": json.dumps(out["input"])} if "input" in out else out


def _loose(blocks: Sequence[Any]) -> Iterator[Any]:
    """What survives clients that replay an answer: no thinking, no ids, pieces of text as one."""
    text = ""
    for block in blocks:
        kind = kind_of(block)
        if kind == "text" and isinstance(block.get("text"), str):
            text += "" if block["text"].startswith(_BILLING) else block["text"]
        elif kind not in _THINKING:
            if text:
                yield text
            text = ""
            yield _other(block)
    if text:
        yield text


def _other(block: Any) -> Any:  # noqa: ANN401 - JSON
    kind = kind_of(block)
    if kind == "tool_use":
        return ["call", block.get("name"), block.get("input") or {}]
    if kind == "tool_result":
        return ["output", joined_text(cleaned(block.get("content"), _EXTRAS)) or ""]
    return without_empty(block, _EXTRAS) if isinstance(block, dict) else block
