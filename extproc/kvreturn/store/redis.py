"""The session store of several routers: Redis 7.0 or newer, or Valkey; one server, sentinels or a cluster.

What stands where (`kvr1` is the version of this layout):

    kvr1:<session key>   sorted set of pointers to records, by the time at which their turns ended; the newest eight
    kvr1r:<random id>    one record, sealed (`codec`), for as long as it may be used
    kvr1c:<key>          sorted set of pointers to the records of a client's own conversation; the newest 64
    kvr1n                sorted set of the routers that run, by the time at which they would be gone (`redis_whole`)

A record is reached by several session keys, so its own key is the one truth: who deletes it has taken it, once,
whichever key led there; who replaces it finds it there or not. The pointers stay behind as the traces that tell why
there is nothing to take. Session keys are keyed digests, so a reader of Redis sees which keys belong to one turn, but
not which turns to one conversation, but for those of a client that names its sessions.

Times are the routers' own, in microseconds: a put that a stalled server executes late is as old as it is, and neither
stands before a newer one nor lives longer. Clocks, the server's too, must agree within a second or so (NTP).

No command is sent twice: a handle could be taken between its two puts, and a take whose answer is lost may have taken.
What is safe is done again by redis-py: a connection that the server has closed is replaced before anything is sent, a
script that the server did not know is sent in full.
"""

import itertools
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from redis.asyncio import RedisCluster

from kvreturn._proto.kvreturn.store.v1 import record_pb2 as pb
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Holding, Record, Taken
from kvreturn.store.client import Client, close
from kvreturn.store.codec import Codec, Entry
from kvreturn.store.errors import StoreError
from kvreturn.store.redis_errors import named
from kvreturn.store.redis_whole import Whole

_INDEX, _RECORD, _CONVERSATION = b"kvr1:", b"kvr1r:", b"kvr1c:"
_POINTER = struct.Struct(">16sQ")  # id, microseconds since 1970 at which its TTL ends
_HANDLE, _ONCE, _MARKER = b"h", b"o", b"m"  # all but markers go when they are taken
_PER_KEY, _PER_CONVERSATION = 8, 64  # as in the memory store
_TRACE = 60_000_000  # as in the memory store
_SKEW = 500_000  # a server's clock may be so much ahead; it drops what expires by its own
_NEAR, _FAR = 128, 1024  # keys of a look-up: a turn adds a few items, so that the first is nearly always enough
# In a cluster no more are looked at: redis-py takes 3 ms for a pipeline of 128, for which all streams wait.
_CLUSTER_KEYS = 2 * _NEAR

# Lua is needed here: which of many keys leads to a live record is known to the server only, and commands that take
# unconditionally, in one pipeline, would take several. So look-up and take are one round trip, and no pipeline of 128
# commands, which costs the router ten times the CPU time.
_TAKE = """
local dead = {}
for i, key in ipairs(KEYS) do
  for _, pointer in ipairs(redis.call('ZRANGE', key, 0, -1, 'REV')) do
    local name = ARGV[1] .. string.sub(pointer, 1, 16)
    local value = redis.call('GET', name)
    if value then
      if string.sub(value, 1, 1) ~= 'm' then redis.call('DEL', name) end
      return {i - 1, pointer, value}
    end
    if #dead == 0 then dead = {i - 1, pointer, false} end
  end
end
return dead
"""
# The end of that, for a cluster: it touches one key.
_TAKE_ONE = """
local value = redis.call('GET', KEYS[1])
if value and string.sub(value, 1, 1) ~= 'm' then redis.call('DEL', KEYS[1]) end
return value
"""


class _Pointer(NamedTuple):
    id: bytes
    expires: int


class _Found(NamedTuple):
    """The nearest live record, or the nearest pointer to one that is gone."""

    key: bytes
    pointer: _Pointer
    value: bytes | None


