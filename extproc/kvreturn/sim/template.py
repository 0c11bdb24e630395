"""Chat templates: messages, tools and template arguments to token ids.

The kinds differ in what makes the next prompt stop being a continuation of the last one: dropped thinking, a tool list
that moves, a date. `plain` has none of that.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from kvreturn.sim.errors import ApiError
from kvreturn.sim.tokenizer import Special, encode


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of template.

    Attributes:
        thinking: what happens to the reasoning of earlier assistant messages. `none`: the model does not think.
            `drop`: it is rendered only after the last user message. `keep`: always.
        tools: where the tool list stands: in the system part, or in the last user message.
        date: how fine a date line in the system part is, if there is one.
        arguments: tool-call arguments as the client sent them, or parsed and written again (as most real templates
            do, so that a client that re-serialises them changes nothing but the order of keys).
    """

    thinking: Literal["none", "drop", "keep"] = "none"
    tools: Literal["top", "last"] = "top"
    date: Literal["", "day", "minute"] = ""
    arguments: Literal["verbatim", "parsed"] = "parsed"


TEMPLATES: dict[str, Template] = {
    "plain": Template(arguments="verbatim"),
    "drop_thinking": Template(thinking="drop"),
    "keep_thinking": Template(thinking="keep"),
    "tools_last": Template(tools="last"),
    "dated": Template(date="day"),
    "dated_minute": Template(date="minute"),
}

_SYSTEM = ("system", "developer")
_ROLES = (*_SYSTEM, "user", "assistant", "tool")
_DATE_FORMATS = {"day": "%Y-%m-%d", "minute": "%Y-%m-%d %H:%M"}


@dataclass(slots=True)
class Prompt:
    """What the engine gets.

    Attributes:
        tokens: token ids.
        images: digest of the image by position of its placeholder token. The placeholder is the same for all images,
            so tokens alone do not tell prompts apart.
        thinks: whether the model will start with a thinking part.
    """

    tokens: list[int] = field(default_factory=list)
    images: dict[int, bytes] = field(default_factory=dict)
    thinks: bool = False

    def special(self, token: Special) -> None:
        """Append a special token."""
        self.tokens.append(int(token))

    def text(self, text: str) -> None:
        """Append ordinary text."""
        self.tokens.extend(encode(text))

    def image(self, url: str) -> None:
        """Append an image's placeholder."""
        self.images[len(self.tokens)] = hashlib.sha256(url.encode("utf-8", "surrogatepass")).digest()
        self.special(Special.IMAGE)

    def open(self, role: str) -> None:
        """Begin a message."""
        self.special(Special.IM_START)
        self.text(f"{role}\n")

    def close(self) -> None:
        """End a message."""
        self.special(Special.IM_END)
        self.text("\n")


@dataclass(frozen=True, slots=True)
class Options:
    """How to end the prompt, and what a template may read besides the messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    enable_thinking: bool = True


def will_think(template: Template, options: Options) -> bool:
    """Whether the model starts with a thinking part after this template's generation prompt."""
    return template.thinking != "none" and options.add_generation_prompt and options.enable_thinking


def render(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    options: Options,
    now: datetime,
) -> Prompt:
    """Render a conversation.

    Args:
        template: the kind of template.
        messages: OpenAI chat messages.
        tools: OpenAI tool definitions.
        options: how to end.
        now: for templates with a date.

    Raises:
        ApiError: (400) the messages cannot be rendered.
    """
    _check(messages, options)
    out = Prompt(thinks=will_think(template, options))
    tool_text = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in tools)
    last_user = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    top = _top(template, tool_text, now)
    if messages[0].get("role") not in _SYSTEM and top:
        messages = [{"role": "system"}, *messages]
        last_user += 1
    for i, message in enumerate(messages):
        role = message["role"]
        out.open("system" if role in _SYSTEM else role)
        if i == 0 and role in _SYSTEM:
            out.text(top)
        if i == last_user and template.tools == "last" and tools:
            out.text(f"Tools:\n{tool_text}")
        if role == "assistant":
            _assistant(out, template, message, recent=i > last_user)
        else:
            _content(out, message.get("content"))
        if not options.continue_final_message or i < len(messages) - 1:
            out.close()
    if options.add_generation_prompt:
        out.open("assistant")
        if template.thinking != "none" and not options.enable_thinking:
            out.special(Special.THINK)
            out.special(Special.END_THINK)
    return out


def _check(messages: Sequence[Mapping[str, Any]], options: Options) -> None:
    if not messages:
        raise ApiError("messages must not be empty", param="messages")
    if any(message.get("role") not in _ROLES for message in messages):
        raise ApiError("Unexpected message role.", param="messages")
    if options.continue_final_message and options.add_generation_prompt:
        raise ApiError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if options.continue_final_message and messages[-1]["role"] != "assistant":
        raise ApiError("continue_final_message needs a final message of the assistant", param="messages")


def _top(template: Template, tool_text: str, now: datetime) -> str:
    date = f"Today: {now.strftime(_DATE_FORMATS[template.date])}\n" if template.date else ""
    return date + (f"Tools:\n{tool_text}" if tool_text and template.tools == "top" else "")


def _assistant(out: Prompt, template: Template, message: Mapping[str, Any], *, recent: bool) -> None:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning and (template.thinking == "keep" or (template.thinking == "drop" and recent)):
        out.special(Special.THINK)
        out.text(str(reasoning))
        out.special(Special.END_THINK)
    _content(out, message.get("content"))
    for i, call in enumerate(message.get("tool_calls") or ()):
        if i:
            out.text("\n")
        name, arguments = _call(template, call)
        out.special(Special.TOOL_CALL)
        out.text(tool_call_text(name, arguments))
        out.special(Special.END_TOOL_CALL)


def tool_call_text(name: str, arguments: str) -> str:
    """What stands between the tool-call markers; the model writes the same."""
    return f'\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n'


def _call(template: Template, call: object) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError("a tool call has no function name", param="messages")
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise ApiError(f"a tool call's arguments are no JSON: {error}", param="messages") from error
    if template.arguments == "verbatim" and isinstance(arguments, str):
        return function["name"], arguments
    return function["name"], json.dumps(parsed, ensure_ascii=False)


def _content(out: Prompt, content: object) -> None:
    if content is None:
        return
    if isinstance(content, str):
        out.text(content)
        return
    if not isinstance(content, list):
        raise ApiError("content must be a string or a list of parts", param="messages")
    for i, part in enumerate(content):
        if i:
            out.text("\n")
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            out.text(part["text"])
        elif kind == "image_url":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else image
            if not isinstance(url, str):
                raise ApiError("an image_url part has no url", param="messages")
            out.image(url)
        else:
            raise ApiError(f"Unknown part type: {kind}", param="messages")


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any message holds something other than text."""
    return any(
        isinstance(part, Mapping) and part.get("type") != "text"
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )
