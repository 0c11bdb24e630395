"""Handles on chunks: appended to what vLLM wrote, never instead of it, never as a chunk of their own."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from kvreturn_connector import streams

HANDLE = {"remote_block_ids": [[1, 2]], "x": "}\u00e9"}
FIRST = 'data: {"id":"1","choices":[{"index":0,"delta":{"content":"finish_reason"},"finish_reason":null}]}\n\n'
LAST = 'data: {"id":"1","choices":[{"index":0,"delta":{"content":"\\u00e9"},"finish_reason":"stop"}]}\n\n'
USAGE = 'data: {"id":"1","choices":[],"usage":{"prompt_tokens":1}}\n\n'
DONE = "data: [DONE]\n\n"


@dataclass
class Output:
    text: str
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class Request:
    n: int | None = 1


class Serving:
    async def stream(self, request: Request, results: AsyncIterator[Output]) -> AsyncIterator[str]:
        del request
        async for output in results:
            yield output.text
        yield DONE


async def outputs(*items: Output) -> AsyncIterator[Output]:
    for item in items:
        yield item


def wrapped() -> type[Serving]:
    owner = type("Wrapped", (Serving,), {"stream": Serving.stream})
    streams._wrap(owner, "stream", "results", streams._of_output, streams.add_to_chunk)
    return owner


async def sent(request: Request, *items: Output) -> list[str]:
    return [chunk async for chunk in wrapped()().stream(request, results=outputs(*items))]


async def test_the_chunk_that_ends_the_turn_carries_the_handle_and_all_else_is_vllms() -> None:
    chunks = await sent(Request(), Output(FIRST), Output(LAST, HANDLE), Output(USAGE))
    assert chunks[0] == FIRST
    assert chunks[1].startswith(LAST[: -len("}\n\n")])
    assert json.loads(chunks[1][6:]) == json.loads(LAST[6:]) | {"kv_transfer_params": HANDLE}
    assert chunks[2:] == [USAGE, DONE]


async def test_without_a_handle_nothing_changes() -> None:
    assert await sent(Request(), Output(FIRST), Output(LAST)) == [FIRST, LAST, DONE]


async def test_several_choices_get_none() -> None:
    """vLLM keeps the parameters of one of them, which may be any."""
    assert await sent(Request(n=2), Output(LAST, HANDLE)) == [LAST, DONE]


async def test_wrapping_twice_adds_one_handle() -> None:
    owner = wrapped()
    streams._wrap(owner, "stream", "results", streams._of_output, streams.add_to_chunk)
    chunks = [c async for c in owner().stream(Request(), outputs(Output(LAST, HANDLE)))]
    assert "".join(chunks).count("kv_transfer_params") == 1


@pytest.mark.parametrize(
    ("add", "chunk"),
    [
        (streams.add_to_chunk, DONE),
        (streams.add_to_chunk, FIRST),
        (streams.add_to_chunk, USAGE),
        (streams.add_to_chunk, ": ping\n\n"),
        (streams.add_to_message_stop, "event: ping\ndata: {}\n\n"),
    ],
)
def test_other_chunks_carry_nothing(add: Callable[[str, Any], str | None], chunk: str) -> None:
    assert add(chunk, HANDLE) is None


def test_an_anthropic_stream_carries_it_on_message_stop() -> None:
    event = 'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    changed = streams.add_to_message_stop(event, HANDLE)
    assert changed
    head, data = changed.split("\n", 1)
    assert head == "event: message_stop"
    assert json.loads(data[len("data: ") :]) == {"type": "message_stop", "kv_transfer_params": HANDLE}
