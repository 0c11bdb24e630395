"""Agents that use tools, with the official clients of `/v1/responses` and `/v1/messages`, through real Envoy."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
import pytest

from support.gateway import BODY_MODES, client, product

TURNS = 6
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}, "deep": {"type": "boolean"}},
}
_TASK = "Find out what the module does, and say it in one sentence. " * 8
_MORE = "Good. Now look at the next one, and compare the two. " * 8
_RESULT = "def f(x): return x  # it does nothing, as far as anybody can tell\n" * 8

# What the agent saw of an answer: its text, and the tools it was to run with what.
Seen = tuple[str, Sequence[tuple[str, str]]]


@dataclass
class ResponsesAgent:
    """An agent as OpenAI's documentation has it: what came is put behind the input as it is, then the results."""

    url: str
    stream: bool
    items: list[Any] = field(default_factory=lambda: [{"role": "user", "content": _TASK}])

    async def run(self) -> list[Seen]:
        async with client(self.url) as sdk:
            return [await self._turn(sdk) for _ in range(TURNS)]

    async def _turn(self, sdk: openai.AsyncOpenAI) -> Seen:
        request: Any = {
            "model": "sim",
            "instructions": "Be an agent.",
            "input": self.items,
            "tools": [{"type": "function", "name": "read", "parameters": _SCHEMA, "strict": False}],
            "max_output_tokens": 400,
            "temperature": 0,
        }
        if self.stream:
            deltas = ""
            async with sdk.responses.stream(**request) as events:
                async for event in events:
                    deltas += event.delta if event.type == "response.output_text.delta" else ""
                answer = await events.get_final_response()
            assert deltas == answer.output_text
        else:
            answer = await sdk.responses.create(**request)
        assert answer.status == "completed"
        assert not answer.model_dump().get("kv_transfer_params")
        calls: Any = [item for item in answer.output if item.type == "function_call"]
        self.items += [item.to_dict() for item in answer.output]
        self.items += [{"type": "function_call_output", "call_id": c.call_id, "output": _RESULT} for c in calls]
        if not calls:
            self.items.append({"role": "user", "content": _MORE})
        return answer.output_text, [(call.name, call.arguments) for call in calls]


@dataclass
class MessagesAgent:
    """An agent of Anthropic's client: blocks go back as they came, the results in one message."""

    url: str
    stream: bool
    messages: list[Any] = field(default_factory=lambda: [{"role": "user", "content": _TASK}])

    async def run(self) -> list[Seen]:
        base = self.url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key="x", max_retries=0) as sdk:
            return [await self._turn(sdk) for _ in range(TURNS)]

    async def _turn(self, sdk: anthropic.AsyncAnthropic) -> Seen:
        request: Any = {
            "model": "sim",
            "system": [{"type": "text", "text": "Be an agent.", "cache_control": {"type": "ephemeral"}}],
            "messages": self.messages,
            "tools": [{"name": "read", "input_schema": _SCHEMA}],
            "max_tokens": 400,
        }
        if self.stream:
            deltas = ""
            async with sdk.messages.stream(**request) as events:
                async for text in events.text_stream:
                    deltas += text
                answer = await events.get_final_message()
            assert deltas == "".join(b.text for b in answer.content if b.type == "text")
        else:
            answer = await sdk.messages.create(**request)
        assert not answer.model_dump().get("kv_transfer_params")
        calls: Any = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")
        assert answer.usage.output_tokens > 0
        self.messages.append({"role": "assistant", "content": answer.content})
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": _RESULT} for c in calls]
        self.messages.append({"role": "user", "content": results or _MORE})
        text = "".join(block.text for block in answer.content if block.type == "text")
        return text, [(call.name, json.dumps(call.input)) for call in calls]


Agent = type[ResponsesAgent] | type[MessagesAgent]


