"""vLLM's example proxies, unmodified, before real vLLM nodes: both legs pass Envoy and a router with the roles."""

import functools

import openai
import pytest

from engine.conftest import JSON, Engine, front, note
from engine.test_conversation import question
from support.harness import outcomes
from support.orchestrators import MULTITURN, TOY, Addresses, orchestrator

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
TURNS = 3


async def _ask(client: openai.AsyncOpenAI, messages: list[JSON]) -> str:
    """A streamed turn; its answer is put behind the messages."""
    text = ""
    request: JSON = {"model": "tiny", "messages": messages, "max_tokens": 60, "temperature": 0}
    request["extra_body"] = {"ignore_eos": True}
    async for chunk in await client.chat.completions.create(**request, stream=True):
        assert not (chunk.model_extra or {}).get("kv_transfer_params")
        text += chunk.choices[0].delta.content or ""
    messages.append({"role": "assistant", "content": text})
    return text


@pytest.mark.parametrize("name", [TOY, MULTITURN])
async def test_a_proxys_conversation_is_read_back_and_its_answers_are_a_plain_nodes(engine: Engine, name: str) -> None:
    at, before = Addresses(), await engine.sources()
    nodes = [url.removeprefix("http://") for url in (engine.p, engine.d)]
    sink = functools.partial(note, engine.lines)
    async with (
        front(nodes[:1], nodes[1:], sink, envoy=at.settings) as (router, _),
        orchestrator(name, at.prefill, at.decode) as proxy,
        openai.AsyncOpenAI(base_url=proxy.url, api_key="x", max_retries=0) as ours,
        openai.AsyncOpenAI(base_url=f"{engine.single}/v1", api_key="x", max_retries=0) as plain,
    ):
        got: list[JSON] = []
        want: list[JSON] = []
        for number in range(TURNS):
            for client, messages in ((ours, got), (plain, want)):
                messages.append({"role": "user", "content": f"{name}. {question(number)}"})
                await _ask(client, messages)
            assert got == want
        found = outcomes(router.world.metrics)
    after = await engine.sources()
    read = after["external_kv_transfer"] - before["external_kv_transfer"]
    print(f"{name}: {found}, {read:.0f} tokens read back")
    assert found == {"first_turn": 1, "hit": TURNS - 1}
    assert read > 0
