"""`POST /v1/chat/completions`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvreturn.core.api.base import (
    API,
    HISTORY,
    Answer,
    Prompt,
    prefill_edit,
    read_common,
    read_list,
    read_model,
    shaping,
    shaping_names,
)
from kvreturn.core.api.choices import ChoicesAnswer, read_index, say
from kvreturn.core.api.replay import by_value, joined_text, without_empty
from kvreturn.core.fingerprint import Trail, canonical
from kvreturn.core.jsontext import ObjectText

# Members that vLLM 0.32.0's /tokenize renders as the chat endpoint does. A request with any other member that may shape
# the prompt is not tokenizable.
_TOKENIZE = (
    *("model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "mm_processor_kwargs"),
)
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TOKENIZE_SAFE = frozenset({"model", "messages", "tools", "chat_template_kwargs", "cache_salt"})


class Chat(API):
    """Messages are the items, so every message boundary can end a predecessor."""

    name = "chat"
    path = "/v1/chat/completions"
    begun = re.compile(rb'"(?:content|refusal|reasoning|reasoning_content|name|arguments)": ?"[^"]')
    tokenize = _TOKENIZE

    def read(self, body: ObjectText, *, strict: bool, longest: int = HISTORY) -> Prompt:
        """See `API.read`."""
        messages = read_list(body, "messages", longest=longest)
        model, (choices, stream) = read_model(body), read_common(body)
        text = not any(_multimodal(m) for m in messages)
        root: list[Any] = [self.name, model, body.load("cache_salt")]
        if strict:
            root.append(shaping(body, ("model", "messages", "cache_salt")))
        return Prompt(
            model=model,
            root=root,
            items=[_message(m, strict=strict) for m in messages],
            has_answer=any(m.get("role") == "assistant" for m in messages),
            choices=choices,
            stream=stream,
            tokenizable=text and _tokenizable(body),
            passes_ids=text,
            identifiable=text,
        )

    def prefill_body(self, body: ObjectText, params: bytes, *, ids: bool) -> bytes:
        """See `API.prefill_body`."""
        more = {"return_token_ids": b"true"} if ids else {}
        return prefill_edit(body, params, ("max_tokens", "max_completion_tokens"), more)

    def extend(self, prompt: Trail, body: ObjectText, answer: Answer, *, strict: bool) -> Trail | None:
        """See `API.extend`. With `continue_final_message` the answer is the end of a message that has begun."""
        if not body.load("continue_final_message"):
            return super().extend(prompt, body, answer, strict=strict)
        begun = read_list(body, "messages")[-1]
        if strict or not isinstance(answer, ChatAnswer) or begun.get("role") != "assistant":
            return None
        content = joined_text(begun.get("content")) or ""
        if not isinstance(content, str):
            return None
        # With `echo` the answer repeats what there was.
        whole = answer if body.load("echo") else replace(answer, content=[content, *answer.content])
        return Trail(prompt.key, prompt.digests[:-1]).extend(whole.items(strict=False) or ())

    def answer(self) -> Answer:
        """See `API.answer`."""
        return ChatAnswer()


@dataclass(slots=True)
class ChatAnswer(ChoicesAnswer):
    """The assistant message of the first choice."""

    content: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    reasoned: bool = False
    tool_calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def read_choice(self, choice: Mapping[str, Any], *, stream: bool) -> None:
        """See `Answer.read_choice`."""
        message = choice.get("delta" if stream else "message")
        if not isinstance(message, dict):
            return
        content, refusal, calls = message.get("content"), message.get("refusal"), message.get("tool_calls")
        if isinstance(content, str):
            say(self.content, content)
        if isinstance(refusal, str):
            say(self.refusal, refusal)
        # vLLM's name, and the older one that others use.
        if not self.reasoned and (message.get("reasoning") or message.get("reasoning_content")):
            self.reasoned = True
        for position, call in enumerate(calls) if isinstance(calls, list) else ():
            if isinstance(call, Mapping):
                self._read_call(read_index(call, position), call)

    def _read_call(self, index: int, call: Mapping[str, Any]) -> None:
        known = self.tool_calls.setdefault(index, {"id": "", "type": "", "name": "", "arguments": ""})
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        for name, value in (("id", call.get("id")), ("type", call.get("type")), ("name", function.get("name"))):
            if isinstance(value, str):
                known[name] = value
        if isinstance(function.get("arguments"), str):
            known["arguments"] += function["arguments"]

    def items(self, *, strict: bool) -> Sequence[bytes] | None:
        """See `Answer.items`. Under `strict`, an answer with reasoning tells nothing: templates drop it later."""
        if strict and self.reasoned:
            return None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.refusal:
            message["refusal"] = "".join(self.refusal)
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c["id"], "type": c["type"], "function": {"name": c["name"], "arguments": c["arguments"]}}
                for _, c in sorted(self.tool_calls.items())
            ]
        return [_message(message, strict=strict)]


def _tokenizable(body: ObjectText) -> bool:
    names = shaping_names(body)
    # For "none", vLLM may leave the tools out (--exclude-tools-when-tool-choice-none).
    if "tool_choice" in names and body.load("tool_choice") != "none":
        names.discard("tool_choice")
    return names <= _TOKENIZE_SAFE


def _message(message: Mapping[str, Any], *, strict: bool) -> bytes:
    if strict:
        return canonical(without_empty(message))
    # Nearly all messages are plain text. For these the JSON is spared: it is as much work as to read the whole body.
    # What is written here begins with a letter, so that it is never the JSON of another message.
    role, content = message.get("role"), joined_text(message.get("content"))
    plain = isinstance(role, str) and role in _ROLES and isinstance(content, str) and content
    if plain and not (message.get("refusal") or message.get("tool_calls")):
        return f"{role} {content}".encode(errors="surrogatepass")
    return canonical(_loose(message))


def _loose(message: Mapping[str, Any]) -> dict[str, Any]:
    """What survives clients that replay an answer: no reasoning, no ids, tool arguments by value."""
    out: dict[str, Any] = {"role": message.get("role")}
    content = joined_text(message.get("content"))
    if content:
        out["content"] = content
    if message.get("refusal"):
        out["refusal"] = message["refusal"]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        out["tool_calls"] = [_call(c) for c in calls]
    return out


def _call(call: Any) -> Any:  # noqa: ANN401 - JSON
    function = call.get("function") if isinstance(call, dict) else None
    return [function.get("name"), by_value(function.get("arguments"))] if isinstance(function, dict) else call


def _multimodal(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and not all(
        isinstance(p, str) or (isinstance(p, dict) and p.get("type") == "text") for p in content
    )
