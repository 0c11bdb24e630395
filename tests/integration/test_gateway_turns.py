"""Conversations of the official client through real Envoy, the router and simulated nodes that prove and read."""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from kvreturn.sim import SimNode
from support.gateway import CHAT, COMPLETIONS, SHIPPED, Product, client, product

TURNS = 4
_APIS = [pytest.param(CHAT, id="chat"), pytest.param(COMPLETIONS, id="completions")]
_NAMES = ("Ada", "Bob")


@dataclass
class Talk:
    """One conversation.

    Attributes:
        name: stands in every request of it, and in none of another one.
        answers: so far.
    """

    name: str
    api: str
    stream: bool
    answers: list[str] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    prompt: str = ""

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


def places(there: Product, api: str) -> dict[str, tuple[set[int], set[int]]]:
    """By conversation: which prefill and which decode nodes it was at."""

    def at(nodes: list[SimNode], name: str) -> set[int]:
        return {i for i, n in enumerate(nodes) if any(f"{name} says" in str(b) for b in there.asked(n, api))}

    return {name: (at(there.p, name), at(there.d, name)) for name in _NAMES}


@pytest.mark.parametrize("shipped", SHIPPED)
@pytest.mark.parametrize("api", _APIS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_two_conversations_are_read_back_from_turn_2_on_each_at_its_own_nodes(
    shipped: str,
    api: str,
    stream: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    async with (
        product(shipped, prefills=2, decodes=2) as there,
        client(there.front.url) as sdk,
        client(there.oracle) as plain,
    ):
        for node in (*there.p, *there.d):
            node.faults.add(api, "delay", seconds=0.15)  # so that the first turns overlap, and find different nodes
        talks = [Talk(name, api, stream) for name in _NAMES]
        await asyncio.gather(*(talk.turn(sdk) for talk in talks))
        # From here on all nodes are idle at each choice: without affinity both talks would go to the first ones.
        for _, talk in itertools.product(range(TURNS - 1), talks):
            await talk.turn(sdk)
        expected = [Talk(name, api, stream) for name in _NAMES]
        for _, talk in itertools.product(range(TURNS), expected):
            await talk.turn(plain)
        assert [t.answers for t in talks] == [t.answers for t in expected]
        assert await there.front.outcomes(2 * TURNS) == {"first_turn": 2, "hit": 2 * (TURNS - 1)}
        for at in zip(*places(there, api).values(), strict=True):
            assert sorted(map(sorted, at)) == [[0], [1]]
        read = sum(node.stats.read_tokens for node in there.p)
        assert read == there.front.metric("read_back_tokens_total") > 0
        engines = [node.engine.identity().engine_id for node in (*there.p, *there.d)]
        assert not there.front.tap.leaks(*engines)
