"""All four APIs, streamed and not: D's handle stands where the router looks for it, and P reads what it names."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engine.conftest import JSON, Engine
from engine.test_conversation import question
from engine.test_misuse import COLD, sealed

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Api:
    """One API.

    Attributes:
        path: where.
        limit: its name for the longest answer.
        prompt: makes the member that holds the messages.
        text: finds the answer's text in a body that was not streamed.
        delta: type of the events that bring text, None where events have no type.
        handle: finds the handle in a streamed event; in a body that was not streamed it stands at the top.
    """

    path: str
    limit: str
    prompt: Callable[[list[JSON]], JSON]
    text: Callable[[JSON], str]
    delta: Callable[[JSON], str]
    handle: Callable[[JSON], JSON | None]

    def body(self, messages: list[JSON], count: int) -> JSON:
        return {"model": "tiny", self.limit: count, "temperature": 0, **self.prompt(messages)}


def chat(messages: list[JSON]) -> JSON:
    return {"messages": messages}


def plain(messages: list[JSON]) -> JSON:
    return {"prompt": "\n".join(m["content"] for m in messages)}


def responses(messages: list[JSON]) -> JSON:
    return {"input": messages, "store": False}


def at_top(event: JSON) -> JSON | None:
    """On an event that ends the turn, and only there."""
    found: JSON | None = event.get("kv_transfer_params")
    ends = event.get("type") == "message_stop" or any(c["finish_reason"] for c in event.get("choices", ()))
    assert found is None or ends
    return found


def in_response(event: JSON) -> JSON | None:
    found: JSON | None = (event.get("response") or {}).get("kv_transfer_params")
    assert found is None or event["type"] == "response.completed"
    return found


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        "max_tokens",
        chat,
        lambda b: str(b["choices"][0]["message"]["content"]),
        lambda e: "".join(c["delta"].get("content") or "" for c in e["choices"]),
        at_top,
    ),
    "completions": Api(
        "/v1/completions",
        "max_tokens",
        plain,
        lambda b: str(b["choices"][0]["text"]),
        lambda e: "".join(c["text"] for c in e["choices"]),
        at_top,
    ),
    "responses": Api(
        "/v1/responses",
        "max_output_tokens",
        responses,
        lambda b: str(b["output"][0]["content"][0]["text"]),
        lambda e: str(e["delta"]) if e["type"] == "response.output_text.delta" else "",
        in_response,
    ),
    "messages": Api(
        "/v1/messages",
        "max_tokens",
        chat,
        lambda b: str(b["content"][0]["text"]),
        lambda e: str(e["delta"]["text"]) if e["type"] == "content_block_delta" else "",
        at_top,
    ),
}


async def decoded(
    engine: Engine, api: Api, body: JSON, *, stream: bool, base: str | None = None
) -> tuple[str, JSON | None]:
    """The answer and its handle; D's, if no other `base` is asked."""
    base = base or engine.d
    if not stream:
        status, answer = await engine.post(base, api.path, body)
        assert status == 200, answer
        return api.text(answer), answer.get("kv_transfer_params")
    async with engine.session.post(base + api.path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    handles = [handle for handle in map(api.handle, events) if handle is not None]
    assert len(handles) <= 1
    return "".join(map(api.delta, events)), handles[0] if handles else None


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("name", APIS)
async def test_the_handle_of_a_turn_is_there_and_is_read(engine: Engine, name: str, *, stream: bool) -> None:
    api = APIS[name]
    messages: list[JSON] = [{"role": "user", "content": f"{name} {stream}. {question(0)}"}]
    reads: list[int] = []
    given: JSON = {}
    for turn in range(3):
        prefill = api.body(messages, 1) | {"kv_transfer_params": {**COLD, **given}}
        status, answer = await engine.post(engine.p, api.path, prefill)
        assert status == 200, answer
        report = answer["kv_transfer_params"]["kvreturn"]
        reads.append(report["read"])
        body = api.body(messages, 40)
        text, handle = await decoded(
            engine, api, body | {"kv_transfer_params": answer["kv_transfer_params"]}, stream=stream
        )
        status, answer = await engine.post(engine.single, api.path, body)
        assert text == api.text(answer)
        assert handle
        assert {"block_size", "digests", "generated", "ttl"} <= handle["kvreturn"].keys()
        held = handle["remote_num_tokens"]
        given = sealed(handle)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question(turn + 1)}]
    print(f"{name}: read {reads}, last held {held}")
    assert reads[0] == 0
    assert min(reads[1:]) > 0


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("name", ["responses", "messages"])
async def test_a_conversation_through_the_gateway_is_read_back(engine: Engine, name: str, *, stream: bool) -> None:
    api = APIS[name]
    messages: list[JSON] = [{"role": "user", "content": f"gateway, {name} {stream}. {question(0)}"}]
    before, turns = engine.outcomes(), 4
    for turn in range(turns):
        body = api.body(messages, 40)
        text, handle = await decoded(engine, api, body, stream=stream, base=engine.gateway)
        assert handle is None
        status, answer = await engine.post(engine.single, api.path, body)
        assert (status, text) == (200, api.text(answer))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question(turn + 1)}]
    async with asyncio.timeout(5):
        while sum((after := engine.outcomes()).values()) < sum(before.values()) + turns:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    counted = {outcome: after[outcome] - before.get(outcome, 0) for outcome in after}
    print(f"{name}: {counted}")
    assert counted.pop("first_turn") == 1
    assert counted.get("hit", 0) + counted.get("partial_hit", 0) == turns - 1
