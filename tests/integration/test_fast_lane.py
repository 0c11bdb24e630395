"""The fast lane through real Envoy: what clients get, when the router knows of it, and what faults do to it."""

import asyncio
import contextlib
import os
import random
import signal
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvreturn.config import Settings
from kvreturn.core.address import split_address
from kvreturn.core.ports import Put
from kvreturn.envoy import names
from kvreturn.server import calls, fast
from kvreturn.server.app import running
from support import cuts
from support.envoy import unused_address
from support.events import message_events, response_events
from support.gateway import (
    CHAT,
    FAST,
    PORTABLE,
    Front,
    client,
    configuration,
    envoy_before,
    product,
    scripted,
    what_comes,
)
from support.nodes import (
    COLD,
    FakePrefill,
    Seen,
    carried_handle,
    chat,
    decode_body,
    handle,
    replies,
    sent_params,
    streams,
)
from support.processes import EVENTS, FIRST, NEXT, SSE, Paused, apart, once_up
from support.talk import Talk

LANES = (PORTABLE, FAST)
_SMALL = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
_LARGE = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * (1 << 20))


async def test_a_conversation_is_read_back_turn_after_turn_and_names_stay_secret() -> None:
    async with product(FAST) as there, client(there.front.url) as sdk:
        talk = Talk("Ada", CHAT, stream=True)
        for _ in range(4):
            await talk.turn(sdk)
        assert await there.front.outcomes(4) == {"first_turn": 1, "hit": 3}
        assert not there.front.tap.leaks("kvreturn_router")
        for node in (*there.p, *there.d):
            for request in node.requests:
                assert not [h for h in request.headers if h.lower().startswith("x-kvreturn")]


