"""What clients of each API send: requests of their histories, and what D's answers become in these."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

from kvreturn.core.api import API, Chat, Completions, Messages, Responses
from replay.histories import Habit, History
from replay.rendering import Json, anthropic_messages, response_messages
from support.official import anthropic_client_of, client_of

_KEPT = 5


class Client(ABC):
    """A client of one API.

    Args:
        history: what it will have said and heard.
        habit: what it does to it.
    """

    api: ClassVar[API]

    def __init__(self, history: History, habit: Habit) -> None:
        self.history = history
        self.habit = habit

    @abstractmethod
    def say(self, inputs: Sequence[str]) -> None:
        """Results for the calls that wait, the user's words where none does; of these texts as many as that takes."""

    @abstractmethod
    def body(self) -> Json:
        """The request."""

    @abstractmethod
    def heard(self, items: Sequence[Json]) -> None:
        """An answer's items join the history."""

    @staticmethod
    @abstractmethod
    def said(items: Sequence[Json]) -> list[Json]:
        """An answer's items as chat messages."""

    @staticmethod
    @abstractmethod
    def answer(message: Mapping[str, Any]) -> Json:
        """A chat message as an answer that is not streamed."""

    @staticmethod
    @abstractmethod
    def received(answer: bytes, *, stream: bool) -> list[Json]:
        """An answer as items of a history: a stream as the official client collects it."""


class _ListClient(Client):
    """A client whose history is a list of items."""

    def __init__(self, history: History, habit: Habit) -> None:
        super().__init__(history, habit)
        self.items: list[Json] = []

    def say(self, inputs: Sequence[str]) -> None:
        calls = self.calls(self.items)
        if calls:
            self.items += [self.result(call, text) for call, text in zip(calls, inputs, strict=False)]
        else:
            self.items.append({"role": "user", "content": inputs[0]})

    def body(self) -> Json:
        items = deepcopy(self.items)
        inputs = [i for i in items if i.get("role") in {"user", "tool"} or i.get("type") == "function_call_output"]
        for item in inputs[:-_KEPT] if self.habit == "elides" else ():
            _change(item, lambda text: f"Old environment output: ({text.count(chr(10)) + 1} lines omitted)")
        if self.habit == "reminds":
            _change(
                inputs[-1], lambda text: f"{text}\n<reminder>Nobody has looked at the to-do list lately.</reminder>"
            )
        if self.habit == "marks":
            _mark(inputs[-1])
        return {"model": "m", **self.request(items)}

    def heard(self, items: Sequence[Json]) -> None:
        self.items += [out for i in items for out in self.lean(i)] if self.habit == "lean" else items

    @abstractmethod
    def request(self, items: list[Json]) -> Json:
        """Members of the request that hold the conversation."""

    @abstractmethod
    def lean(self, item: Json) -> list[Json]:
        """An answer's item, as a lean client sends it again, or not."""

    @abstractmethod
    def result(self, call: str, text: str) -> Json:
        """What a call's result is in the history."""

    @staticmethod
    @abstractmethod
    def calls(items: Sequence[Json]) -> list[str]:
        """Ids of the calls that wait for results."""


class ChatClient(_ListClient):
    api = Chat()

    def request(self, items: list[Json]) -> Json:
        tools = [{"type": "function", "function": f} for f in _functions(self.history, "parameters")]
        return {"messages": [{"role": "system", "content": self.history.system}, *items], "tools": tools}

    def lean(self, item: Json) -> list[Json]:
        calls = [
            {**c, "function": {**c["function"], "arguments": json.dumps(json.loads(c["function"]["arguments"]))}}
            for c in item.get("tool_calls", [])
        ]
        content = [{"type": "text", "text": item["content"]}] if item.get("content") else None
        return [{"role": "assistant", "content": content, "tool_calls": calls}]

    def result(self, call: str, text: str) -> Json:
        return {"role": "tool", "tool_call_id": call, "content": text}

    @staticmethod
    def calls(items: Sequence[Json]) -> list[str]:
        return [c["id"] for c in items[-1].get("tool_calls", [])] if items else []

    @staticmethod
    def said(items: Sequence[Json]) -> list[Json]:
        return [{**i, "reasoning": i.get("reasoning") or i.get("reasoning_content")} for i in items]

    @staticmethod
    def answer(message: Mapping[str, Any]) -> Json:
        finish = "tool_calls" if message["tool_calls"] else "stop"
        return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}

    @staticmethod
    def received(answer: bytes, *, stream: bool) -> list[Json]:
        if not stream:
            return [_without_null(json.loads(answer)["choices"][0]["message"])]
        user: Any = [{"role": "user", "content": "x"}]
        with client_of(answer) as client, client.chat.completions.stream(model="m", messages=user) as events:
            message = events.get_final_completion().choices[0].message
        return [message.model_dump(exclude_none=True, warnings=False) | {"role": "assistant"}]


