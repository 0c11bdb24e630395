"""Stores to test, whose time is moved by hand."""

import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from kvreturn.store.memory import MemoryStore
from support.harness import Clock
from support.redis import Server, cluster, needs_redis, redis_store, server
from support.stores import Subject


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(
    params=["memory", pytest.param("redis", marks=needs_redis), pytest.param("redis cluster", marks=needs_redis)]
)
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "memory":
        clock = Clock()
        yield Subject(MemoryStore(max_entries=1000, max_bytes=1 << 20, clock=clock), clock)
        return
    clock = Clock(time.time())
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").url
    else:
        nodes = request.getfixturevalue("redis_cluster")
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{n.port}" for n in nodes)
    store = redis_store(url, clock=clock)
    async with contextlib.aclosing(store):
        await store._client.flushall()
        clock.now = time.time()  # the server's own goes on, from here
        yield Subject(store, clock, store._client)
