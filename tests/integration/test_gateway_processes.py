"""The router as a process of its own: killed, restarted, stuck, and drained, with real Envoy and streams that run."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web

from kvreturn.envoy.process import Child
from support.envoy import Json, client_ext_proc, scripts
from support.gateway import BODY_MODES, CHAT, FAST, Answer, configuration, what_comes
from support.nodes import COLD, FakePrefill, Seen, carried_handle, chat, handle, sent_params
from support.processes import EVENTS, FIRST, NEXT, SSE, Paused, apart, once_up
from support.tap import Tap

pytestmark = pytest.mark.parametrize("shipped", BODY_MODES)

MESSAGE = chat("Hi", max_tokens=9)

# How much D has sent when the router dies: it is between two events, in the middle of the handle, right behind it.
MOMENTS = (
    len(EVENTS[0] + EVENTS[1]),
    b"".join(EVENTS).index(b"remote_engine_id"),
    len(b"".join(EVENTS[:-1])) - 1,
)


async def test_killed_in_mid_stream_it_takes_the_handle_with_it(shipped: str, tmp_path: Path) -> None:
    """The answer is cut, or passes without the router; never unstripped. The next request fails; then one is cold."""
    held = Paused(0)
    async with apart(shipped, tmp_path, held) as (there, router, p, d):
        for held.before in MOMENTS:
            async with there.client.post(CHAT, data=FIRST) as answer:
                got = await answer.content.readexactly(len(EVENTS[0]))
                await asyncio.sleep(0.1)  # in the fast lane the router lets go of the answer right behind its headers
                await router.kill()
                held.go_on.set()
                rest, whole = await what_comes(answer)
            assert whole == (shipped == FAST)
            assert got + rest == SSE if whole else SSE.startswith(got + rest)
            count = len(p.seen), len(d.seen)
            assert (await there.post(CHAT, NEXT)).status == 500
            assert (len(p.seen), len(d.seen)) == count
            await router.start()
            assert await once_up(there, NEXT) == SSE
            assert sent_params(p.seen[-1].body) == COLD
            assert await router.outcomes() == {"not_a_continuation": 1}
            held.go_on.clear()


async def test_restarted_between_turns_it_has_forgotten_them(shipped: str, tmp_path: Path) -> None:
    held = Paused(0)
    held.go_on.set()
    async with apart(shipped, tmp_path, held) as (there, router, p, _):
        assert (await there.post(CHAT, FIRST)).body == SSE
        assert (await there.post(CHAT, NEXT)).body == SSE
        assert carried_handle(p.seen[-1].body) == handle()
        assert await router.stop() == 0
        await router.start()
        third = chat("Hi", "Good morning", "And?", "Good morning", "Go on", stream=True)
        assert await once_up(there, third) == SSE
        assert sent_params(p.seen[-1].body) == COLD


async def test_016_a_stuck_router_is_a_504_and_a_dead_one_a_500(shipped: str, tmp_path: Path) -> None:
    """In full duplex Envoy runs no timer: there the client waits until the router is gone."""

    def impatient(bootstrap: Json) -> None:
        client_ext_proc(bootstrap)["message_timeout"] = "0.3s"
        for script in scripts(bootstrap):
            script["inline_string"] = re.sub(
                "REQUEST_SECONDS = [0-9.]+", "REQUEST_SECONDS = 0.3", script["inline_string"]
            )

    held = Paused(0)
    held.go_on.set()
    async with apart(shipped, tmp_path, held, impatient) as (there, router, p, d):
        router.signal(signal.SIGSTOP)
        waiting = asyncio.create_task(there.post(CHAT, FIRST))
        if shipped == "full-duplex":
            await asyncio.sleep(0.6)
            assert not waiting.done()
        else:
            assert told(await waiting) == (504, "GatewayTimeout")
        await router.kill()
        if shipped == "full-duplex":
            assert told(await waiting) == (500, "InternalServerError")
        assert told(await there.post(CHAT, FIRST)) == (500, "InternalServerError")
        message = await there.post("/v1/messages", MESSAGE)
        assert told(message) == (500, "api_error")
        assert json.loads(message.body)["type"] == "error"
        assert not p.seen + d.seen


async def test_load_balancers_hear_of_a_killed_router_within_seconds(shipped: str, tmp_path: Path) -> None:
    async with apart(shipped, tmp_path, Paused(0)) as (there, router, _, _):
        for change, status in ((router.kill, 503), (router.start, 200)):
            assert (await there.request("GET", "/kvreturn/ready")).status == (200 if status == 503 else 503)
            await change()
            async with asyncio.timeout(3):
                while (await there.request("GET", "/kvreturn/ready")).status != status:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.02)


async def test_up_drains_streams_and_prefill_legs_that_run(shipped: str, tmp_path: Path) -> None:
    """SIGTERM to `kvreturn up`: whatever was begun comes to its end, byte for byte, and the exit code is 0."""
    held, slow = Paused(len(EVENTS[0])), asyncio.Event()

    async def computes(seen: Seen) -> web.StreamResponse:
        if b"slow" in seen.body:
            await slow.wait()
        return await plain_p(seen)

    async with FakePrefill() as p, FakePrefill(held) as d:
        plain_p, p.handler = p.handler, computes
        config = configuration(shipped, [p.address], [d.address], drain_timeout=20, secret="s3cret")
        path = tmp_path / "kvreturn.yaml"
        path.write_text(yaml.safe_dump(config))
        lines: list[str] = []
        argv = [sys.executable, "-m", "kvreturn.cli.main", "up", "--config", str(path), "--concurrency", "1"]
        up, tap = Child("up", argv, lambda _, line: lines.append(line)), Tap()
        await up.start()
        try:
            async with tap.before(config["envoy"]["listen"]), aiohttp.ClientSession() as client:
                await said(lines, "ready: ")
                url = f"http://{tap.address}{CHAT}"
                legged = asyncio.create_task(post(client, url, chat("slow", stream=True)))
                async with asyncio.timeout(5), client.post(url, data=FIRST) as answer:
                    got = await answer.content.readexactly(len(EVENTS[0]))
                    while len(p.seen) < 2:  # noqa: ASYNC110 - both are under way
                        await asyncio.sleep(0.005)
                    os.kill(up.pid, signal.SIGTERM)
                    await said(lines, "stopping")
                    await refused(config["envoy"]["listen"])
                    slow.set()
                    held.go_on.set()
                    got += await answer.read()
                assert (got, await legged) == (SSE, (200, SSE))
                assert await asyncio.wait_for(up.wait(), 10) == 0
                assert not tap.leaks(p.address, d.address)
        finally:
            await up.stop(5)


def told(answer: Answer) -> tuple[int, str]:
    """Status, and the type of an error of Envoy's own."""
    assert (answer.headers["content-type"], answer.headers["retry-after"]) == ("application/json", "1")
    error = json.loads(answer.body)["error"]
    assert error["message"].startswith("kvreturn: ")
    assert error.get("code", answer.status) == answer.status
    return answer.status, error["type"]


async def said(lines: list[str], text: str) -> None:
    """Wait until one of the lines has this text."""
    async with asyncio.timeout(20):
        while not any(text in line for line in lines):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)


async def post(client: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, bytes]:
    async with client.post(url, data=body) as answer:
        return answer.status, await answer.read()


async def refused(address: str) -> None:
    """Wait until nobody listens there any more."""
    host, port = address.split(":")
    with contextlib.suppress(ConnectionError):
        while True:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            await asyncio.sleep(0.01)
