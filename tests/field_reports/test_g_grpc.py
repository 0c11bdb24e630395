"""Section G of the field reports: operating a grpc.aio server. Reports 124 to 131 have their tests beside others of
their kind (tests/unit/server, tests/integration).
"""

import asyncio
import contextlib
import gc
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
from aiohttp import web

from kvreturn.server.app import Router, running
from support.extproc import Envoy, Mode, Modes, Request, Response
from support.harness import DECODE, harness, settings
from support.nodes import FakePrefill, Seen, answer, chat, decode_events, handle, hangs
from support.streams import GrpcStream

EVENTS = decode_events(params=handle())
TURN, END = Request(pieces=[chat("Hi")]), Response(EVENTS, node=DECODE)
MIB = 1 << 20


@contextlib.asynccontextmanager
async def router(folder: Path, node: FakePrefill) -> AsyncIterator[tuple[Router, grpc.aio.Channel]]:
    listen = f"unix:{folder}/router"
    config = settings(listen=listen, pools={"prefill": [node.address], "decode": [DECODE]}, drain_timeout=0.1)
    unlimited = [("grpc.max_receive_message_length", -1)]  # as Envoy is
    async with running(config) as one, grpc.aio.insecure_channel(listen, options=unlimited) as channel:
        await channel.channel_ready()
        yield one, channel


async def quiet(one: Router) -> None:
    """Until the router is done with all streams."""
    async with asyncio.timeout(5):
        while one._service.running:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)


async def test_fr126_nothing_of_aborted_turns_is_still_under_way(tmp_path: Path) -> None:
    """Neither on the side of Envoy nor towards P: whoever is gone is let go of, and not left to the collector."""
    async with FakePrefill(hangs) as node, router(tmp_path, node) as (one, channel):
        streams = [GrpcStream(channel) for _ in range(100)]
        turns = [asyncio.create_task(Envoy(stream).request(TURN)) for stream in streams]
        async with asyncio.timeout(20):
            while len(node.seen) < 100:  # noqa: ASYNC110 - all are with P
                await asyncio.sleep(0.01)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        await quiet(one)
        assert one.world.metrics.value("kvreturn_live_streams") == 0
        del streams, turns, stream
        gc.collect()
        things = [o for o in gc.get_objects() if isinstance(o, grpc.aio.Call | aiohttp.ClientResponse)]
        assert [o for o in things if not (o.done() if isinstance(o, grpc.aio.Call) else o.closed)] == []


@pytest.mark.parametrize("mode", [Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED])
async def test_fr132_five_mib_pass_in_one_message_and_come_back_in_pieces(tmp_path: Path, mode: Mode) -> None:
    """A buffered body has to go back as one mutation; a streamed one goes back in pieces."""
    body = chat("x" * (5 * MIB))
    async with FakePrefill() as node, router(tmp_path, node) as (_, channel):
        envoy = Envoy(GrpcStream(channel), Modes(mode))
        await envoy.play(Request(pieces=[body]), END)
        assert json.loads(envoy.upstream.body)["messages"] == json.loads(body)["messages"]
        assert envoy.client.body == b"".join(decode_events())
        sizes = [len(answer.SerializeToString()) for answer in envoy.answers]
        assert (max(sizes) > 5 * MIB) == (mode == Mode.BUFFERED)
        assert mode == Mode.BUFFERED or max(sizes) < 2 * MIB


async def test_fr133_other_streams_go_on_while_eight_mb_are_parsed() -> None:
    """An event of another stream, every 10 ms, never waits for 50 ms of work in the loop's thread.

    Counted is the thread's own processor time, so that a busy machine changes nothing.
    """
    held: list[float] = []
    over = asyncio.Event()

    async def others() -> None:
        while not over.is_set():
            begun = time.thread_time()
            await asyncio.sleep(0.01)
            held.append(time.thread_time() - begun)

    words = "word " * 1_600
    big = chat(*(f"{n} {words}" for n in range(1_001)))
    assert len(big) > 8_000_000
    one = harness(answer())  # P's part is not ours: it reads nothing
    await one.play(TURN, END)
    ticking = asyncio.create_task(others())
    await asyncio.sleep(0.03)
    envoy = await one.play(Request(pieces=[big]), END)
    over.set()
    await ticking
    assert envoy.client.status == 200
    assert max(held) < 0.05


async def test_fr134_an_answer_of_p_that_comes_after_the_client_left_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answered = asyncio.Event()

    async def late(seen: Seen) -> web.StreamResponse:
        """Answers 100 ms after the client left, and whether or not anybody is there."""

        async def answer() -> None:
            await left.wait()
            await asyncio.sleep(0.1)
            if seen.request.transport:
                seen.request.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            answered.set()

        await asyncio.shield(asyncio.ensure_future(answer()))
        return web.Response()

    left = asyncio.Event()
    async with FakePrefill(late) as node, router(tmp_path, node) as (one, channel):
        stream = GrpcStream(channel)
        turn = asyncio.create_task(Envoy(stream).request(TURN))
        await node.arrived.wait()
        stream.cancel()
        left.set()
        await asyncio.wait_for(answered.wait(), 5)
        await asyncio.gather(turn, return_exceptions=True)
        await quiet(one)
        assert await Envoy(GrpcStream(channel)).request(Request(pieces=[b"{}"])) is False  # the router is as before
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
