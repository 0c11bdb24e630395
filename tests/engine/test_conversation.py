"""Conversations on real vLLM: what a plain node says, with most of the prompt read back from the decode node."""

import asyncio
import json
from collections.abc import Callable
from typing import Self

import openai
import pytest

from engine.conftest import JSON, Engine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
WORDS = "Return the name of the file object that was opened for reading and explain how the path lookup works"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Return the text of a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]


def question(number: int) -> str:
    return f"Question {number}: " + " ".join([WORDS] * 3)


class Talk:
    """One conversation, in step through the gateway and on the plain node."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.gateway = openai.AsyncOpenAI(base_url=f"{engine.gateway}/v1", api_key="x", max_retries=0)
        self.plain = openai.AsyncOpenAI(base_url=f"{engine.single}/v1", api_key="x", max_retries=0)
        self.worst = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.close()
        await self.plain.close()

    async def chat(self, messages: list[JSON], *, stream: bool = True, **more: object) -> tuple[JSON, str, int, int]:
        """Ask both. Returns the assistant message, the outcome, and tokens computed by P and read back."""
        before, outcomes = await self.engine.sources(), self.engine.outcomes()
        request: JSON = {"model": "tiny", "messages": messages, "max_tokens": 60, "temperature": 0, "logprobs": True}
        request |= {"extra_body": {"return_token_ids": True, "ignore_eos": True}, **more}
        got = await self._ask(self.gateway, request, stream=stream)
        want = await self._ask(self.plain, request, stream=stream)
        assert got[:2] == want[:2], (got, want)
        self.worst = max([self.worst, *(abs(a - b) for a, b in zip(got[2], want[2], strict=True))])
        outcome = await self._outcome(outcomes)
        after = await self.engine.sources()
        computed, read = (int(after[k] - before[k]) for k in ("local_compute", "external_kv_transfer"))
        return {"role": "assistant", "content": got[0]}, outcome, computed, read

    @staticmethod
    async def _ask(client: openai.AsyncOpenAI, request: JSON, *, stream: bool) -> tuple[str, list[int], list[float]]:
        text = ""
        ids: list[int] = []
        probabilities: list[float] = []
        if stream:
            async for chunk in await client.chat.completions.create(**request, stream=True):
                assert not (chunk.model_extra or {}).get("kv_transfer_params")
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    ids += (choice.model_extra or {}).get("token_ids") or []
                    probabilities += [t.logprob for t in (choice.logprobs and choice.logprobs.content) or ()]
        else:
            answer = await client.chat.completions.create(**request)
            assert not (answer.model_extra or {}).get("kv_transfer_params")
            only = answer.choices[0]
            text, ids = only.message.content or "", (only.model_extra or {})["token_ids"]
            probabilities = [t.logprob for t in (only.logprobs and only.logprobs.content) or ()]
        return text, ids, probabilities

    async def _outcome(self, before: dict[str, float]) -> str:
        for _ in range(200):
            new = [o for o, n in self.engine.outcomes().items() if n > before.get(o, 0)]
            if new:
                return new[0]
            await asyncio.sleep(0.01)
        return "none"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_six_turns_are_a_plain_nodes_answers_with_the_history_read_back(engine: Engine, *, stream: bool) -> None:
    async with Talk(engine) as talk:
        messages: list[JSON] = [{"role": "system", "content": f"Conversation {stream}"}]
        held, moved = 0, await engine.metric(engine.p, "nixl_bytes_transferred_sum")
        for turn in range(6):
            messages.append({"role": "user", "content": question(turn)})
            message, outcome, computed, read = await talk.chat(messages, stream=stream)
            print(f"turn {turn + 1}: {outcome}, computed {computed}, read {read}")
            prompt = computed + read
            assert outcome == ("hit" if turn else "first_turn")
            assert read == held
            assert computed <= prompt - held + 32
            held = prompt + 60 - 1  # D computed no KV for its last token
            messages.append(message)
        moved = await engine.metric(engine.p, "nixl_bytes_transferred_sum") - moved
        print(f"P read {moved / 2**20:.1f} MiB from D")
        assert moved > 0
        assert talk.worst < 1e-3, f"log probabilities differ by up to {talk.worst}"
        print(f"largest difference of a log probability: {talk.worst}")


async def test_completions_are_read_back_too(engine: Engine) -> None:
    prompt = question(0)
    for turn in range(4):
        before, outcomes = await engine.sources(), engine.outcomes()
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 60,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        texts = []
        for base in (engine.gateway, engine.single):
            async with engine.session.post(f"{base}/v1/completions", json=body) as answer:
                raw = await answer.text()
            assert "kv_transfer_params" not in raw
            events = [json.loads(e[6:]) for e in raw.split("\n\n") if e.startswith("data: {")]
            texts.append("".join(c["text"] for e in events for c in e["choices"]))
        assert texts[0] == texts[1]
        await asyncio.sleep(0.2)
        after = await engine.sources()
        new = {o for o, n in engine.outcomes().items() if n > outcomes.get(o, 0)}
        assert new == {"hit"} if turn else {"first_turn"}
        print(f"turn {turn + 1}: {new}, read {after['external_kv_transfer'] - before['external_kv_transfer']}")
        prompt += texts[0] + "\n" + question(turn + 1)


def dropped_thinking(message: JSON) -> JSON:
    """As the client of a reasoning model: it replays the answer, the template drops its first half from then on."""
    words = message["content"].split(" ")
    half = len(words) // 2
    return {"role": "assistant", "content": " ".join(words[:half]) + "</think>" + " ".join(words[half:])}


def edited(message: JSON) -> JSON:
    return {"role": "assistant", "content": message["content"].rsplit(" ", 10)[0]}


@pytest.mark.parametrize("replay", [dropped_thinking, edited])
async def test_what_the_next_prompt_does_not_repeat_is_not_read(engine: Engine, replay: Callable[[JSON], JSON]) -> None:
    async with Talk(engine) as talk:
        messages: list[JSON] = [{"role": "system", "content": replay.__name__}]
        outcomes = []
        for turn in range(4):
            messages.append({"role": "user", "content": question(turn)})
            message, outcome, computed, read = await talk.chat(messages)
            print(f"turn {turn + 1}: {outcome}, computed {computed}, read {read} ({read / (computed + read):.0%})")
            outcomes.append(outcome)
            assert (read > 0) == (turn > 0)
            messages.append(replay(message))
        assert outcomes == ["first_turn", "partial_hit", "partial_hit", "partial_hit"]


async def test_tool_arguments_that_the_client_writes_anew_cost_only_what_comes_behind(engine: Engine) -> None:
    async with Talk(engine) as talk:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "read_file", "arguments": '{"path":"a", "line": 1}'},
        }
        messages: list[JSON] = [
            {"role": "user", "content": question(0)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": question(1)},
        ]
        message, _, _, _ = await talk.chat(messages, tools=TOOLS)
        again = json.loads(json.dumps([*messages, message, {"role": "user", "content": question(2)}]))
        again[1]["tool_calls"][0]["function"]["arguments"] = '{"line":1,"path":"a"}'
        _, outcome, computed, read = await talk.chat(again, tools=TOOLS)
        print(f"{outcome}, computed {computed}, read {read}")
        assert outcome == "partial_hit"
        assert read > 0


async def test_a_turn_that_a_stop_string_ends_leaves_none(engine: Engine) -> None:
    """To vLLM's engine it is an abort (connector/README.md, "Limits")."""
    async with Talk(engine) as talk:
        messages: list[JSON] = [{"role": "user", "content": question(7)}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        _, whole = await engine.post(engine.single, "/v1/chat/completions", body)
        stop = whole["choices"][0]["message"]["content"].split(" ")[12]
        message, _, _, _ = await talk.chat(messages, stop=[stop])
        assert stop not in message["content"].split(" ")
        _, outcome, _, read = await talk.chat([*messages, message, {"role": "user", "content": question(8)}])
        assert (outcome, read) == ("no_handle_from_decode", 0)
