"""What concerns all of a Redis store: every handle in it, and every router that uses it."""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from redis.asyncio import RedisCluster

from kvreturn._proto.kvreturn.store.v1 import record_pb2 as pb
from kvreturn.core.ports import PRESENCE, Held, Holding, Taken
from kvreturn.store.client import Client
from kvreturn.store.codec import Codec
from kvreturn.store.errors import StoreError
from kvreturn.store.redis_errors import named

_ROUTERS = b"kvr1n"
_PART = 64  # records that are looked at in one round trip
_STEPS = 8  # parts of the server's keys that `look` goes through
# One script, since of two routers that leave at the same time just one may find nobody else.
_LEAVE = """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[2])
return redis.call('ZCARD', KEYS[1])
"""


class Whole:
    """The store as a whole.

    Args:
        client: see `connect`.
        codec: opens records.
        prefix: of the names of records.
        clock: seconds since 1970.
    """

    def __init__(self, client: Client, codec: Codec, prefix: bytes, clock: Callable[[], float]) -> None:
        self._client: Any = client  # typed as if its pipelines executed their commands
        self._codec = codec
        self._prefix = prefix
        self._clock = clock
        self._me = os.urandom(16)

    async def take_all(self) -> AsyncIterator[Sequence[Taken]]:
        """Take all handles that are there from the beginning to the end of it. Notes stay.

        Raises:
            StoreError: the store failed on the way.
        """
        part: list[bytes] = []
        with named():
            async for name in self._client.scan_iter(self._prefix + b"*", count=_PART):
                part.append(name)
                if len(part) == _PART:
                    taken, part = await self._take(part), []
                    if taken:
                        yield taken
            taken = await self._take(part) if part else []
            if taken:
                yield taken

    async def _take(self, names: Sequence[bytes]) -> Sequence[Taken]:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.getrange(name, 0, 0)
        handles = [name for name, kind in zip(names, await pipe.execute(), strict=True) if kind == b"h"]
        pipe = self._client.pipeline(transaction=False)
        for name in handles:
            pipe.getdel(name)
        values = await pipe.execute() if handles else []
        return [t for t in (self._open(n, v) for n, v in zip(handles, values, strict=True) if v) if t]

    def _open(self, name: bytes, value: bytes) -> Taken | None:
        try:
            entry = self._codec.open(name + value[:1], None, value[1:])
        except StoreError:
            return None  # another secret's or version's: its blocks wait for their TTL
        ident = name.removeprefix(self._prefix)
        ticket = pb.Ticket(id=ident, keys=entry.keys, conversation=entry.conversation).SerializeToString()
        return Taken(entry.record, None, max(self._clock() - entry.put_at / 1e6, 0.0), ticket)

    async def present(self) -> None:
        """See `SessionStore.present`.

        Raises:
            StoreError: it could not be told.
        """
        with named():
            await self._client.zadd(_ROUTERS, {self._me: self._clock() + PRESENCE})

    async def leave(self) -> bool:
        """See `SessionStore.leave`.

        Raises:
            StoreError: nothing is known.
        """
        with named():
            return not await self._client.eval(_LEAVE, 1, _ROUTERS, self._me, self._clock())

    async def look(self, most: int) -> Holding:
        """See `SessionStore.look`. Records are not opened: names, sizes and times are all that is cheap.

        Raises:
            StoreError: nothing is known.
        """
        with named():
            size = await self._size()
            names = await self._names(most) if most else []
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.pttl(name)
                pipe.strlen(name)
                pipe.getrange(name, 0, 0)
            told = await pipe.execute() if names else []
        some = [
            Held(name.removeprefix(self._prefix).hex()[-16:], None, ttl / 1000, size, kind == b"h")
            for name, ttl, size, kind in zip(names, told[::3], told[1::3], told[2::3], strict=True)
            if ttl >= 0  # it has gone meanwhile
        ]
        return Holding("redis", size, None, some)

    async def _size(self) -> int:
        """How many keys there are; redis-py asks one node of a cluster only, unless told."""
        if not isinstance(self._client, RedisCluster):
            return int(await self._client.dbsize())
        return sum([int(await self._client.dbsize(target_nodes=[node])) for node in self._client.get_primaries()])

    async def _names(self, most: int) -> list[bytes]:
        """Names of some records; in a cluster, of its first node's."""
        cursor, names = 0, []
        node = {"target_nodes": self._client.get_primaries()[0]} if isinstance(self._client, RedisCluster) else {}
        for _ in range(_STEPS):
            cursor, found = await self._client.scan(cursor, match=self._prefix + b"*", count=2 * _PART, **node)
            if node:
                (cursor,) = cursor.values()
            names += found
            if not cursor or len(names) >= most:
                break
        return names[:most]
