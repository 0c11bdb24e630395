"""Items of `/v1/responses`: from a request's to chat messages, and what an answer becomes."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from kvreturn.sim.errors import ApiError
from kvreturn.sim.output import Transcript
from kvreturn.sim.serving import Json


def chat_messages(instructions: str | None, history: Sequence[Json], given: str | Sequence[Json]) -> list[Json]:
    """The chat messages of a request, as vLLM puts them together.

    Args:
        instructions: of this request; those of earlier ones do not count.
        history: chat messages of the response that it goes on from, its answer included.
        given: the request's `input`.

    Raises:
        ApiError: (400) an item that vLLM does not know.
    """
    said: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    said += [message for message in history if message.get("role") != "system"]
    if isinstance(given, str):
        return [*said, {"role": "user", "content": given}]
    new: list[Json] = []
    for item in given:
        _add(new, item)
    return said + new


def history_of(messages: Sequence[Json], output: Sequence[Json]) -> list[Json]:
    """What a later response goes on from: of an answer only its text, no reasoning and no calls (vLLM 0.32.0)."""
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    return [*messages, *({"role": "assistant", "content": text} for text in texts)]


def _add(said: list[Json], item: Json) -> None:
    """Add an item: reasoning, text and calls of one answer become one message."""
    kind = item.get("type") or "message"
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        if said and said[-1]["role"] == "assistant":
            said[-1].setdefault("tool_calls", []).append(call)
        else:
            said.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or [{"text": ""}]
        _merge(said, "reasoning", parts[0]["text"])
    elif kind == "function_call_output":
        said.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    elif kind == "message" and item.get("role") == "assistant":
        content = item.get("content") or ""
        _merge(said, "content", content if isinstance(content, str) else content[0]["text"])
    elif kind == "message":
        said.append({"role": item.get("role"), "content": _content(item.get("content"))})
    else:
        raise ApiError(f"Unsupported input item type: {kind}", param="input")


def _merge(said: list[Json], name: str, text: str) -> None:
    if said and said[-1]["role"] == "assistant" and said[-1].get(name) is None:
        said[-1][name] = text
    else:
        said.append({"role": "assistant", name: text})


def _content(content: Any) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(content, list):
        return content
    return [
        {"type": "image_url", "image_url": part.get("image_url")}
        if part.get("type") == "input_image"
        else {"type": "text", "text": part.get("text")}
        for part in content
    ]


# --- answers ---


def new_id(prefix: str) -> str:
    """An id as vLLM makes them."""
    return f"{prefix}_{uuid.uuid4().hex[:16]}"


def text_part(text: str, logprobs: list[Json] | None = None) -> Json:
    """A part of a message."""
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def reasoning_item(name: str, text: str | None, status: str | None) -> Json:
    """An item of reasoning; without a text it has just begun."""
    content = None if text is None else [{"text": text, "type": "reasoning_text"}]
    item: Json = {"id": name, "summary": [], "type": "reasoning", "content": content, "encrypted_content": None}
    return item | {"status": status}


def message_item(name: str, text: str, status: str) -> Json:
    """A message of the assistant."""
    content = [text_part(text)] if text else []
    return {
        "id": name,
        "content": content,
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def call_item(name: str, call_id: str, function: str, arguments: str, status: str) -> Json:
    """A call of a function."""
    return {
        "arguments": arguments,
        "call_id": call_id,
        "name": function,
        "type": "function_call",
        "id": name,
        "async": None,
        "caller": None,
        "namespace": None,
        "status": status,
    }


def output_items(transcript: Transcript, *, reasoning: bool) -> list[Json]:
    """The output of a whole answer."""
    out: list[Json] = []
    if transcript.reasoning and reasoning:
        out.append(reasoning_item(new_id("rs"), transcript.reasoning, None))
    content = transcript.raw_content if transcript.broken_call else transcript.content
    if content:
        out.append(message_item(new_id("msg"), content, "completed"))
    calls = () if transcript.broken_call else transcript.calls
    return out + [call_item(new_id("fc"), call.id, call.name, call.arguments, "completed") for call in calls]


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Tools as chat templates get them."""
    return [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in tools]
