"""What sessions cost, in memory and in Redis: bytes, latency of put and take, and what it takes when their TTL ends.

usage: python bench/store.py [--sessions 20000] [--tokens 2000] [--json FILE]

Starts a redis-server of its own on loopback. A million sessions take some minutes and 9 GB.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from kvreturn.core.ports import Record, SessionStore
from kvreturn.store.client import connect
from kvreturn.store.codec import Codec
from kvreturn.store.memory import MemoryStore
from kvreturn.store.redis import RedisStore
from kvreturn.store.url import parse_store_url

_TTL = 3600.0
_SAMPLE = 5000  # calls whose latency is measured, on the full store
_CANDIDATES = 40  # keys of a look-up: a conversation of 20 items
_AT_ONCE = 16
Figures = dict[str, float]


def handle(tokens: int, *, block_size: int = 16, generated: int = 300) -> bytes:
    """A D's handle for so many tokens: runs of block ids, digests, generated ids."""
    count = -(-tokens // block_size)
    blocks: list[int] = []
    while len(blocks) < count:
        start = random.randrange(60_000)  # noqa: S311 - a load, no secret
        blocks += range(start, start + random.randrange(1, 60))  # noqa: S311 - as above
    proof = {
        "v": 1,
        "block_size": block_size,
        "scope": base64.b64encode(os.urandom(8)).decode(),
        "digests": base64.b64encode(os.urandom(8 * count)).decode(),
        "generated": [random.randrange(150_000) for _ in range(generated)],  # noqa: S311 - as above
        "ttl": 480.0,
    }
    params = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [blocks[:count]],
        "remote_engine_id": os.urandom(16).hex(),
        "remote_request_id": f"chatcmpl-{os.urandom(16).hex()}",
        "remote_host": "10.1.0.1",
        "remote_port": 5601,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "kvreturn": proof,
    }
    return json.dumps(params, separators=(",", ":")).encode()


def keys_of(session: int) -> list[bytes]:
    """A session's two keys."""
    return [kind + session.to_bytes(16, "big") for kind in (b"t", b"p")]


def candidates(session: int) -> list[bytes]:
    """What the next turn looks up: a few keys that are not there come before the one that is."""
    others = [os.urandom(17) for _ in range(_CANDIDATES - 2)]
    return [*others[:4], *keys_of(session), *others[4:]]


async def timed(call: Awaitable[Any]) -> float:
    """Seconds that a call takes."""
    begun = time.perf_counter()
    await call
    return time.perf_counter() - begun


def spread(name: str, seconds: Sequence[float]) -> Figures:
    """Median and 99th percentile, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {f"{name}_p50_ms": cuts[49] * 1e3, f"{name}_p99_ms": cuts[98] * 1e3}


async def latencies(store: SessionStore, sessions: int, record: Record) -> Figures:
    """Put and take, one after the other, on a store that is full."""
    chosen = random.sample(range(sessions), min(_SAMPLE, sessions // 2))
    takes = [await timed(store.take(candidates(i))) for i in chosen]
    puts = [await timed(store.put(keys_of(i), record)) for i in chosen]
    misses = [await timed(store.take(candidates(sessions + 1))) for _ in chosen]
    return spread("put", puts) | spread("take", takes) | spread("miss", misses)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def in_memory(sessions: int, raw: bytes) -> Figures:
    """Measure `MemoryStore`."""
    now = 1000.0
    store = MemoryStore(max_entries=2 * sessions, max_bytes=1 << 40, clock=lambda: now)
    before, begun = resident(), time.perf_counter()
    for i in range(sessions):
        await store.put(keys_of(i), Record(_TTL, bytes(bytearray(raw)), None, "10.1.0.1:8000", "10.0.0.1:8000"))
    loaded = time.perf_counter() - begun
    figures = {"puts_per_s": sessions / loaded, "bytes_per_session": (resident() - before) / sessions}
    figures |= await latencies(store, sessions, Record(_TTL, raw))
    now += 2 * _TTL
    longest, begun = 0.0, time.perf_counter()
    while len(store):
        longest = max(longest, await timed(store.take(candidates(0))))
    return figures | {"sweep_s": time.perf_counter() - begun, "sweep_longest_call_ms": longest * 1e3}


@contextlib.asynccontextmanager
async def own_server() -> AsyncIterator[tuple[RedisStore, Redis]]:
    """A store in a server that lives as long as the context, and a client for questions about it."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise SystemExit("there is no redis-server here: apt-get install redis-server")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        url = parse_store_url(f"redis://127.0.0.1:{port}")
        store = RedisStore(connect(url, pool_size=_AT_ONCE, connect_timeout=5.0), Codec(b"a key"))
        try:
            async with contextlib.aclosing(store), Redis(port=port) as client:
                for _ in range(100):
                    with contextlib.suppress(Exception):
                        await store.ping()
                        break
                    await asyncio.sleep(0.05)
                yield store, client
        finally:
            process.kill()
            await process.wait()