@pytest.mark.parametrize(
    ("shipped", "stream"),
    [("kvreturn", True), ("kvreturn", False), ("full-duplex", True)],
    ids=["stream", "whole", "full-duplex"],
)
@pytest.mark.parametrize("agent", [ResponsesAgent, MessagesAgent])
async def test_an_agent_is_read_back_from_turn_2_on_and_sees_no_difference(
    shipped: str,
    agent: Agent,
    stream: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    async with product(shipped) as there:
        seen = await agent(there.front.url, stream).run()
        assert await there.front.outcomes(TURNS) == {"first_turn": 1, "hit": TURNS - 1}
        assert there.front.metric("read_back_tokens_total") > 0
        assert seen == await agent(there.oracle, stream).run()
    assert any(calls for _, calls in seen)
    assert any(text for text, _ in seen)


@pytest.mark.parametrize(
    ("agent", "template", "expected"),
    [(ResponsesAgent, "drop_thinking", {"hit", "partial_hit"}), (MessagesAgent, "keep_thinking", {"hit"})],
)
async def test_an_agent_that_thinks(agent: Agent, template: str, expected: set[str]) -> None:
    """It replays its thinking, which a template may drop: then what stands before that is read back."""
    async with product("kvreturn", template=template) as there:
        seen = await agent(there.front.url, stream=True).run()
        outcomes = await there.front.outcomes(TURNS)
        assert outcomes.pop("first_turn") == 1
        assert set(outcomes) == expected
        assert seen == await agent(there.oracle, stream=True).run()


# --- stored responses ---


async def _chain(sdk: openai.AsyncOpenAI, name: str, turns: int) -> list[str]:
    """A conversation that is kept at the node. Each response is asked for once more, and comes the same."""
    texts: list[str] = []
    previous: str | None = None
    for number in range(turns):
        request: Any = {"model": "sim", "input": f"{name} says line {number}. " * 12, "temperature": 0}
        answer = await sdk.responses.create(**request, max_output_tokens=60, previous_response_id=previous)
        kept = await sdk.responses.retrieve(answer.id)
        assert kept.to_dict() == answer.to_dict()
        assert not kept.model_dump().get("kv_transfer_params")
        texts.append(answer.output_text)
        previous = answer.id
    return texts


@pytest.mark.parametrize("shipped", BODY_MODES)
async def test_chains_of_stored_responses_stay_at_their_nodes(shipped: str) -> None:
    async with (
        product(shipped, decodes=2, store_responses=True) as there,
        client(there.front.url) as sdk,
        client(there.oracle) as plain,
    ):
        talks = {name: await _chain(sdk, name, 3) for name in ("Ada", "Bob")}
        assert await there.front.outcomes(6) == {"first_turn": 2, "decode_alone": 4}
        assert talks == {name: await _chain(plain, name, 3) for name in ("Ada", "Bob")}
        with pytest.raises(openai.NotFoundError, match="Response with id 'resp_unknown' not found"):
            await sdk.responses.retrieve("resp_unknown")


_PATHS = ("/v1/responses/{}", "/v1/%72esponses/{}", "//v1/./responses/{}", "/v1/responses%2F{}")


@pytest.mark.parametrize("shipped", BODY_MODES)
async def test_no_way_to_write_the_path_shows_the_handle_of_a_stored_response(shipped: str) -> None:
    async with product(shipped, store_responses=True) as there:
        body = json.dumps({"model": "sim", "input": "Hi " * 100}).encode()
        name = json.loads((await there.front.post("/v1/responses", body)).body)["id"]
        for path, (method, more) in itertools.product(
            _PATHS, (("GET", ""), ("GET", "?stream=false"), ("POST", "/cancel"))
        ):
            answer = await there.front.request(method, path.format(name) + more)
            assert answer.status == (200 if method == "GET" else 400), path
            assert b"remote_" not in answer.body
            assert b"transfer_params" not in answer.body


async def test_a_background_response_passes_and_is_asked_for_later() -> None:
    async with product("kvreturn", store_responses=True) as there, client(there.front.url) as sdk:
        queued = await sdk.responses.create(model="sim", input="Hi " * 100, background=True, max_output_tokens=9)
        assert queued.status == "queued"
        kept = queued
        while kept.status == "queued":
            kept = await sdk.responses.retrieve(queued.id)
        assert kept.status == "incomplete"
        assert await there.front.outcomes(1) == {"decode_alone": 1}
        assert not there.asked(there.p[0], "/v1/responses")
