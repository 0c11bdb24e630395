"""Section E of the field reports: the session store. Reports 104, 106, 107, 109 and 111 have their tests beside others
of their kind (tests/unit/store, tests/integration/test_redis_faults.py).
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvreturn.core.ports import Record, SessionStore
from kvreturn.store.memory import MemoryStore
from support.redis import needs_redis, redis_store, server

KEYS = [b"a" * 17, b"b" * 17]


@contextlib.asynccontextmanager
async def stores(kind: str, folder: Path) -> AsyncIterator[list[SessionStore]]:
    """A store as routers see it: its own memory for one, a server for two."""
    if kind == "memory":
        yield [MemoryStore(max_entries=10, max_bytes=1 << 20, clock=time.monotonic)]
        return
    with server(folder) as redis:
        both = [redis_store(redis.url), redis_store(redis.url)]
        yield list(both)
        for one in both:
            await one.aclose()


@pytest.mark.parametrize("kind", ["memory", pytest.param("redis", marks=needs_redis)])
async def test_fr105_of_fifty_readers_one_gets_the_handle(kind: str, tmp_path: Path) -> None:
    async with stores(kind, tmp_path) as routers:
        await routers[0].put(KEYS, Record(450.0, b"the handle"))
        taken = await asyncio.gather(*(routers[i % len(routers)].take(KEYS[i % 2 :]) for i in range(50)))
        assert [t.record.handle for t in taken if t.record] == [b"the handle"]


@needs_redis
async def test_fr108_no_transaction_is_left_open_by_a_turn_that_is_cancelled(tmp_path: Path) -> None:
    """Nothing that a turn does is a transaction or a watch, so there is nothing to reset; connections come back."""
    with server(tmp_path) as redis:
        store = redis_store(redis.url, pool_size=8)

        async def turn(number: int) -> None:
            key = b"%017d" % number
            ticket = await store.put([key], Record(450.0, b"x"))
            await store.replace(ticket, Record(450.0, b"y"))
            assert (await store.take([key])).record == Record(450.0, b"y")

        slots = asyncio.Semaphore(8)

        async def within(number: int) -> None:
            async with slots:
                await turn(number)

        tasks = [asyncio.create_task(within(n)) for n in range(200)]
        for task in random.Random(1).sample(tasks, 100):
            await asyncio.sleep(0.0005)
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in done} <= {type(None), asyncio.CancelledError}
        await asyncio.gather(*(within(n) for n in range(1000, 1016)))  # all slots of the pool are there
        commands = redis.ask("INFO", "commandstats")
        assert b"cmdstat_set:" in commands
        assert not [word for word in (b"_multi", b"_exec", b"_watch", b"_discard") if word in commands]
        await store.aclose()
