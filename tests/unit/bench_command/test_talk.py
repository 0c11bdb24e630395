"""Asking a question in each API: the client's side, against simulated vLLM and against nodes that fail."""

import itertools
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from kvreturn.bench.talk import APIS_BY_NAME, Talk, TalkError
from kvreturn.sim import NO_TIMING, NodeConfig, SimNode
from support.bench import chat
from support.envoy import unused_address
from support.gateway import serving_sims
from support.nodes import FakePrefill, Handler, Seen, dies, hangs, replies, streams

SAID = [
    ("system", "Be brief. "),
    ("user", "What is the code of the file?"),
    ("assistant", " test"),
    ("user", "And then?"),
]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", sorted(APIS_BY_NAME))
async def test_an_answer_is_taken_in_and_counted(session: aiohttp.ClientSession, api: str, *, stream: bool) -> None:
    async with serving_sims(SimNode(NodeConfig(timing=NO_TIMING, prefix_caching=False))) as (url,):
        talk = Talk(session, f"{url}/v1", "sim", api, stream)
        reply = await talk.ask(SAID, 12, "salt")
        whole = await Talk(session, f"{url}/v1", "sim", api, stream=not stream).ask(SAID, 12, "salt")
        longer = await talk.ask([*SAID, ("assistant", reply.text), ("user", "the file")], 12, "salt")
    assert reply.text
    assert (reply.text, reply.prompt_tokens, reply.output_tokens) == (
        *(whole.text, whole.prompt_tokens, whole.output_tokens),
    )
    assert 0 < reply.output_tokens <= 12
    assert 0 < reply.ttft <= reply.latency
    assert (reply.chunks == 1) is not stream
    # The answer counts in the next prompt, and two words, and what the template puts around both.
    assert longer.prompt_tokens > reply.prompt_tokens + 2


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_answers_are_as_long_as_asked_for(session: aiohttp.ClientSession, api: str) -> None:
    async with serving_sims(SimNode(NodeConfig(timing=NO_TIMING))) as (url,):
        reply = await Talk(session, f"{url}/v1", "sim", api).ask(SAID, 200, "salt")
    assert reply.output_tokens == 200


async def test_words_per_token_are_found_out_from_the_models_own_counts(session: aiohttp.ClientSession) -> None:
    async def two_tokens_a_word(seen: Seen) -> web.Response:
        words = json.loads(seen.body)["messages"][0]["content"].split()
        return web.json_response(chat("x", prompt=31 + 2 * len(words)))

    async with FakePrefill(two_tokens_a_word) as node:
        words = await Talk(session, f"http://{node.address}/v1", "m", stream=False).words("salt")
    assert words.per_token == 0.5


@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_count_that_does_not_grow_with_the_text_tells_nothing(
    session: aiohttp.ClientSession, tokens: int
) -> None:
    """A thousand words to a token would make prompts of a thousand times the length."""
    counts = itertools.count(31, tokens)

    async def hardly_counting(seen: Seen) -> web.Response:
        del seen
        return web.json_response(chat("x", prompt=next(counts)))

    async with FakePrefill(hardly_counting) as node:
        with pytest.raises(TalkError, match=f"1200 words count {31 + tokens} tokens, 200 31"):
            await Talk(session, f"http://{node.address}/v1", "m", stream=False).words("salt")


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (503, "no healthy upstream", "HTTP 503: no healthy upstream"),
        (200, "<html>", "not what an API answers"),
        (200, "[]", "not what an API answers"),
        (200, '{"error": {"type": "overloaded", "message": "x"}}', "an error inside the answer: overloaded"),
        (200, '{"choices": []}', "the answer broke off"),
        (200, json.dumps({"choices": chat("x")["choices"]}), "does not count its tokens"),
    ],
)
async def test_what_is_no_answer_is_told(session: aiohttp.ClientSession, status: int, text: str, told: str) -> None:
    async with FakePrefill(replies(text.encode(), status)) as node:
        with pytest.raises(TalkError, match=told):
            await Talk(session, f"http://{node.address}/v1", "m", stream=False).ask(SAID, 12, "salt")


@pytest.mark.parametrize(
    ("handler", "seconds", "told"),
    [
        (streams(b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n'), 30, "broke off"),
        (dies, 30, "ServerDisconnectedError"),
        (hangs, 0.05, r"no whole answer within 0\.05 s"),
    ],
)
async def test_no_end_is_told(session: aiohttp.ClientSession, handler: Handler, seconds: float, told: str) -> None:
    async with FakePrefill(handler) as node:
        with pytest.raises(TalkError, match=told):
            await Talk(session, f"http://{node.address}/v1", "m", timeout=seconds).ask(SAID, 12, "salt")


async def test_a_closed_port_is_told(session: aiohttp.ClientSession) -> None:
    with pytest.raises(TalkError, match="Cannot connect"):
        await Talk(session, f"http://{unused_address()}/v1", "m").ask(SAID, 12, "salt")
