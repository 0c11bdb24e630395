"""Playing a conversation with the official `openai` client, as any agent would."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from kvreturn.demo.script import Message, Script, reply


@dataclass(frozen=True, slots=True)
class Said:
    """One answer.

    Attributes:
        message: the assistant message, as the client puts it into the next request.
        text: all that the model said, to compare: thinking, content, tool calls with their arguments.
        ttft_ms: milliseconds from sending the request to the first piece of the answer.
        prompt_tokens: as the node counts them.
        finish_reason: why the answer ended.
    """

    message: Message
    text: str
    ttft_ms: float
    prompt_tokens: int
    finish_reason: str | None


@dataclass(slots=True)
class Leg:
    """One way to run the conversation.

    Args:
        client: where to send it.
        model: under this name.
        script: the conversation.
        extra: further members of the request's body.

    Attributes:
        answering: set from the first piece of an answer to the next request.
    """

    client: openai.AsyncOpenAI
    model: str
    script: Script
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    answering: asyncio.Event = field(default_factory=asyncio.Event)

    async def turn(self, number: int) -> Said:
        """Send the next request of the conversation and take the answer in. Turns count from 0."""
        if number == 0:
            self.messages = list(self.script.opening)
        else:
            self.messages += reply(self.messages[-1], self.script.turns[number - 1])
        said = await self._ask()
        self.messages.append(said.message)
        return said

    async def _ask(self) -> Said:
        self.answering.clear()
        begun = time.perf_counter()
        first: float | None = None
        request: dict[str, Any] = {  # plain dicts, as agents have them
            "model": self.model,
            "messages": self.messages,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": self.script.max_tokens,
        }
        if self.script.tools:
            request["tools"] = list(self.script.tools)
        if self.extra:
            request["extra_body"] = self.extra
        stream = await self.client.chat.completions.create(**request, stream=True)
        content: list[str] = []
        thinking: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        prompt_tokens, finish_reason = 0, None
        async for chunk in stream:
            if chunk.usage:
                prompt_tokens = chunk.usage.prompt_tokens
            for choice in chunk.choices:
                delta = choice.delta
                finish_reason = choice.finish_reason or finish_reason
                reasoning = getattr(delta, "reasoning", None)
                if first is None and (delta.content or reasoning or delta.tool_calls):
                    first = time.perf_counter()
                    self.answering.set()
                content.append(delta.content or "")
                thinking.append(reasoning or "")
                for call in delta.tool_calls or ():
                    _collect(calls, call)
        message: Message = {"role": "assistant", "content": "".join(content)}
        if calls:
            message["tool_calls"] = [calls[i] for i in sorted(calls)]
        return Said(
            message=message,
            text="".join(thinking) + "\n" + _comparable(message),
            ttft_ms=((first or time.perf_counter()) - begun) * 1e3,
            prompt_tokens=prompt_tokens,
            finish_reason=finish_reason,
        )


def _collect(calls: dict[int, dict[str, Any]], delta: Any) -> None:  # noqa: ANN401 - the client's own delta type
    call = calls.setdefault(delta.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    if delta.id:
        call["id"] = delta.id
    if delta.function:
        call["function"]["name"] += delta.function.name or ""
        call["function"]["arguments"] += delta.function.arguments or ""


def _comparable(message: Message) -> str:
    """All but ids, which every node draws anew."""
    calls: Sequence[dict[str, Any]] = message.get("tool_calls") or ()
    return "\n".join([message["content"], *(f"{c['function']['name']}({c['function']['arguments']})" for c in calls)])
