"""A conversation of the official client."""

from dataclasses import dataclass, field
from typing import Any

import openai

from support.gateway import CHAT


@dataclass
class Talk:
    """One conversation.

    Attributes:
        name: stands in every request of it, and in none of another one.
        answers: so far.
        more: members of its chat requests that the client does not know.
    """

    name: str
    api: str
    stream: bool
    answers: list[str] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    prompt: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    async def turn(self, sdk: openai.AsyncOpenAI) -> str:
        """Say something new, after all that was said before."""
        number = len(self.answers)
        text = " ".join(f"{self.name} says line {number}.{i}: the quick brown fox jumps." for i in range(24))
        answer = await (self._chat(sdk, text) if self.api == CHAT else self._complete(sdk, text))
        self.answers.append(answer)
        return answer

    async def _chat(self, sdk: openai.AsyncOpenAI, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        request: Any = {"model": "sim", "messages": self.messages, "max_tokens": 40, "temperature": 0}
        request["extra_body"] = self.more
        if self.stream:
            pieces = []
            async for chunk in await sdk.chat.completions.create(**request, stream=True):
                assert "kv_transfer_params" not in chunk.model_dump()
                pieces.append(chunk.choices[0].delta.content or "")  # as vLLM's own benchmark client does
            answer = "".join(pieces)
        else:
            answer = (await sdk.chat.completions.create(**request)).choices[0].message.content
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    async def _complete(self, sdk: openai.AsyncOpenAI, text: str) -> str:
        self.prompt += f"{text}\n"
        request: Any = {"model": "sim", "prompt": self.prompt, "max_tokens": 40, "temperature": 0}
        if self.stream:
            chunks = await sdk.completions.create(**request, stream=True)
            answer = "".join([chunk.choices[0].text async for chunk in chunks])
        else:
            answer = (await sdk.completions.create(**request)).choices[0].text
        self.prompt += f"{answer}\n"
        return answer
