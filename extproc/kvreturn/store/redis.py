"""The session store of several routers: Redis 7.0 or newer, or Valkey; one server, sentinels or a cluster.

What stands where (`kvr1` is the version of this layout):

    kvr1:<session key>   sorted set of pointers to records, by the time at which their turns ended; the newest eight
    kvr1r:<random id>    one record, sealed (`codec`), for as long as it may be used

A record is reached by several session keys, so its own key is the one truth: GETDEL on it takes it, once, whichever key
led there, in a cluster too. The pointers stay behind as the traces that tell why there is nothing to take. Session keys
are keyed digests, so a reader of Redis sees which keys belong to one turn, but not which turns to one conversation.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from redis import exceptions as errors
from redis.asyncio import RedisCluster

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Record, Taken
from kvreturn.store.client import Client, close
from kvreturn.store.codec import Codec
from kvreturn.store.errors import StoreError

_INDEX, _RECORD = b"kvr1:", b"kvr1r:"
_POINTER = struct.Struct(">c16sQQ")
_HANDLE, _MARKER = b"h", b"m"
_PER_KEY = 8  # as in the memory store
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
    local take = string.sub(pointer, 1, 1) == 'h' and 'GETDEL' or 'GET'
    local value = redis.call(take, ARGV[1] .. string.sub(pointer, 2, 17))
    if value then return {i - 1, pointer, value} end
    if #dead == 0 then dead = {i - 1, pointer, false} end
  end
end
return dead
"""

_KINDS: tuple[tuple[type[Exception], str, bool], ...] = (  # the first that fits: error, kind, whether the store is down
    (errors.AuthenticationError, "auth", True),
    (errors.AuthorizationError, "auth", True),
    (errors.NoPermissionError, "auth", True),
    (errors.BusyLoadingError, "loading", True),
    (errors.MaxConnectionsError, "busy", False),
    (errors.ReadOnlyError, "read_only", True),
    (errors.OutOfMemoryError, "full", False),  # what is there can still be taken
    (errors.ClusterDownError, "cluster_down", True),
    (errors.TimeoutError, "timeout", True),
    (errors.ConnectionError, "connection", True),
    (OSError, "connection", True),
    (errors.RedisError, "refused", False),
)


class _Pointer(NamedTuple):
    kind: bytes
    id: bytes
    put_at: int
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
        self._script = None if isinstance(client, RedisCluster) else client.register_script(_TAKE)

    async def put(self, keys: Sequence[bytes], record: Record) -> None:
        """See `SessionStore.put`.

        Raises:
            StoreError: it is not stored, or not surely.
        """
        ttl = int(record.ttl * 1e6)
        self._last = now = max(self._now(), self._last + 1)
        forget = now + ttl + max(ttl, _TRACE)
        pointer = _Pointer(_HANDLE if record.handle is not None else _MARKER, os.urandom(16), now, now + ttl)
        name = _RECORD + pointer.id
        value = self._codec.seal(name, keys, record)
        if len(value) > self._max_record_bytes:
            raise StoreError("oversize")
        pipe: Any = self._client.pipeline(transaction=False)  # typed as if its methods executed their commands
        # A marker stays as long as the traces: it tells its reason for that long.
        pipe.set(name, value, pxat=(pointer.expires if pointer.kind == _HANDLE else forget) // 1000)
        for key in keys:
            index = _INDEX + key
            pipe.zadd(index, {_POINTER.pack(*pointer): pointer.put_at})
            pipe.zremrangebyrank(index, 0, -_PER_KEY - 1)
            pipe.pexpireat(index, forget // 1000, nx=True)
            pipe.pexpireat(index, forget // 1000, gt=True)  # a short TTL does not cut a longer one's
        with _named():
            await pipe.execute()

    async def take(self, keys: Sequence[bytes]) -> Taken:
        """See `SessionStore.take`. If the answer is lost, so is the handle.

        Raises:
            StoreError: nothing is known, or what was there cannot be read.
        """
        dead: _Pointer | None = None
        with _named():
            for part in _parts(keys if self._script else keys[:_CLUSTER_KEYS]):
                found = await (self._find(part) if self._script else self._find_in_cluster(part))
                if found and found.value is not None:
                    return self._taken(found, found.value)
                if found and dead is None:
                    dead = found.pointer
        if dead is None:
            return Taken()
        return Taken(None, Outcome.EXPIRED if self._now() + _SKEW >= dead.expires else Outcome.ALREADY_TAKEN)

    async def ping(self) -> None:
        """See `SessionStore.ping`."""
        with _named():
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

    def _now(self) -> int:
        return int(self._clock() * 1e6)

    def _taken(self, found: _Found, value: bytes) -> Taken:
        record = self._codec.open(_RECORD + found.pointer.id, found.key, value)
        now = self._now()
        if now >= found.pointer.expires:  # by our clock, whatever the server's says
            return Taken(None, record.reason or Outcome.EXPIRED)
        return Taken(record, None, max(now - found.pointer.put_at, 0) / 1e6)

    async def _find(self, keys: Sequence[bytes]) -> _Found | None:
        """Look up, and take, in one round trip."""
        assert self._script
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
            take = client.getdel if pointer.kind == _HANDLE else client.get
            value = await take(_RECORD + pointer.id) if there else None
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


@contextmanager
def _named() -> Iterator[None]:
    """The client's errors by our names; their texts may hold addresses."""
    try:
        yield
    except (errors.RedisError, OSError) as e:
        kind, down = next((kind, down) for error, kind, down in _KINDS if isinstance(e, error))
        raise StoreError(kind, down=down) from None