class RedisStore:
    """Implements `SessionStore`. Call it through `Guard`, which bounds calls in time and in number.

    Differs from the memory store where no more than one key can be touched at once: pushed out of one key, a record is
    still reached by its others; traces and handles are pushed out alike, by age; and a handle that was taken is told as
    `expired` once its TTL has passed. A server that evicts makes handles look taken: give it `noeviction`. A failover
    that loses the last writes may give a handle twice; a decode node lets nobody read twice. In a cluster, only the
    nearest 128 items of a conversation are looked at.

    Args:
        client: see `connect`.
        codec: seals records.
        max_record_bytes: larger values are not stored.
        clock: seconds since 1970.
    """

    def __init__(
        self, client: Client, codec: Codec, *, max_record_bytes: int = 1 << 20, clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._codec = codec
        self._max_record_bytes = max_record_bytes
        self._clock = clock
        self._last = 0
        self._clustered = isinstance(client, RedisCluster)
        self._whole = Whole(client, codec, _RECORD, clock)
        self._script = client.register_script(_TAKE_ONE if self._clustered else _TAKE)

    async def put(self, keys: Sequence[bytes], record: Record, conversation: bytes | None = None) -> bytes:
        """See `SessionStore.put`.

        Raises:
            StoreError: it is not stored, or not surely.
        """
        ticket = pb.Ticket(id=os.urandom(16), keys=keys, conversation=conversation)
        await self._write(ticket, record, again=False)
        return ticket.SerializeToString()

    async def replace(self, ticket: bytes, record: Record) -> bool:
        """See `SessionStore.replace`. The record's own key decides: who takes it meanwhile has it.

        Raises:
            StoreError: nothing is known.
        """
        return await self._write(pb.Ticket.FromString(ticket), record, again=True)

    async def end(self, conversation: bytes) -> Sequence[Taken]:
        """See `SessionStore.end`. Two round trips; each record is taken atomically.

        The pointers stay until their time is over, as those of turns do: one that was added meanwhile must not go.

        Raises:
            StoreError: nothing is known.
        """
        client: Any = self._client
        name = _CONVERSATION + conversation
        with named():
            pointers = [_unpack(p) for p in await client.zrange(name, 0, -1)]
            pipe = client.pipeline(transaction=False)
            for pointer in pointers:
                pipe.getdel(_RECORD + pointer.id)
            values = await pipe.execute()
        found = [_Found(conversation, p, v) for p, v in zip(pointers, values, strict=True)]
        taken = []
        for one in found:
            with suppress(StoreError):  # one that cannot be read does not keep the others from being freed
                taken += [self._taken(one, one.value)] if one.value is not None else []
        return [t for t in taken if t.record]

    def take_all(self) -> AsyncIterator[Sequence[Taken]]:
        """See `SessionStore.take_all`.

        Raises:
            StoreError: the store failed on the way.
        """
        return self._whole.take_all()

    async def present(self) -> None:
        """See `SessionStore.present`."""
        await self._whole.present()

    async def leave(self) -> bool:
        """See `SessionStore.leave`. Of routers that leave together, one is the last."""
        return await self._whole.leave()

    async def look(self, most: int) -> Holding:
        """See `SessionStore.look`."""
        return await self._whole.look(most)

    async def _write(self, ticket: pb.Ticket, record: Record, *, again: bool) -> bool:
        ttl = int(record.ttl * 1e6)
        self._last = now = max(int(self._clock() * 1e6), self._last + 1)
        expires, forget = now + ttl, now + ttl + max(ttl, _TRACE)
        conversation = ticket.conversation if ticket.HasField("conversation") else None
        kind = _MARKER if record.handle is None else _HANDLE if record.handle else _ONCE
        name = _RECORD + ticket.id
        value = kind + self._codec.seal(name + kind, Entry(tuple(ticket.keys), now, record, conversation))
        if len(value) > self._max_record_bytes:
            raise StoreError("oversize")
        pipe: Any = self._client.pipeline(transaction=False)  # typed as if its methods executed their commands
        # A marker stays as long as the traces: it tells its reason for that long.
        pipe.set(name, value, pxat=(forget if kind == _MARKER else expires) // 1000, xx=again)
        indexes = [(_INDEX + key, _PER_KEY) for key in ticket.keys]
        if conversation:
            indexes.append((_CONVERSATION + conversation, _PER_CONVERSATION))
        for index, most in indexes:
            if not again:
                pipe.zadd(index, {_POINTER.pack(ticket.id, expires): now})
                pipe.zremrangebyrank(index, 0, -most - 1)
                pipe.pexpireat(index, forget // 1000, nx=True)
            pipe.pexpireat(index, forget // 1000, gt=True)  # a short TTL does not cut a longer one's
        with named():
            return bool((await pipe.execute())[0])

    async def take(self, keys: Sequence[bytes]) -> Taken:
        """See `SessionStore.take`. If the answer is lost, so is the handle.

        Raises:
            StoreError: nothing is known, or what was there cannot be read.
        """
        dead: _Pointer | None = None
        with named():
            for part in _parts(keys[:_CLUSTER_KEYS] if self._clustered else keys):
                found = await (self._find_in_cluster(part) if self._clustered else self._find(part))
                if found and found.value is not None:
                    return self._taken(found, found.value)
                if found and dead is None:
                    dead = found.pointer
        if dead is None:
            return Taken()
        return Taken(None, Outcome.EXPIRED if self._clock() * 1e6 + _SKEW >= dead.expires else Outcome.ALREADY_TAKEN)

    async def ping(self) -> None:
        """See `SessionStore.ping`."""
        with named():
            if isinstance(self._client, RedisCluster):
                await self._client.aclose()  # learn anew who serves which slot
                await self._client.initialize()
                await self._client.ping(target_nodes=RedisCluster.PRIMARIES)
            else:
                # A primary that was demoted keeps its connections: look up the address anew.
                await self._client.connection_pool.disconnect(inuse_connections=False)
                await self._client.ping()

    async def aclose(self) -> None:
        """Close all connections."""
        await close(self._client)

    def _taken(self, found: _Found, value: bytes) -> Taken:
        ident = found.pointer.id
        entry = self._codec.open(_RECORD + ident + value[:1], found.key, value[1:])
        age = self._clock() - entry.put_at / 1e6
        if age >= entry.record.ttl:  # by our clock, whatever the server's says
            return Taken(None, entry.record.reason or Outcome.EXPIRED)
        ticket = pb.Ticket(id=ident, keys=entry.keys, conversation=entry.conversation).SerializeToString()
        return Taken(entry.record, None, max(age, 0.0), ticket)

    async def _find(self, keys: Sequence[bytes]) -> _Found | None:
        """Look up, and take, in one round trip."""
        reply = await self._script([_INDEX + key for key in keys], [_RECORD])
        return _Found(keys[reply[0]], _unpack(reply[1]), reply[2]) if reply else None

    async def _find_in_cluster(self, keys: Sequence[bytes]) -> _Found | None:
        """As `_find`, in three round trips: keys of several slots cannot be touched by one script."""
        client: Any = self._client
        pipe = client.pipeline()
        for key in keys:
            pipe.zrange(_INDEX + key, 0, -1, desc=True)
        lists = zip(keys, await pipe.execute(), strict=True)
        found: dict[bytes, tuple[bytes, _Pointer]] = {}
        for key, pointer in ((key, _unpack(p)) for key, pointers in lists for p in pointers):
            found.setdefault(pointer.id, (key, pointer))
        if not found:
            return None
        pipe = client.pipeline()
        for ident in found:
            pipe.exists(_RECORD + ident)
        for (key, pointer), there in zip(found.values(), await pipe.execute(), strict=True):
            value = await self._script([_RECORD + pointer.id]) if there else None
            if value is not None:  # else another one was faster
                return _Found(key, pointer, value)
        return _Found(*next(iter(found.values())), None)


def _parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    cuts = [0, *range(_NEAR, len(keys), _FAR), len(keys)]  # the first few alone
    return (keys[a:b] for a, b in itertools.pairwise(cuts) if a < b)


def _unpack(pointer: bytes) -> _Pointer:
    try:
        return _Pointer(*_POINTER.unpack(pointer))
    except struct.error:
        raise StoreError("unreadable") from None
