"""How a client writes what it was told into its next request."""

import json
from dataclasses import dataclass
from typing import Any

from property.history import Style
from property.wording import Json


@dataclass(frozen=True)
class Item:
    """A part of the prompt.

    Attributes:
        role: whose.
        text: what was said.
        answer: the assistant's message as it came.
        ids: the tokens of an answer, where the client knows them.
        call: id of the tool call that this is the result of.
        picture: URL of an image.
    """

    role: str
    text: str = ""
    answer: Json | None = None
    ids: tuple[int, ...] = ()
    call: str = ""
    picture: str = ""


def dumps(body: Json, style: Style) -> bytes:
    if style.json == "ascii":
        return json.dumps(body, indent=1).encode()
    separators = (",", ":") if style.json == "compact" else None
    return json.dumps(body, ensure_ascii=False, separators=separators).encode()


def message_of(item: Item, style: Style) -> Json:
    if item.role != "assistant":
        message: Json = {"role": item.role, "content": _content(item.text, style)}
        if item.call:
            message["tool_call_id"] = item.call
        if item.picture:
            parts = [{"type": "text", "text": item.text}, {"type": "image_url", "image_url": {"url": item.picture}}]
            message["content"] = parts
        return message
    message = dict(item.answer or {})
    message |= {"role": "assistant", "content": _content(item.text, style)}
    if not item.text:
        message |= {"content": None if style.empty == "null" else ""}
        if style.empty == "missing":
            del message["content"]
    reasoning = message.pop("reasoning", None)
    if reasoning and style.reasoning != "drop":
        message["reasoning" if style.reasoning == "keep" else "reasoning_content"] = reasoning
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call, style) for call in message["tool_calls"]]
    return message


def _call(call: Json, style: Style) -> Json:
    arguments = call["function"]["arguments"]
    try:
        value = json.loads(arguments)
    except ValueError:  # cut off by a length limit
        return call
    if style.arguments == "compact":
        arguments = json.dumps(value, separators=(",", ":"))
    elif style.arguments == "sorted":
        arguments = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _content(text: str, style: Style) -> Any:  # noqa: ANN401 - text or a list of parts
    if style.content == "text":
        return text
    middle = len(text) // 2 if style.content == "parts" else 0
    pieces = [text[:middle], text[middle:]] if middle else [text]
    return [{"type": "text", "text": piece} for piece in pieces]
