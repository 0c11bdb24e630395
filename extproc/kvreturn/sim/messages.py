"""`POST /v1/messages`: as in vLLM, a chat request underneath, whose answer is told in Anthropic's words."""

import json
import uuid
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from kvreturn.sim import serving
from kvreturn.sim.chat import chunks, prepare, whole
from kvreturn.sim.errors import ApiError
from kvreturn.sim.protocol import ChatRequest, parse_json, validate
from kvreturn.sim.serving import NODE, Json

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesRequest(BaseModel):
    """The members that do something here. Whatever else a client sends is accepted and ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int = Field(gt=0)
    system: str | list[dict[str, Any]] | None = None
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


async def messages(request: web.Request) -> web.StreamResponse:
    """Handle one request."""
    engine = request.app[NODE].engine_for(request.headers)
    asked = validate(MessagesRequest, parse_json(await request.read()))
    try:
        body = validate(ChatRequest, _chat(asked))
        body.check()
        engine.check_alive()
        turn = prepare(request, engine, body)
        if not body.stream:
            return serving.json_response(_message(await whole(engine, turn)))
    except ApiError as error:
        engine.reject(asked.kv_transfer_params)
        told = {"type": "error", "error": {"type": error.kind, "message": str(error)}}
        return serving.json_response(told, error.status)
    except CancelledError:
        engine.reject(asked.kv_transfer_params)
        raise
    return await serving.stream_named(request, _events(chunks(engine, turn)))


# --- requests ---


def _chat(asked: MessagesRequest) -> Json:
    """The chat request that vLLM makes of it."""
    said: list[Json] = []
    system = _system(asked.system)
    if system:
        said.append({"role": "system", "content": system})
    for message in asked.messages:
        said += _said(message)
    choice = asked.tool_choice or {}
    body: Json = {
        "messages": said,
        "max_completion_tokens": asked.max_tokens,
        "stop": asked.stop_sequences,
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
        "stream_options": {"include_usage": True, "continuous_usage_stats": True} if asked.stream else None,
    }
    if asked.tools:
        body["tools"] = [_tool(tool) for tool in asked.tools]
        named = {"type": "function", "function": {"name": choice.get("name")}}
        body["tool_choice"] = _CHOICES.get(choice.get("type", "auto"), named)
    if (asked.thinking or {}).get("type") == "disabled":
        body["reasoning_effort"] = "none"
    same = ("model", "stream", "temperature", "top_p", "chat_template_kwargs", "cache_salt", "kv_transfer_params")
    return body | {name: getattr(asked, name) for name in same}


def _tool(tool: Mapping[str, Any]) -> Json:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [block.get("text") or "" for block in system]
    return "".join(text for text in texts if not text.startswith("x-anthropic-billing-header"))


def _said(message: Mapping[str, Any]) -> list[Json]:
    """The chat messages of one message: results of tools come before what is said with them."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    results: list[Json] = []
    parts: list[Json] = []
    calls: list[Json] = []
    thinking = ""
    for block in content:
        match block.get("type"):
            case "text":
                parts += [{"type": "text", "text": block["text"]}] if block.get("text") else []
            case "image":
                parts.append({"type": "image_url", "image_url": {"url": _url(block.get("source") or {})}})
            case "thinking":
                thinking += block.get("thinking") or ""
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block)})
    out: Json = {"role": role}
    if parts:
        only_text = len(parts) == 1 and parts[0]["type"] == "text"
        out["content"] = parts[0]["text"] if only_text else parts
    out |= {"tool_calls": calls} if calls else {}
    out |= {"reasoning": thinking} if thinking else {}
    return results if role == "user" and not parts else [*results, out]


def _url(source: Mapping[str, Any]) -> str:
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _result(block: Mapping[str, Any]) -> str:
    content = block.get("content")
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content if part.get("type") == "text")
    return content or ""


# --- answers ---


def _usage(usage: Json) -> Json:
    """Anthropic counts what was cached apart from the other input."""
    out: Json = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"] or 0}
    details = usage.get("prompt_tokens_details")
    if details:
        cached, created = details["cached_tokens"], details["created_cache_tokens"]
        out["input_tokens"] = max(0, out["input_tokens"] - cached - created)
        out |= {"cache_creation_input_tokens": created, "cache_read_input_tokens": cached}
    return out


