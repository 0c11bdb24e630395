"""One client's large or odd body must not stop all other streams of the process."""

import asyncio
import json
import time

import pytest

from support.harness import harness
from support.messages import Request, Response

END = Response([b"{}"], 200, {"content-type": "application/json"})


async def longest_pause(body: bytes) -> tuple[float, int | None]:
    """Seconds for which the event loop stood still, and the status that the client got."""
    worst, over = 0.0, asyncio.Event()

    async def tick() -> None:
        nonlocal worst
        while not over.is_set():
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - begun)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    router = harness()
    envoy = await router.play(Request(pieces=[body]), END)
    over.set()
    await ticking
    return worst, envoy.client.status


async def test_digesting_a_long_history_leaves_the_loop_free() -> None:
    messages = [{"role": "user", "content": f"{i} " + "x" * 40} for i in range(40_000)]
    worst, status = await longest_pause(json.dumps({"model": "m", "messages": messages}).encode())
    assert worst < 0.5
    assert status == 200


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b'{"model":"m","messages":[' + b",".join([b"{}"] * 60_000) + b"]}", 413, "60000 objects; at most 50000"),
        (b'{"model":"m","a":' + b',"a":'.join([b"1"] * 20_000) + b"}", 400, "more than 10000 members"),
        (
            b'{"model":"m","metadata":{"x":"' + b"\\u0061" * 50_000 + b'"},"messages":[{}]}',
            400,
            "more than 262144 bytes",
        ),
    ],
    ids=["messages", "members", "metadata"],
)
async def test_more_of_anything_than_anybody_needs_is_refused(body: bytes, status: int, word: str) -> None:
    envoy = await harness().play(Request(pieces=[body]), END)
    assert envoy.client.status == status
    assert word in json.loads(envoy.client.body)["error"]["message"]
