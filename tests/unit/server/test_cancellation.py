"""The client leaves: at any moment P is told at once, and nothing stays behind. Over real gRPC."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvreturn.server.app import Router, running
from kvreturn.store.memory import MemoryStore
from support.extproc import (
    ALL_MODES,
    Envoy,
    Mode,
    Modes,
    Request,
    Response,
    body_message,
    headers_message,
    request_headers,
)
from support.harness import DECODE, outcomes, settings, tasks
from support.nodes import FakePrefill, carried_handle, chat, decode_events, handle, hangs
from support.streams import GrpcStream

TURN = Request(pieces=[chat("Hi")])
NEXT = Request(pieces=[chat("Hi", "Good morning", "And?")])
EVENTS = decode_events(params=handle())
END = Response(EVENTS, node=DECODE)
SSE = {":status": "200", "content-type": "text/event-stream"}
MODES = [Modes(), Modes(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED), Modes(Mode.STREAMED, early=True)]


class Setup:
    """A router that listens, a prefill node, and a channel between this test and the router."""

    def __init__(self, router: Router, node: FakePrefill, channel: grpc.aio.Channel) -> None:
        self.router = router
        self.node = node
        self.channel = channel
        self.before = tasks()

    def envoy(self, modes: Modes) -> tuple[Envoy, GrpcStream]:
        stream = GrpcStream(self.channel)
        return Envoy(stream, modes), stream

    @property
    def store(self) -> MemoryStore:
        store = self.router.world.store
        assert isinstance(store, MemoryStore)
        return store

    def metric(self, name: str) -> float:
        return self.router.world.metrics.value(f"kvreturn_{name}")

    def outcomes(self) -> dict[str, int]:
        return outcomes(self.router.world.metrics)

    async def quiet(self) -> None:
        """Until the router is done with all streams, which must be soon."""
        for _ in range(200):
            if not (self.router._service.running or tasks() - self.before):
                break
            await asyncio.sleep(0.005)
        else:
            pytest.fail(f"still there: {self.router._service.running or tasks() - self.before}")
        assert self.metric("live_streams") == 0


@contextlib.asynccontextmanager
async def listening(tmp_path: Path, node: FakePrefill, **changes: Any) -> AsyncIterator[Setup]:  # noqa: ANN401
    path = f"unix:{tmp_path}/router"
    pools = {"prefill": [node.address], "decode": [DECODE]}
    config = settings(listen=path, pools=pools, drain_timeout=0.1, **changes)
    async with running(config) as router, grpc.aio.insecure_channel(path) as channel:
        await channel.channel_ready()
        yield Setup(router, node, channel)


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    async with FakePrefill() as node, listening(tmp_path, node) as setup:
        yield setup


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], caplog.text


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("sent", ["headers", "half the body"])
async def test_before_the_request_is_whole(setup: Setup, modes: Modes, sent: str) -> None:
    _, stream = setup.envoy(modes)
    await stream.send(request_headers(modes=modes))
    if sent == "half the body" and modes.request != Mode.BUFFERED:
        await stream.send(body_message("request", b'{"model'))
    await asyncio.sleep(0.02)
    stream.cancel()
    await setup.quiet()
    assert setup.outcomes() == {"cancelled": 1}
    assert (len(setup.store), setup.node.seen) == (0, [])


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("attached", [False, True], ids=["cold", "with a handle"])
async def test_while_p_computes(setup: Setup, modes: Modes, *, attached: bool) -> None:
    if attached:
        envoy, _ = setup.envoy(modes)
        await envoy.play(TURN, END)
        assert setup.store.handles == 1
        await setup.quiet()
        setup.node.arrived.clear()
    setup.node.handler = hangs
    envoy, stream = setup.envoy(modes)
    task = asyncio.create_task(envoy.request(NEXT))
    await setup.node.arrived.wait()
    begun = time.monotonic()
    stream.cancel()
    await asyncio.wait_for(setup.node.left.wait(), 1)
    assert time.monotonic() - begun < 0.2
    await asyncio.wait([task])
    assert task.cancelled()
    await setup.quiet()
    assert (carried_handle(setup.node.seen[-1].body) is not None) == attached
    assert setup.outcomes()["cancelled"] == 1
    assert setup.store.handles == 0  # what was sent is spent
    assert setup.metric("prefill_retries_total") == 0
    assert setup.metric("prefill_blocks_stranded_total") == 0


@pytest.mark.parametrize("modes", MODES, ids=str)
async def test_between_the_answer_of_p_and_the_request_to_d(setup: Setup, modes: Modes) -> None:
    """P keeps its blocks until its lease ends; all that can be done is to count it (field report 70)."""
    envoy, stream = setup.envoy(modes)
    await envoy.request(TURN)
    stream.cancel()
    await setup.quiet()
    assert setup.metric("prefill_blocks_stranded_total") == 1
    assert len(setup.store) == 0
    assert setup.outcomes() == {"first_turn": 1}


async def test_no_blocks_are_stranded_where_d_does_the_turn_alone(tmp_path: Path) -> None:
    gone = FakePrefill(address="127.0.0.1:1")
    async with listening(tmp_path, gone) as setup:
        envoy, stream = setup.envoy(Modes())
        await envoy.request(TURN)
        stream.cancel()
        await setup.quiet()
        assert setup.metric("prefill_fallbacks_total") == 1
        assert setup.metric("prefill_blocks_stranded_total") == 0


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize(("events", "handles"), [(0, 0), (2, 0), (4, 1), (5, 1)])
async def test_in_mid_response(setup: Setup, modes: Modes, events: int, handles: int) -> None:
    """Once the terminal event has passed, the turn is whole, and D keeps the blocks for the next one."""
    envoy, stream = setup.envoy(modes)
    await envoy.request(TURN)
    await stream.send(headers_message("response", SSE, node=DECODE))
    await stream.receive()
    for event in EVENTS[:events]:
        await stream.send(body_message("response", event))
        await stream.receive()
    stream.cancel()
    await setup.quiet()
    assert setup.store.handles == handles
    assert setup.metric("turns_incomplete_total") == 1 - handles
    assert setup.outcomes() == {"first_turn": 1}


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
@pytest.mark.parametrize("end", ["cancel", "half close"])
async def test_the_way_envoy_ends_a_good_turn_is_no_error(setup: Setup, modes: Modes, end: str) -> None:
    """It resets the stream, also after the last answer (envoy#22727)."""
    envoy, stream = setup.envoy(modes)
    await envoy.request(TURN)
    await envoy.respond(END)
    if end == "cancel":
        stream.cancel()
    else:
        await envoy.finish()
    await setup.quiet()
    assert setup.store.handles == 1
    assert setup.metric("turns_incomplete_total") == 0
    assert setup.outcomes() == {"first_turn": 1}


async def test_all_at_once(setup: Setup) -> None:
    """Many clients, each leaving at another moment."""
    setup.node.handler = hangs
    streams = []
    for i in range(60):
        stream = GrpcStream(setup.channel)
        streams.append(stream)
        await stream.send(request_headers())
        if i % 3:
            await stream.send(body_message("request", TURN.pieces[0], end=True))
        if i % 3 == 1:
            stream.cancel()
    await setup.node.arrived.wait()
    for stream in streams:
        stream.cancel()
    await setup.quiet()
    assert setup.outcomes().get("first_turn", 0) == 0
    assert len(setup.store) == 0