class MessagesClient(_ListClient):
    api = Messages()

    def request(self, items: list[Json]) -> Json:
        return {
            "max_tokens": 1000,
            "system": self.history.system,
            "messages": items,
            "tools": list(_functions(self.history, "input_schema")),
        }

    def lean(self, item: Json) -> list[Json]:
        return [{**item, "content": [b for b in item["content"] if "thinking" not in b["type"]]}]

    def result(self, call: str, text: str) -> Json:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": text}]}

    @staticmethod
    def calls(items: Sequence[Json]) -> list[str]:
        return [b["id"] for b in items[-1]["content"] if b["type"] == "tool_use"] if items else []

    @staticmethod
    def said(items: Sequence[Json]) -> list[Json]:
        return [m for i in items for m in anthropic_messages(i)]

    @staticmethod
    def answer(message: Mapping[str, Any]) -> Json:
        blocks: list[Json] = []
        if message["reasoning"]:
            blocks.append({"type": "thinking", "thinking": message["reasoning"], "signature": "x"})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"], "citations": None})
        for call in message["tool_calls"]:
            name, value = call["function"]["name"], json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": value})
        stop = "tool_use" if message["tool_calls"] else "end_turn"
        return {"type": "message", "role": "assistant", "content": blocks, "stop_reason": stop}

    @staticmethod
    def received(answer: bytes, *, stream: bool) -> list[Json]:
        if not stream:
            return [{"role": "assistant", "content": _without_null(json.loads(answer)["content"])}]
        user: Any = [{"role": "user", "content": "x"}]
        with (
            anthropic_client_of(answer) as client,
            client.messages.stream(model="m", max_tokens=5, messages=user) as events,
        ):
            message = events.get_final_message()
        blocks = [b.model_dump(mode="json", exclude_none=True, warnings=False) for b in message.content]
        return [{"role": "assistant", "content": blocks}]


class ResponsesClient(_ListClient):
    api = Responses()

    def request(self, items: list[Json]) -> Json:
        tools = [{"type": "function", **f} for f in _functions(self.history, "parameters")]
        return {"store": False, "instructions": self.history.system, "input": items, "tools": tools}

    def lean(self, item: Json) -> list[Json]:
        out = {k: v for k, v in item.items() if k not in {"id", "status"}}
        if item["type"] == "function_call":
            out["arguments"] = json.dumps(json.loads(item["arguments"]))
        elif item["type"] == "message":
            out["content"] = [{"type": "output_text", "text": "".join(p["text"] for p in item["content"])}]
        return [] if item["type"] == "reasoning" else [out]

    def result(self, call: str, text: str) -> Json:
        return {"type": "function_call_output", "call_id": call, "output": text}

    @staticmethod
    def calls(items: Sequence[Json]) -> list[str]:
        answered = {i["call_id"] for i in items if i.get("type") == "function_call_output"}
        return [i["call_id"] for i in items if i.get("type") == "function_call" and i["call_id"] not in answered]

    @staticmethod
    def said(items: Sequence[Json]) -> list[Json]:
        return response_messages(items)

    @staticmethod
    def answer(message: Mapping[str, Any]) -> Json:
        output: list[Json] = []
        if message["reasoning"]:
            part = {"type": "reasoning_text", "text": message["reasoning"]}
            output.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [part], "status": None})
        if message["content"]:
            part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": None}
            said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
            output.append(said)
        for call in message["tool_calls"]:
            about = {"id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed", "namespace": None}
            output.append({"type": "function_call", **about, **call["function"]})
        return {"object": "response", "id": "resp_1", "status": "completed", "output": output}

    @staticmethod
    def received(answer: bytes, *, stream: bool) -> list[Json]:
        if not stream:
            output: list[Json] = _without_null(json.loads(answer)["output"])
            return output
        with client_of(answer) as client, client.responses.stream(model="m", input="x") as events:
            response = events.get_final_response()
        return [o.model_dump(mode="json", exclude_none=True, warnings=False) for o in response.output]


class CompletionsClient(Client):
    """It renders the conversation itself, and lets the text grow."""

    api = Completions()

    def __init__(self, history: History, habit: Habit) -> None:
        super().__init__(history, habit)
        self.prompt = f"<|im_start|>system\n{history.system}<|im_end|>\n"

    def say(self, inputs: Sequence[str]) -> None:
        self.prompt += f"<|im_start|>user\n{inputs[0]}<|im_end|>\n<|im_start|>assistant\n"

    def body(self) -> Json:
        return {"model": "m", "prompt": self.prompt}

    def heard(self, items: Sequence[Json]) -> None:
        self.prompt += "".join(i["content"] for i in items) + "<|im_end|>\n"

    @staticmethod
    def said(items: Sequence[Json]) -> list[Json]:
        return list(items)

    @staticmethod
    def answer(message: Mapping[str, Any]) -> Json:
        return {
            "object": "text_completion",
            "choices": [{"index": 0, "text": message["content"], "finish_reason": "stop"}],
        }

    @staticmethod
    def received(answer: bytes, *, stream: bool) -> list[Json]:
        assert not stream
        return [{"role": "assistant", "content": json.loads(answer)["choices"][0]["text"]}]


CLIENTS: tuple[type[Client], ...] = (ChatClient, CompletionsClient, MessagesClient, ResponsesClient)


def _functions(history: History, schema: str) -> Iterator[Json]:
    """The functions of a history, each with a parameter that says nothing."""
    for name in history.tools:
        yield {"name": name, schema: {"type": "object", "properties": {}, "additionalProperties": True}}


def _holder(item: Json) -> tuple[Json, str]:
    """Where an input's text is: an object and the name of its member."""
    if item.get("type") == "function_call_output":
        return item, "output"
    if isinstance(item["content"], list):
        return _holder(item["content"][-1])
    return item, "content"


def _change(item: Json, change: Callable[[str], str]) -> None:
    holder, name = _holder(item)
    holder[name] = change(holder[name])


def _mark(item: Json) -> None:
    """Mark an input for caching: a text of its own cannot be, but a part can."""
    holder, name = _holder(item)
    if holder is item:
        holder[name] = [{"type": "text", "text": holder[name]}]
        holder = holder[name][0]
    holder["cache_control"] = {"type": "ephemeral"}


def _without_null(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {k: _without_null(v) for k, v in value.items() if v is not None}
    return [_without_null(v) for v in value] if isinstance(value, list) else value
