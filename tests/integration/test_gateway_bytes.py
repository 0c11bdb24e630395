"""What passes through real Envoy and the router: every byte, in both shipped body modes, however it is cut."""

import asyncio
import hashlib
import json
import random
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support import corpus, cuts
from support.gateway import CHAT, COMPLETIONS, SHIPPED, scripted
from support.nodes import Seen, carried_handle, chat, decode_body, decode_events, handle, streams

pytestmark = pytest.mark.parametrize("shipped", SHIPPED)

_HIDDEN = (b"kv_transfer_params", b"ec_transfer_params")  # of the KV cache, and of vLLM's encoder cache
_KIB, _MIB = 1 << 10, 1 << 20
_JSON = {"content-type": "application/json"}


def without_members(text: bytes) -> bytes:
    """JSON or events, less the members that hold handles, which do not come first in their objects."""
    for name in _HIDDEN:
        found = re.search(rb',\s*"%s":\s*' % name, text)
        if found:
            _, end = json.JSONDecoder().raw_decode(text.decode("latin-1"), found.end())
            text = text[: found.start()] + text[end:]
    return text


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def path_of(recording: Path) -> str:
    """The endpoint that such a recording comes from."""
    for word, path in (("completions", COMPLETIONS), ("responses", "/v1/responses"), ("messages", "/v1/messages")):
        if word in recording.name:
            return path
    return CHAT


async def test_recorded_streams_less_the_handle(shipped: str) -> None:
    recordings = corpus.every("data/streams/*.sse", "samples/sse_*.txt")
    rng = random.Random(7)
    damaged = {}
    async with scripted(shipped) as (there, _, d):
        for recording in recordings:
            text = recording.read_bytes()
            d.handler = streams(*cuts.randomly(rng, text, 211))
            answer = await there.post(path_of(recording), chat("Hi", prompt="Hi" * 200, input="Hi"))
            if (answer.status, answer.body) != (200, without_members(text)):
                damaged[recording.name] = answer
        captured = there.metric("handles_captured_total")
    assert not damaged
    assert captured == sum(b'"kv_transfer_params":{' in r.read_bytes() for r in recordings) > 0


async def test_recorded_bodies_less_the_handle(shipped: str) -> None:
    recordings = corpus.every("samples/*_D_response.json")
    rng = random.Random(7)
    async with scripted(shipped) as (there, _, d):
        for recording in recordings:
            text = recording.read_bytes()
            d.handler = streams(*cuts.randomly(rng, text, 211), headers=_JSON)
            answer = await there.post(path_of(recording), chat("Hi", prompt="Hi" * 200))
            assert answer.body == without_members(text), recording.name


async def test_a_request_of_4_mb(shipped: str) -> None:
    rng = random.Random(4)
    text = "".join(rng.choices('abcdefgh \n"\\é🌍', k=3_000_000))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()
    assert len(body) > 4_000_000
    async with scripted(shipped) as (there, p, d):
        d.handler = streams(decode_body(), headers=_JSON)
        assert (await there.post(CHAT, body)).status == 200
    assert digest(without_members(d.seen[0].body)) == digest(body)
    assert json.loads(p.seen[0].body)["messages"][0]["content"] == text


@pytest.mark.parametrize("size", [64 * _KIB, 100_001, _MIB])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_events_longer_than_a_message_of_envoys(shipped: str, size: int, path: str) -> None:
    content = "".join(random.Random(size).choices("abcdefgh ", k=size))
    events = decode_events(content.replace(" ", "_"), params=handle() if path == CHAT else None)
    assert max(map(len, events)) > size
    text = b"".join(events)
    async with scripted(shipped) as (there, _, d):
        d.handler = streams(*cuts.by(30_011, text))
        answer = await there.post(path, chat("Hi", input="Hi"))
    assert digest(answer.body) == digest(without_members(text))
    assert "content-length" not in answer.headers


async def test_a_body_of_1_mib_in_one_piece(shipped: str) -> None:
    text = decode_body("".join(random.Random(1).choices("abcdefgh ", k=_MIB)), params=handle())
    async with scripted(shipped) as (there, _, d):
        d.handler = streams(*cuts.by(30_011, text), headers=_JSON)
        answer = await there.post(CHAT, chat("Hi"))
    assert digest(answer.body) == digest(without_members(text))
    assert b"choices" in answer.body


async def test_a_handle_of_25_000_blocks(shipped: str) -> None:
    """It comes in one event, stays here, and goes to P with the next turn, each block in its place."""
    blocks = list(range(100_000, 125_000))
    proof: dict[str, Any] = {**handle()["kvreturn"], "digests": b64encode(random.Random(2).randbytes(200_000)).decode()}
    huge = handle(remote_block_ids=[blocks], remote_num_tokens=400_000, kvreturn=proof)
    events = decode_events(params=huge)
    assert max(map(len, events)) > 440_000
    async with scripted(shipped) as (there, p, d):
        d.handler = streams(*cuts.by(30_011, b"".join(events)))
        answer = await there.post(CHAT, chat("Hi", stream=True))
        assert answer.body == b"".join(decode_events())
        assert (await there.post(CHAT, chat("Hi", "Good morning", "And?", stream=True))).body == answer.body
        assert await there.outcomes(2) == {"first_turn": 1, "hit": 1}
    assert carried_handle(p.seen[1].body) == huge


async def test_events_go_on_one_by_one(shipped: str) -> None:
    """The client has an event before D makes the next one. What comes with the handle and behind it may wait."""
    events = decode_events("one two three four", params=handle())
    (end,) = (i for i, event in enumerate(events) if b"remote_" in event)
    seen_by_client = asyncio.Event()

    async def handler(seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(seen.request)
        for event in events[:end]:
            seen_by_client.clear()
            await response.write(event)
            await asyncio.wait_for(seen_by_client.wait(), 5)
        await response.write(b"".join(events[end:]))
        await response.write_eof()
        return response

    got = []
    async with (
        scripted(shipped, handler) as (there, _, _),
        there.client.post(CHAT, data=chat("Hi", stream=True)) as answer,
    ):
        async for piece in answer.content.iter_any():
            got.append(piece)
            seen_by_client.set()
    expected = decode_events("one two three four")
    assert got[:end] == expected[:end]
    assert b"".join(got) == b"".join(expected)
