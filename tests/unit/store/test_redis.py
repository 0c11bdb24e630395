"""What only the Redis store does; what all stores do is in test_contract.py."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Record, Taken
from kvreturn.store.errors import StoreError
from kvreturn.store.redis import RedisStore
from support.harness import Clock
from support.redis import Server, needs_redis, redis_store
from support.stores import A, B, C, handle, marker
from support.tap import Tap

pytestmark = needs_redis
Make = Callable[..., RedisStore]


@pytest.fixture
async def make(redis_server: Server) -> AsyncIterator[Make]:
    """Makes stores on one empty server."""
    redis_server.ask("FLUSHALL")
    async with contextlib.AsyncExitStack() as stack:

        def one(url: str = redis_server.url, **more: Any) -> RedisStore:  # noqa: ANN401 - its options
            store = redis_store(url, **more)
            stack.push_async_callback(store.aclose)
            return store

        yield one


async def keys(store: RedisStore) -> dict[bytes, Any]:
    """All that stands on the server."""
    client: Any = store._client
    kinds = {key: await client.type(key) for key in await client.keys("*")}
    return {k: await (client.zrange(k, 0, -1) if t == b"zset" else client.get(k)) for k, t in kinds.items()}


async def test_of_200_takes_by_two_routers_one_gets_the_handle(make: Make) -> None:
    routers = [make(pool_size=100), make(pool_size=100)]
    await routers[0].put([A, B], handle())
    taken = await asyncio.gather(*(routers[i % 2].take([C, A, B] if i % 3 else [B]) for i in range(200)))
    assert [t.record for t in taken if t.record] == [handle()]
    assert sum(t.reason is Outcome.ALREADY_TAKEN for t in taken) == 199


async def test_look_up_and_take_are_one_round_trip(make: Make, redis_server: Server) -> None:
    tap = Tap()
    async with tap.before(f"127.0.0.1:{redis_server.port}"):
        store = make(f"redis://{tap.address}")
        await store.put([A], handle())
        await store.take([B])  # the server learns the script
        (pieces,) = tap.sent
        before = len(pieces)
        assert (await store.take([*(b"%017d" % i for i in range(100)), A])).record == handle()
        assert len(pieces) == before + 1


async def test_a_put_is_one_round_trip(make: Make, redis_server: Server) -> None:
    tap = Tap()
    async with tap.before(f"127.0.0.1:{redis_server.port}"):
        store = make(f"redis://{tap.address}")
        await store.ping()
        (pieces,) = tap.sent
        before = len(pieces)
        await store.put([A, B], handle("x" * 1000))
        assert len(pieces) == before + 1


async def test_everything_goes_by_itself(make: Make) -> None:
    store = make()
    await store.put([A, B], handle(ttl=100.0))
    await store.put([C], marker(ttl=10.0))
    client: Any = store._client
    left = sorted([round(await client.pttl(key) / 1000) for key in await client.keys("*")])
    # The marker and its trace: 10 + 60 s. The handle: 100 s. Its two traces: 200 s.
    assert left == [70, 70, 100, 200, 200]


async def test_a_late_put_does_not_stand_before_a_newer_one(make: Make) -> None:
    clocks = Clock(time.time()), Clock(time.time() + 2)
    slow, quick = make(clock=clocks[0]), make(clock=clocks[1])
    await quick.put([A], handle("newer"))
    await slow.put([A], handle("older"))
    assert (await quick.take([A])).record == handle("newer")
    assert (await quick.take([A])).record == handle("older")


async def test_a_late_put_lives_no_longer_for_that(make: Make) -> None:
    """A server that stood still executes what waits in its sockets when it goes on."""
    late, now = make(clock=Clock(time.time() - 500)), make()
    await late.put([A], handle(ttl=450.0))
    assert await now.take([A]) == Taken(None, Outcome.EXPIRED)


async def test_nothing_is_used_after_its_ttl_whatever_the_servers_clock_says(make: Make) -> None:
    await make(clock=Clock(time.time())).put([A], handle(ttl=60.0))
    assert await make(clock=Clock(time.time() + 61)).take([A]) == Taken(None, Outcome.EXPIRED)


async def test_a_reader_of_redis_sees_digests_and_noise(make: Make) -> None:
    store = make()
    record = Record(450.0, b'{"remote_host":"10.0.0.2"}', None, "10.0.0.2:8200", "10.0.0.1:8100")
    turns = [[b"t%016d" % i, b"p%016d" % i] for i in range(2)]
    for turn in turns:
        await store.put(turn, record)
    there = await keys(store)
    indexes = {k: v for k, v in there.items() if k.startswith(b"kvr1:")}
    records = {k: v for k, v in there.items() if k.startswith(b"kvr1r:")}
    assert sorted(indexes) == sorted(b"kvr1:" + key for turn in turns for key in turn)
    assert len(records) == 2
    assert len(there) == 6
    text = b"".join([*itertools.chain.from_iterable(indexes.values()), *records.values()])
    assert b"10.0.0" not in text
    assert not any(key in text for turn in turns for key in turn)
    ids = [{pointer[:16] for key in turn for pointer in indexes[b"kvr1:" + key]} for turn in turns]
    assert [len(i) for i in ids] == [1, 1]  # a turn's two keys lead to one record
    assert not ids[0] & ids[1]  # and nothing leads from one turn to another


async def broken(store: RedisStore, change: Callable[[Any], Any]) -> str:
    """The kind of error after something else changed what stands there."""
    await store.put([A, B], handle())
    await change(store._client)
    with pytest.raises(StoreError) as info:
        await store.take([A, B])
    assert not info.value.down
    return info.value.kind


async def overwrite(client: Any) -> None:  # noqa: ANN401 - redis-py's types do not tell a coroutine
    (record,) = await client.keys("kvr1r:*")
    await client.set(record, b"rubbish", keepttl=True)


RUBBISH: list[tuple[str, Callable[[Any], Any]]] = [
    ("unreadable", overwrite),
    ("refused", lambda c: c.set(b"kvr1:" + A, "text")),
]


@pytest.mark.parametrize(("kind", "change"), RUBBISH, ids=["a record", "a key of another type"])
async def test_rubbish_is_an_error_of_its_own_kind(make: Make, kind: str, change: Callable[[Any], Any]) -> None:
    assert await broken(make(), change) == kind


async def test_a_pointer_of_another_form_is_unreadable(make: Make) -> None:
    store = make()
    client: Any = store._client
    await client.zadd(b"kvr1:" + A, {b"short": 1})
    with pytest.raises(StoreError, match="unreadable"):
        await store.take([A])


async def test_a_pointer_that_was_moved_leads_to_nothing(make: Make) -> None:
    """field report 104: whose record it is, is verified after the read."""
    store = make()
    await store.put([A], handle("of A"))
    client: Any = store._client
    await client.copy(b"kvr1:" + A, b"kvr1:" + C)
    with pytest.raises(StoreError, match="unreadable"):
        await store.take([C])


async def test_records_of_another_key_are_named(make: Make) -> None:
    await make(key=b"one").put([A], handle())
    with pytest.raises(StoreError, match="wrong_key"):
        await make(key=b"another").take([A])


async def test_fr111_a_record_over_the_cap_is_not_stored(make: Make) -> None:
    store = make(max_record_bytes=1000)
    noise = random.Random(1).randbytes(1000)
    with pytest.raises(StoreError, match="oversize"):
        await store.put([A], Record(450.0, noise))
    assert await store.take([A]) == Taken()
    await store.put([A], Record(450.0, noise[:800]))
    assert (await store.take([A])).record == Record(450.0, noise[:800])


async def test_fr104_a_cancelled_call_leaves_no_reply_for_the_next_one(make: Make, redis_server: Server) -> None:
    direct = make()
    names = [b"%017d" % i for i in range(80)]  # asyncio servers have a backlog of 100
    tap = Tap(delay=0.2)
    async with tap.before(f"127.0.0.1:{redis_server.port}"):
        store = make(f"redis://{tap.address}", pool_size=80)
        await asyncio.gather(*(store.take([name]) for name in names))  # connections, and the script
        for name in names:
            await direct.put([name], handle(name.decode()))
        tasks = [asyncio.create_task(store.take([name])) for name in names]
        await asyncio.sleep(0.1)  # sent, and no answer is here yet
        for task in random.Random(1).sample(tasks, 40):
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        kept = [(name, one) for name, one in zip(names, done, strict=True) if isinstance(one, Taken)]
        assert len(kept) == 40
        assert all(one.record == handle(name.decode()) for name, one in kept)
        for name in names:
            await direct.put([name], handle(name.decode()))
        again = await asyncio.gather(*(store.take([name]) for name in names))
        assert [t.record for t in again] == [handle(name.decode()) for name in names]


async def test_a_restarted_server_is_found_again_and_learns_the_script_again(make: Make, redis_server: Server) -> None:
    store = make()
    await store.put([A], handle())
    assert (await store.take([A])).record == handle()
    redis_server.kill()
    await asyncio.sleep(0.01)  # so that the end of its connection is noticed
    redis_server.start()
    assert await store.take([A]) == Taken()
    await store.put([A], handle())
    assert (await store.take([A])).record == handle()


async def test_of_routers_that_leave_together_one_is_the_last(make: Make) -> None:
    routers = [make() for _ in range(4)]
    for router in routers:
        await router.present()
    assert sorted(await asyncio.gather(*(router.leave() for router in routers))) == [False, False, False, True]


async def test_a_router_that_was_killed_is_there_until_its_presence_ends(make: Make) -> None:
    clock = Clock(time.time())
    killed, leaving = make(clock=clock), make(clock=clock)
    await killed.present()
    await leaving.present()
    assert not await leaving.leave()
    clock.now += 14
    assert not await leaving.leave()
    clock.now += 2
    assert await leaving.leave()


async def test_what_another_secret_sealed_is_gone_but_does_not_stop_the_others_from_being_freed(make: Make) -> None:
    store = make()
    for other in (make(key=b"another"), store):
        await other.put([A], handle(), C)
    assert [t.record for part in [part async for part in store.take_all()] for t in part] == [handle()]
    for other in (make(key=b"another"), store):
        await other.put([A], handle(), C)
    assert [t.record for t in await store.end(C)] == [handle()]


async def test_a_pointer_that_somebody_moved_ends_nobody_elses_conversation(make: Make) -> None:
    """Who can write to Redis, but does not know the key."""
    store = make()
    await store.put([A], handle("of C"), C)
    client: Any = store._client  # typed as if keys were text
    await client.copy(b"kvr1c:" + C, b"kvr1c:" + B)
    assert await store.end(B) == []


async def test_what_a_turn_leaves_while_its_conversation_ends_is_found_when_that_is_ended_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = make(), make()
    await store.put([A], handle("first"), C)
    look = store._client.zrange

    async def and_meanwhile(*args: Any) -> Any:  # noqa: ANN401 - the client's own
        found = await look(*args)
        await other.put([B], handle("second"), C)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(store._client, "zrange", and_meanwhile)
        assert [t.record for t in await store.end(C)] == [handle("first")]
    assert [t.record for t in await store.end(C)] == [handle("second")]
    assert await store.end(C) == []