@pytest.mark.parametrize(
    ("path", "pieces", "body"),
    [
        (CHAT, EVENTS, chat("Hi", stream=True)),
        ("/v1/responses", response_events(params=handle()), b'{"model":"m","input":"Hi","stream":true}'),
        (
            "/v1/messages",
            message_events(params=handle()),
            b'{"model":"m","max_tokens":9,"stream":true,"messages":[{"role":"user","content":"Hi"}]}',
        ),
        (CHAT, [decode_body(params=handle())], chat("Hi")),
        (CHAT, [_SMALL, _LARGE, *EVENTS], chat("Hi", stream=True)),
        (CHAT, [e.replace(b"\n", b"\r\n") for e in EVENTS], chat("Hi", stream=True)),
        (CHAT, [b"".join(EVENTS[:-1]).rstrip()], chat("Hi", stream=True)),
    ],
    ids=["chat", "responses", "messages", "a JSON body", "an event of 1 MiB", "CRLF", "no blank line at the end"],
)
async def test_both_lanes_give_clients_and_the_store_the_same(path: str, pieces: Sequence[bytes], body: bytes) -> None:
    text, rng, seen = b"".join(pieces), random.Random(8), []
    kind = "text/event-stream" if text.lstrip()[:1] != b"{" else "application/json"
    for lane in LANES:
        got = []
        async with scripted(lane) as (there, _, d):
            for cut in (list(pieces), cuts.randomly(rng, text, 1 + len(text) // 9), [text]):
                d.handler = streams(*cut, headers={"content-type": kind})
                answer = await there.post(path, body)
                got.append((answer.status, answer.body))
                assert b"remote_" not in answer.body
            counts = {name: there.metric(f"{name}_total") for name in ("handles_captured", "turns_incomplete")}
            seen.append((got, await there.outcomes(3), counts))
    assert seen[0] == seen[1]
    assert len({body for _, body in seen[0][0]}) == 1


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_an_answer_that_cannot_be_read_does_not_leak(lane: str, encoding: str) -> None:
    headers = {"content-type": "text/event-stream", "content-encoding": encoding}
    async with scripted(lane, streams(*EVENTS, headers=headers)) as (there, _, _d):
        got = b""
        async with there.client.post(CHAT, data=FIRST) as answer:
            with contextlib.suppress(aiohttp.ClientPayloadError):  # what is no gzip may be cut once that is found
                while data := await answer.content.readany():
                    got += data
        assert answer.status == 502 or encoding == "gzip"
        assert b"remote_" not in got


async def test_whoever_has_the_end_of_a_turn_finds_it_in_the_store() -> None:
    """The store is slow, and the client quick: it sends the next turn as soon as it has read the finish reason."""
    async with scripted(FAST, streams(*EVENTS), store={"deadline": 0.2}) as (there, p, _):
        assert there.world
        put = there.world.guard.put

        async def slowly(what: Put) -> Any:  # noqa: ANN401 - as it is
            await asyncio.sleep(0.05)
            return await put(what)

        there.world.guard.put = slowly  # type: ignore[method-assign,assignment]
        for i in range(5):
            async with there.client.post(CHAT, data=chat(f"Hi {i}", stream=True)) as answer:
                got = b""
                while b'"finish_reason":"stop"' not in got:
                    got += await answer.content.readany()
            next_turn = await there.post(CHAT, chat(f"Hi {i}", "Good morning", "And?", stream=True))
            assert next_turn.body == SSE
            assert carried_handle(p.seen[-1].body) == handle()
        assert await there.outcomes(10) == {"first_turn": 5, "hit": 5}


async def test_a_router_that_is_killed_does_not_cut_answers_and_the_next_turn_is_cold(tmp_path: Path) -> None:
    held = Paused(b"".join(EVENTS).index(b"remote_engine_id"))  # in the middle of the handle
    async with apart(FAST, tmp_path, held) as (there, router, p, _):
        async with there.client.post(CHAT, data=FIRST) as answer:
            got = await answer.content.readexactly(len(EVENTS[0]))
            await asyncio.sleep(0.1)  # the router lets go of the answer right behind its headers
            await router.kill()
            held.go_on.set()
            rest, whole = await what_comes(answer)
        assert whole
        assert got + rest == SSE
        await router.start()
        assert await once_up(there, NEXT) == SSE
        assert sent_params(p.seen[-1].body) == COLD
        assert await router.outcomes() == {"not_a_continuation": 1}


async def test_a_router_that_hangs_holds_an_answer_for_half_a_second(tmp_path: Path) -> None:
    held = Paused(len(EVENTS[0]))
    async with apart(FAST, tmp_path, held) as (there, router, p, _):
        async with there.client.post(CHAT, data=FIRST) as answer:
            got = await answer.content.readexactly(len(EVENTS[0]))
            await asyncio.sleep(0.1)
            router.signal(signal.SIGSTOP)
            begun = time.monotonic()
            held.go_on.set()
            rest, whole = await what_comes(answer)
        assert whole
        assert got + rest == SSE
        assert 0.4 < time.monotonic() - begun < 2
        router.signal(signal.SIGCONT)  # what it had no time for is told again
        assert await router.outcomes() == {"first_turn": 1}
        assert (await there.post(CHAT, NEXT)).body == SSE
        assert carried_handle(p.seen[-1].body) == handle()


async def gone(there: Front) -> None:
    """Wait until no turn is live."""
    assert there.world
    async with asyncio.timeout(5):
        while there.world.admission.live:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_and_a_node_that_dies_are_noticed() -> None:
    read = asyncio.Event()

    async def dies(seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(seen.request)
        await response.write(EVENTS[0])
        await (asyncio.Event() if b"leaves" in seen.body else read).wait()
        assert seen.request.transport
        seen.request.transport.abort()
        return response

    async with scripted(FAST, dies) as (there, _, d):
        async with there.client.post(CHAT, data=chat("Hi", stream=True)) as answer:
            assert await answer.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            read.set()
            assert await what_comes(answer) == (b"", False)
        await gone(there)
        async with there.client.post(CHAT, data=chat("who leaves", stream=True)) as answer:
            await answer.content.readexactly(len(EVENTS[0]))
            answer.close()
        await asyncio.wait_for(d.left.wait(), 5)
        await gone(there)
        assert await there.outcomes(2) == {"first_turn": 2}
        assert there.metric("turns_incomplete_total") == 2
        assert not there.store.handles


async def test_turns_go_with_the_envoy_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_SILENT", 0.2)
    async with scripted(FAST, streams(*EVENTS)) as (there, _, d):
        assert (await there.post(CHAT, FIRST)).body == SSE
        await asyncio.sleep(0.5)  # Envoy begins to log once an exchange is over
        d.handler = Paused(len(EVENTS[0]))
        async with there.client.post(CHAT, data=FIRST) as answer:
            await answer.content.readexactly(len(EVENTS[0]))
            assert there.world
            assert there.world.admission.live == 1
            os.kill(there.envoy.child.pid, signal.SIGKILL)
            await gone(there)
        # Nobody knows whether the answer had begun.
        assert there.metric("prefill_blocks_stranded_total") == 1
        assert not there.world.admission.live


async def test_an_answer_that_is_awaited_through_another_envoy_still_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is no stream may take longer than any part of a stream."""
    monkeypatch.setattr(fast, "_SILENT", 0.1)

    async def slowly(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(0 if b"quick" in seen.body else 1)
        return await replies(decode_body(params=handle()))(seen)

    async with scripted(FAST, slowly) as (there, _, d):
        plain = there.settings.model_dump(by_alias=True)
        plain["envoy"] |= {name: unused_address() for name in ("listen", "prefill_listen", "admin")}
        async with envoy_before(Settings.model_validate(plain)) as other:
            assert (await other.post(CHAT, chat("quick"))).status == 200
            await asyncio.sleep(0.5)  # Envoy begins to log once an exchange is over
            d.arrived.clear()
            answer = asyncio.create_task(there.post(CHAT, chat("Hi")))
            await d.arrived.wait()
            os.kill(other.envoy.child.pid, signal.SIGKILL)
            assert (await answer).status == 200


async def test_each_router_is_told_of_its_own_turns() -> None:
    async with FakePrefill() as p, FakePrefill(streams(*EVENTS)) as d:
        listens = [unused_address(), unused_address()]
        plain = configuration(FAST, [p.address], [d.address], listen=listens[0])
        plain["envoy"]["routers"] = listens
        one, two = (Settings.model_validate({**plain, "listen": listen}) for listen in listens)
        async with running(one) as first, running(two) as second, envoy_before(one) as there:
            counts = [0.0, 0.0]
            async with asyncio.timeout(20):
                while not all(counts):
                    assert (await there.post(CHAT, FIRST)).body == SSE
                    counts = [r.world.metrics.value("kvreturn_handles_captured_total") for r in (first, second)]
            worlds = first.world, second.world
            assert sum(w.metrics.value("kvreturn_turns_incomplete_total") for w in worlds) == 0


async def test_a_router_that_drains_hears_of_its_answers_to_their_end() -> None:
    """Envoy sends it no more requests, since its health fails; of what it has begun it is told all the same."""
    d = Paused(len(EVENTS[0]))
    async with FakePrefill() as p, FakePrefill(d) as decode:
        listens = [unused_address(), unused_address()]
        plain = configuration(FAST, [p.address], [decode.address], listen=listens[0], drain_timeout=10)
        plain["envoy"]["routers"] = listens
        one, two = (Settings.model_validate({**plain, "listen": listen}) for listen in listens)
        async with running(one) as first, running(two) as second, envoy_before(one) as there:
            async with there.client.post(CHAT, data=FIRST) as answer:
                await answer.content.readexactly(len(EVENTS[0]))
                (owner,) = (r for r in (first, second) if r.world.admission.live)
                draining = asyncio.create_task(owner.drain(10))
                await asyncio.sleep(3)  # Envoy looks at it each second
                d.go_on.set()
                assert await what_comes(answer) == (SSE[len(EVENTS[0]) :], True)
            assert owner.world.metrics.value("kvreturn_handles_captured_total") == 1
            await asyncio.wait_for(draining, 5)


async def test_only_who_knows_a_turns_name_can_tell_of_it() -> None:
    """Neither clients nor nodes reach the endpoint through Envoy: what they send there is a request like any other."""
    async with scripted(FAST, replies(b"{}")) as (there, _, d):
        headers = {"x-kvreturn-turn": "0" * 32, "x-kvreturn-part": "1 1 200,0,", "content-type": "text/plain"}
        answer = await there.post("/kvreturn/part", b"{}", **headers)
        assert answer.status == 200
        assert d.seen[-1].path == "/kvreturn/part"
        assert not [h for h in d.seen[-1].headers if h.startswith("x-kvreturn")]
        assert not there.store.handles


def call(kind: str, body: bytes, port: str = "request", headers: Mapping[str, str] | None = None) -> bytes:
    """What a script sends a router: a chat request of a client, or a part of an answer."""
    about = b64encode(b":method:POST\n:path:/v1/chat/completions\ncontent-type:application/json\n").decode()
    named = {names.HEAD_HEADER: f"{names.SCRIPTS} {kind} {about}", "content-length": str(len(body))}
    lines = [
        f"POST /kvreturn/{port} HTTP/1.1",
        "host: kvreturn",
        *(f"{k}: {v}" for k, v in (named | dict(headers or {})).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_a_client_that_leaves_before_envoy_has_the_routers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turn has no name in Envoy, so that no log tells of its end."""
    monkeypatch.setattr(fast, "_SILENT", 0.1)
    monkeypatch.setattr(calls, "_ARRIVES", 0.1)
    async with scripted(FAST) as (there, _, _d):
        assert there.world
        reader, writer = await asyncio.open_connection(*split_address(there.settings.calls_listen))
        writer.write(call("whole", FIRST))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert there.world.admission.live == 1
        writer.close()
        await gone(there)
        assert not there.metric("live_streams")


async def test_what_no_script_of_ours_says_is_not_looked_into() -> None:
    """A part is unpacked, to many times its size, only where it is known whose it is."""
    async with scripted(FAST) as (there, _, _d):
        reader, writer = await asyncio.open_connection(*split_address(there.settings.calls_listen))
        told = {"x-kvreturn-turn": "0" * 32, "x-kvreturn-part": "1 1 200,0,"}
        for text, status in ((call("", b"packed otherwise", "part", told), b"404"), (call("other", FIRST), b"200")):
            writer.write(text)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split(b" ")[1] == status
        assert (await reader.readline()) == b"answer 500\n"
        writer.close()