def _stop(choice: Mapping[str, Any], *, called: bool) -> Json:
    """Why it ended. A stop string counts only where no tool is called; a call by name ends with `stop`."""
    finish, stop = choice["finish_reason"], choice["stop_reason"]
    if called and finish != "length":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if finish == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOPS.get(finish, "end_turn"), "stop_sequence": None}


def _message(answer: Json) -> Json:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or ()
    content: list[Json] = []
    if message["reasoning"]:
        content.append({"type": "thinking", "thinking": message["reasoning"], "signature": uuid.uuid4().hex})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    out: Json = {
        "id": answer["id"],
        "type": "message",
        "role": "assistant",
        "content": content or [{"type": "text", "text": ""}],
        "model": answer["model"],
        **_stop(choice, called=bool(calls)),
        "usage": _usage(answer["usage"]),
        "kv_transfer_params": answer["kv_transfer_params"],
    }
    return {name: value for name, value in out.items() if value is not None}


class _Blocks:
    """The content blocks of a stream: one is open at a time."""

    def __init__(self) -> None:
        self.called = False
        self._index = 0
        self._open = ""

    def open(self, kind: str, block: Json) -> list[Json]:
        """Begin a block, unless one of this kind is open. Every tool call is a block of its own."""
        if kind == self._open != "tool_use":
            return []
        events = self.close()
        self._open = kind
        self.called |= kind == "tool_use"
        start = {"type": "content_block_start", "content_block": {"type": kind, **block}, "index": self._index}
        return [*events, start]

    def piece(self, kind: str, member: str, text: str) -> Json:
        """A piece of the open block."""
        return {"type": "content_block_delta", "delta": {"type": kind, member: text}, "index": self._index}

    def close(self) -> list[Json]:
        """End the open block."""
        if not self._open:
            return []
        events: list[Json] = []
        if self._open == "thinking":
            events.append(self.piece("signature_delta", "signature", uuid.uuid4().hex))
        events.append({"type": "content_block_stop", "index": self._index})
        self._open = ""
        self._index += 1
        return events


async def _events(answer: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
    """What chat chunks become. Our connector puts the handle on the last event; vLLM itself has no place for it."""
    blocks = _Blocks()
    last: Json = {}
    handle: Json | None = None
    begun = False
    try:
        async with aclosing(answer):
            async for chunk in answer:
                handle = chunk.get("kv_transfer_params", handle)
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": _begin(chunk)}
                elif chunk["choices"]:
                    (choice,) = chunk["choices"]
                    last = choice if choice["finish_reason"] else last
                    for event in _deltas(blocks, choice["delta"]):
                        yield event
                else:
                    for event in blocks.close():
                        yield event
                    delta = _stop(last, called=blocks.called)
                    yield {"type": "message_delta", "delta": delta, "usage": _usage(chunk["usage"])}
    except ApiError as error:
        yield {"type": "error", "error": {"type": "internal_error", "message": str(error)}}
        return
    yield {"type": "message_stop"} | ({} if handle is None else {"kv_transfer_params": handle})


def _begin(chunk: Json) -> Json:
    return {
        "id": chunk["id"],
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": chunk["model"],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(chunk["usage"]),
    }


def _deltas(blocks: _Blocks, delta: Json) -> list[Json]:
    events: list[Json] = []
    if delta.get("reasoning"):
        events += blocks.open("thinking", {"thinking": ""})
        events.append(blocks.piece("thinking_delta", "thinking", delta["reasoning"]))
    if delta.get("content"):
        events += blocks.open("text", {"text": ""})
        events.append(blocks.piece("text_delta", "text", delta["content"]))
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        if "id" in call:
            events += blocks.open("tool_use", {"id": call["id"], "name": function["name"], "input": {}})
        if function.get("arguments"):
            events.append(blocks.piece("input_json_delta", "partial_json", function["arguments"]))
    return events
