"""What a turn leaves is in the store before the client can know that the turn is over, and that waits for one deadline.

The store is a real redis-server behind a relay that delays its answers.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from support.events import response_events, response_object
from support.extproc import ALL_MODES, Envoy, Mode, Modes, Request, Response
from support.harness import DECODE, Harness
from support.nodes import chat, decode_body, decode_events, handle
from support.redis import Server, needs_redis, outcome, server, sharing
from support.tap import Tap
from support.turns import compact

pytestmark = needs_redis
DELAY = 0.2  # seconds that each store call takes
EVENTS = decode_events(params=handle())
JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream"}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def tap(redis: Server) -> AsyncIterator[Tap]:
    tap = Tap()
    async with tap.before(f"127.0.0.1:{redis.port}"):
        yield tap


SHAPES = {
    "events": (EVENTS, SSE, b'"finish_reason":"stop"'),
    "the last event with [DONE]": ([*EVENTS[:-2], EVENTS[-2] + EVENTS[-1]], SSE, b"[DONE]"),
    "events in one piece": ([b"".join(EVENTS)], SSE, b"[DONE]"),
    "without the last blank line": ([b"".join(EVENTS[:-1]).rstrip()], SSE, b'"finish_reason":"stop"'),
    "a JSON body": ([decode_body(params=handle())], JSON, b'"finish_reason": "stop"'),
    "a JSON body in two": ([(body := decode_body(params=handle()))[:99], body[99:]], JSON, b'"finish_reason": "stop"'),
}


@pytest.mark.parametrize("trailers", [False, True], ids=["", "trailers"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_whoever_has_seen_the_end_finds_the_handle_at_any_router(
    shape: str,
    trailers: bool,  # noqa: FBT001 - by name
    redis: Server,
    tap: Tap,
) -> None:
    """The client leaves at that moment, and comes back through another router."""
    pieces, headers, end = SHAPES[shape]
    modes = [m for m in ALL_MODES if m.response != Mode.BUFFERED]
    if trailers:  # they come too late for an event that was held back for want of its end, except in full duplex
        late = shape == "without the last blank line"
        modes = [m for m in modes if m.trailers and not (late and m.response != Mode.FULL_DUPLEX_STREAMED)]
    async with sharing(f"redis://{tap.address}") as slow, sharing(redis.url) as other:
        tap.delay = 0.03
        for i, mode in enumerate(modes):
            name = f"{shape} {trailers} {i}"
            await _until_seen(slow, name, mode, Response(pieces, headers=headers, node=DECODE, trailers=trailers), end)
            assert await outcome(other, name, "Good morning", "And?") == "hit", mode


async def _until_seen(router: Harness, name: str, modes: Modes, response: Response, end: bytes) -> None:
    """A turn whose client hangs up as soon as these bytes are there."""
    envoy = router.envoy(modes)
    assert await envoy.request(Request(pieces=[chat(name)]))
    responding = asyncio.create_task(envoy.respond(response))
    async with asyncio.timeout(5):
        while end not in envoy.client.body:  # noqa: ASYNC110 - as fast as it can be seen
            await asyncio.sleep(0)
    responding.cancel()
    await asyncio.gather(responding, return_exceptions=True)
    envoy._stream.cancel()


async def timed(envoy: Envoy, response: Response) -> float:
    begun = time.monotonic()
    await envoy.respond(response)
    await envoy.finish()
    return time.monotonic() - begun


SESSION = {"content-type": "application/json", "x-session-id": "a session"}
RESPONSES = compact({"model": "m", "input": "Hi"})
ENDS = {
    # The session's note is written too, which takes up to three calls.
    "chat": ("/v1/chat/completions", chat("Hi"), Response(EVENTS, headers=SSE, node=DECODE)),
    # The owner of the response is written too.
    "response": (
        "/v1/responses",
        RESPONSES,
        Response([compact(response_object("Good morning", params=handle()))], headers=JSON, node=DECODE),
    ),
}


@pytest.mark.parametrize("kind", ENDS)
async def test_the_end_waits_for_one_store_call(kind: str, tap: Tap) -> None:
    path, body, response = ENDS[kind]
    async with sharing(f"redis://{tap.address}", breaker_failures=1000) as router:
        envoy = router.envoy()
        assert await envoy.request(Request(path, [body], headers=SESSION))
        tap.delay = DELAY
        assert DELAY <= await timed(envoy, response) < 1.9 * DELAY
        tap.delay = 0.0
        await router.world.tasks.drain(1.0)
        assert router.metric("handles_captured_total") == 1


@pytest.mark.parametrize("kind", ENDS)
async def test_the_end_waits_no_longer_than_the_deadline(kind: str, tap: Tap) -> None:
    path, body, response = ENDS[kind]
    async with sharing(f"redis://{tap.address}", deadline=DELAY, breaker_failures=1000) as router:
        envoy = router.envoy()
        assert await envoy.request(Request(path, [body], headers=SESSION))
        tap.delay = 5.0
        assert DELAY <= await timed(envoy, response) < 1.9 * DELAY
        assert envoy.client.ended
        tap.delay = 0.0


async def test_a_streamed_response_waits_at_its_first_event_and_at_its_end(tap: Tap) -> None:
    """Its id is in the first one, by which the client may ask for it; its handle comes with the last."""
    async with sharing(f"redis://{tap.address}", breaker_failures=1000) as router:
        envoy = router.envoy()
        body = json.dumps({"model": "m", "input": "Hi", "stream": True}).encode()
        assert await envoy.request(Request("/v1/responses", [body], headers=SESSION))
        tap.delay = DELAY
        took = await timed(envoy, Response(response_events(params=handle()), headers=SSE, node=DECODE))
        assert 2 * DELAY <= took < 2.9 * DELAY
        tap.delay = 0.0
