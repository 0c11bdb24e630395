"""Two routers behind one Envoy: a conversation at both of them, and one of them killed."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from faults import verdict
from faults.counters import samples
from faults.deployment import deployed
from faults.events import EVENTS
from faults.load import Load
from faults.processes import Process, router
from faults.run import Run, Times
from kvreturn.config import Settings
from kvreturn.envoy import names
from kvreturn.server.app import running
from support.envoy import unused_address
from support.gateway import CHAT, FAST, PORTABLE, Front, configuration, envoy_before
from support.harness import outcomes
from support.nodes import FakePrefill, Seen, carried_handle, chat, decode_events, handle, streams
from support.redis import needs_redis, server

FIRST, SECOND = chat("Hi", stream=True), chat("Hi", "Good morning", "And?", stream=True)
EVENTS_OF_D = decode_events(params=handle())
SSE = b"".join(decode_events())


@needs_redis
async def test_of_200_concurrent_turns_of_one_conversation_one_gets_the_handle(tmp_path: Path) -> None:
    all_there, come = asyncio.Event(), 0

    async def holds(seen: Seen) -> web.StreamResponse:
        """Answers of the 200 come after all of their legs."""
        nonlocal come
        come += b"And?" in seen.body
        if come == 200:
            all_there.set()
        if b"And?" in seen.body:
            await all_there.wait()
        return await streams(*EVENTS_OF_D)(seen)

    async with contextlib.AsyncExitStack() as stack:
        redis = stack.enter_context(server(tmp_path))
        p, d = [await stack.enter_async_context(node) for node in (FakePrefill(), FakePrefill(holds))]
        listens = [unused_address(), unused_address()]
        # So many connections at once, in one process with all their clients and nodes, take more than the default.
        shared = {"store": {"url": redis.url, "deadline": 30.0, "connect_timeout": 30.0}, "secret": "s3cret"}
        plain = configuration("kvreturn", [p.address], [d.address], **shared)
        plain["envoy"]["routers"] = listens
        each = [Settings.model_validate({**plain, "listen": listen}) for listen in listens]
        worlds = [(await stack.enter_async_context(running(one))).world for one in each]
        front = await stack.enter_async_context(envoy_before(each[0]))
        await both_healthy(front)
        assert (await front.post(CHAT, FIRST)).body == SSE
        all_at_once = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=all_at_once) as client:

            async def turn() -> tuple[int, bytes]:
                async with client.post(front.url + "/chat/completions", data=SECOND) as answer:
                    if answer.status != 200:  # this one does not come
                        all_there.set()
                    return answer.status, await answer.read()

            assert set(await asyncio.gather(*(turn() for _ in range(200)))) == {(200, SSE)}
        assert sum(carried_handle(seen.body) is not None for seen in p.seen) == 1
        assert len(p.seen) == 201
        async with asyncio.timeout(5):
            while sum((told := [Counter(outcomes(w.metrics)) for w in worlds])[0].values()) + told[1].total() < 201:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert told[0] + told[1] == {"first_turn": 1, "hit": 1, "already_taken": 199}
        assert all(one["already_taken"] > 50 for one in told)  # both took part
        assert not front.tap.leaks(p.address, d.address)


async def both_healthy(front: Front) -> None:
    """Wait until Envoy sends streams to both routers."""
    url = f"http://{front.settings.envoy.admin}/clusters"
    async with asyncio.timeout(10):
        while True:
            async with front.client.get(url) as response:
                lines = (await response.text()).splitlines()
            if sum(line.startswith(f"{names.ROUTER_CLUSTER}::") and line.endswith("::healthy") for line in lines) == 2:
                return
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def two_processes(
    folder: Path, d: FakePrefill, p: FakePrefill, shipped: str = FAST
) -> AsyncIterator[tuple[Front, list[tuple[Process, str]]]]:
    """Envoy before two routers that can be killed."""
    plain = configuration(shipped, [p.address], [d.address], secret="s3cret")
    plain["envoy"]["routers"] = [unused_address(), unused_address()]
    each = [{**plain, "listen": listen, "admin": unused_address()} for listen in plain["envoy"]["routers"]]
    processes = [router(number, own, folder, lambda *_: None) for number, own in enumerate(each)]
    try:
        await asyncio.gather(*[process.start() for process in processes])
        async with envoy_before(Settings.model_validate(each[0])) as front:
            await both_healthy(front)
            yield front, [(process, own["admin"]) for process, own in zip(processes, each, strict=True)]
            assert not front.tap.leaks(p.address, d.address)
    finally:
        await asyncio.gather(*[process.stop() for process in processes])


@pytest.mark.parametrize("shipped", [FAST, PORTABLE])
async def test_a_router_that_is_killed_takes_its_own_streams_with_it_and_no_new_turn(
    shipped: str, tmp_path: Path
) -> None:
    """In the fast lane not even those, once they have begun."""
    go_on = asyncio.Event()

    async def waits(seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(seen.request)
        await response.write(EVENTS_OF_D[0])
        if b"held" in seen.body:
            await go_on.wait()
        with contextlib.suppress(ConnectionError):  # that of a stream which was cut
            await response.write(b"".join(EVENTS_OF_D[1:]))
            await response.write_eof()
        return response

    async with FakePrefill() as p, FakePrefill(waits) as d, two_processes(tmp_path, d, p, shipped) as (front, routers):
        (victim, admin), _ = routers
        held = [asyncio.create_task(whole(front, chat(f"held {n}", stream=True))) for n in range(12)]
        async with asyncio.timeout(10):
            while len(d.seen) < 12:  # noqa: ASYNC110 - all are under way
                await asyncio.sleep(0.01)
        theirs = int((await samples(front.client, admin))["kvreturn_live_streams"])
        assert 0 < theirs < 12
        await asyncio.sleep(0.1)  # the last of them may not have passed their headers
        await victim.kill()
        after = [await front.post(CHAT, chat(f"new {n}", stream=True)) for n in range(10)]
        assert [(answer.status, answer.body) for answer in after] == [(200, SSE)] * 10
        go_on.set()
        cut = 0 if shipped == FAST else theirs
        assert Counter(await asyncio.gather(*held)) == +Counter({True: 12 - cut, False: cut})
        assert len(p.seen) == 22  # no turn was begun with twice


async def test_a_router_that_is_killed_while_it_is_idle_costs_nothing(tmp_path: Path) -> None:
    """Nothing has told Envoy when the next turns come: they go to the other router when this one refuses."""
    async with FakePrefill() as p, FakePrefill(streams(*EVENTS_OF_D)) as d, two_processes(tmp_path, d, p) as there:
        front, ((victim, _), _) = there
        for n in range(4):  # both connections are there
            assert (await front.post(CHAT, chat(f"before {n}", stream=True))).body == SSE
        await victim.kill()
        after = [await front.post(CHAT, chat(f"after {n}", stream=True)) for n in range(10)]
        assert [(answer.status, answer.body) for answer in after] == [(200, SSE)] * 10
        assert len(p.seen) == 14


async def whole(front: Front, body: bytes) -> bool:
    """Whether the answer to a request comes whole; cut, it ends as no answer can."""
    try:
        return (await front.post(CHAT, body)).body == SSE
    except aiohttp.ClientPayloadError:
        return False


@pytest.mark.slow
@needs_redis
async def test_conversations_go_on_through_a_short_chaos() -> None:
    """What `make chaos` does, short: fewer conversations, and two of the events."""
    names_of = ("router killed", "decode node killed")
    async with deployed(lambda *_: None, deadline=1.0) as deployment:
        load = Load(deployment, conversations=6, think=1.0, tokens=10)
        run = Run(deployment, load, Times(warm_up=1.5, look=2.5, settle=10.0), lambda *_: None)
        await run.play({name: EVENTS[name] for name in names_of})
    assert verdict.broken(run.phases, run.acts) == []
    assert len(run.acts) == 2
    assert sum(len(phase.sent) for phase in run.phases) > 25