class _Bulk:
    """A client for the store that sends many puts at once, to fill a server in minutes."""

    def __init__(self, client: Redis) -> None:
        self._pipe: Any = client.pipeline(transaction=False)
        self.register_script = client.register_script

    def pipeline(self, *, transaction: bool) -> "_Bulk":
        assert not transaction
        return self

    def __getattr__(self, command: str) -> Any:  # noqa: ANN401 - the pipeline's
        return getattr(self._pipe, command)

    async def execute(self) -> list[bool]:
        if len(self._pipe) > 2000:  # noqa: PLR2004 - commands
            await self.flush()
        return [True]  # for all that the store can tell

    async def flush(self) -> None:
        await self._pipe.execute()


_EXPIRE = """
local page = redis.call('SCAN', ARGV[1], 'COUNT', 10000)
for _, key in ipairs(page[2]) do redis.call('PEXPIREAT', key, ARGV[2]) end
return page[1]
"""


async def cpu(client: Redis) -> float:
    """Seconds of CPU time that the server has used."""
    info = await client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def in_redis(sessions: int, raw: bytes) -> Figures:
    """Measure `RedisStore`."""
    record = Record(_TTL, raw, None, "10.1.0.1:8000", "10.0.0.1:8000")
    async with own_server() as (store, client):
        before = (await client.info("memory"))["used_memory"]
        bulk: Any = _Bulk(client)
        filling = RedisStore(bulk, Codec(b"a key"))
        for i in range(sessions):
            await filling.put(keys_of(i), record)
        await bulk.flush()
        figures = {"bytes_per_session": ((await client.info("memory"))["used_memory"] - before) / sessions}
        figures |= await latencies(store, sessions, record)
        begun, left = time.perf_counter(), iter(range(sessions, sessions + _SAMPLE))

        async def some() -> None:
            for i in left:
                await store.put(keys_of(i), record)

        await asyncio.gather(*(some() for _ in range(_AT_ONCE)))
        figures["puts_per_s"] = _SAMPLE / (time.perf_counter() - begun)
        # All at once, which is worse than any day: records and traces of all sessions end in the same second.
        end, cursor = int(time.time() * 1000) + 1000 + sessions // 100, b"0"
        while (cursor := await client.eval(_EXPIRE, 0, cursor, end)) != b"0":
            pass
        await asyncio.sleep(max(end / 1000 - time.time(), 0))
        spent, begun, calls = await cpu(client), time.perf_counter(), []
        while await client.dbsize():
            calls.append(await timed(store.take(candidates(sessions + 1))))
        figures |= {"sweep_s": time.perf_counter() - begun, "sweep_server_cpu_s": await cpu(client) - spent}
        return figures | {"sweep_longest_call_ms": max(calls, default=0.0) * 1e3}


def show(results: dict[str, Figures]) -> None:
    """Print a table, one column for each store."""
    names = list(dict.fromkeys(name for figures in results.values() for name in figures))
    print(f"{'':24}" + "".join(f"{store:>14}" for store in results))
    for name in names:
        cells = [f"{figures[name]:14,.3f}" if name in figures else f"{'-':>14}" for figures in results.values()]
        print(f"{name:24}" + "".join(cells))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What sessions cost, in memory and in Redis.")
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens that D holds of each")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    raw = handle(arguments.tokens)
    print(f"{arguments.sessions:,} sessions with handles of {len(raw):,} bytes ({arguments.tokens:,} tokens)")
    results = {
        "memory": asyncio.run(in_memory(arguments.sessions, raw)),
        "redis": asyncio.run(in_redis(arguments.sessions, raw)),
    }
    show(results)
    if arguments.json:
        told = {"sessions": arguments.sessions, "tokens": arguments.tokens, "handle_bytes": len(raw), **results}
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
