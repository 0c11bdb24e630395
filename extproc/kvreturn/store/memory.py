"""The session store of a single router process."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Held, Holding, Record, Taken

_OVERHEAD, _KEY = 440, 180  # bytes of Python objects around an entry, and around each key; measured with tracemalloc
_TRACE = 60.0  # seconds for which a trace stays at least, however short the record's own life was
_PER_KEY = 8  # entries under one key: equal conversations of one tenant, answered alike
_PER_CONVERSATION = 64  # records by which a conversation is ended; older ones wait for their time
_PART = 64  # records that `take_all` takes at a time
_SWEEP = 64  # entries that one call drops: after a quiet hour all are over, and no turn is to pay for that


@dataclass(slots=True, eq=False)
class _Entry:
    serial: int
    keys: tuple[bytes, ...]
    record: Record | None
    put_at: float
    conversation: bytes | None = None
    reason: Outcome | None = None  # why `record` is gone
    forget_at: float = 0.0

    @property
    def ticket(self) -> bytes:
        return self.serial.to_bytes(8)

    @property
    def size(self) -> int:
        return (
            _OVERHEAD
            + _KEY * (len(self.keys) + (self.conversation is not None))
            + len(self.record.handle or b"" if self.record else b"")
        )


class MemoryStore:
    """Records in a dict, bounded in number and bytes, oldest first out.

    A record that was taken or has expired leaves a small trace for as long again as it could have lived, a minute at
    least, so that the next request learns why it goes cold.

    Args:
        max_entries: upper bound of records, and of traces.
        max_bytes: upper bound of the bytes of all records.
        clock: monotonic seconds.
    """

    def __init__(self, *, max_entries: int, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._serials = itertools.count()
        self._index: dict[bytes, list[_Entry]] = {}
        self._live: OrderedDict[int, _Entry] = OrderedDict()  # by age
        self._gone: OrderedDict[int, _Entry] = OrderedDict()
        self._conversations: dict[bytes, OrderedDict[int, _Entry]] = {}  # live ones, by age
        self._ends: list[tuple[float, int]] = []  # heap: when, and serial; of some that have left, too
        self.bytes = 0
        self.evicted = 0
        self.expired = 0

    def __len__(self) -> int:
        """Number of records that can be taken, or that say why there is nothing to take."""
        return len(self._live)

    @property
    def handles(self) -> int:
        """Number of handles that can be taken."""
        return sum(1 for e in self._live.values() if e.record and e.record.handle)

    async def put(self, keys: Sequence[bytes], record: Record, conversation: bytes | None = None) -> bytes:
        """See `SessionStore.put`."""
        now = self._clock()
        self._sweep(now)
        entry = _Entry(next(self._serials), tuple(keys), record, now, conversation)
        if entry.size > self._max_bytes:
            self.evicted += 1
            return entry.ticket
        self._live[entry.serial] = entry
        heapq.heappush(self._ends, (now + record.ttl, entry.serial))
        self.bytes += entry.size
        if conversation is not None:
            own = self._conversations.setdefault(conversation, OrderedDict())
            own[entry.serial] = entry
            if len(own) > _PER_CONVERSATION:
                own.popitem(last=False)
        for key in entry.keys:
            bucket = self._index.setdefault(key, [])
            bucket.append(entry)
            if len(bucket) > _PER_KEY:
                self._evict(next((e for e in bucket if e.record is None), bucket[0]))
        while len(self._live) > self._max_entries or self.bytes > self._max_bytes:
            self._evict(next(iter(self._live.values())))
        return entry.ticket

    async def replace(self, ticket: bytes, record: Record) -> bool:
        """See `SessionStore.replace`. Its time begins anew."""
        now = self._clock()
        self._sweep(now)
        entry = self._live.get(int.from_bytes(ticket))
        if entry is None or entry.record is None or now - entry.put_at >= entry.record.ttl:
            return False
        self.bytes -= entry.size
        entry.record, entry.put_at = record, now
        self.bytes += entry.size
        self._live.move_to_end(entry.serial)
        heapq.heappush(self._ends, (now + record.ttl, entry.serial))
        return True

    async def end(self, conversation: bytes) -> Sequence[Taken]:
        """See `SessionStore.end`."""
        self._sweep(self._clock())
        return [self._take(entry) for entry in list(self._conversations.get(conversation, {}).values())]

    async def take_all(self) -> AsyncIterator[Sequence[Taken]]:
        """See `SessionStore.take_all`."""
        held = [e for e in self._live.values() if e.record and e.record.handle]
        for begin in range(0, len(held), _PART):  # some go their own way meanwhile
            yield [self._take(e) for e in held[begin : begin + _PART] if e.record and e.record.handle]

    async def present(self) -> None:
        """See `SessionStore.present`. There are no others."""

    async def leave(self) -> bool:
        """See `SessionStore.leave`."""
        return True

    async def look(self, most: int) -> Holding:
        """See `SessionStore.look`."""
        now = self._clock()
        some = [
            Held(
                (e.keys[0] if e.keys else e.ticket).hex()[-16:],
                e.conversation.hex()[-16:] if e.conversation else None,
                e.put_at + e.record.ttl - now,
                len(e.record.handle or b""),
                bool(e.record.handle),
                e.record.decode_node,
                e.record.prefill_node,
                e.record.turns,
            )
            for e in itertools.islice(reversed(self._live.values()), most)
            if e.record
        ]
        return Holding("memory", len(self), self.bytes, some)

    async def take(self, keys: Sequence[bytes]) -> Taken:
        """See `SessionStore.take`. There is no await in it, so it is atomic."""
        now = self._clock()
        self._sweep(now)
        reason: Outcome | None = None
        for key in keys:
            for entry in reversed(self._index.get(key, ())):
                record = entry.record
                if record is not None and now - entry.put_at >= record.ttl:
                    self._bury(entry, Outcome.EXPIRED)
                    self.expired += bool(record.handle)
                    record = None
                if record is None:
                    reason = reason or entry.reason
                    continue
                if record.handle is not None:
                    self._bury(entry, Outcome.ALREADY_TAKEN)
                return Taken(record, None, now - entry.put_at, entry.ticket)
        return Taken(None, reason)

    async def ping(self) -> None:
        """See `SessionStore.ping`. It is always there."""

    async def aclose(self) -> None:
        """See `SessionStore.aclose`. It holds nothing open."""

    def _sweep(self, now: float) -> None:
        """Drop what is over."""
        for _ in range(_SWEEP):
            if not self._ends or self._ends[0][0] > now:
                break
            _, serial = heapq.heappop(self._ends)
            entry = self._live.get(serial)
            if entry and entry.record and now - entry.put_at >= entry.record.ttl:  # not replaced meanwhile
                self.expired += bool(entry.record.handle)
                self._bury(entry, Outcome.EXPIRED)
        for _ in range(2 * _SWEEP):
            entry = next(iter(self._gone.values()), None)
            if entry is None or (len(self._gone) <= self._max_entries and now < entry.forget_at):
                break
            self._forget(entry)

    def _take(self, entry: _Entry) -> Taken:
        """Take this one, whatever it is."""
        record, age = entry.record, self._clock() - entry.put_at
        self._bury(entry, Outcome.ALREADY_TAKEN)
        return Taken(record, None, age, entry.ticket)

    def _bury(self, entry: _Entry, reason: Outcome) -> None:
        """Keep only the reason."""
        record = entry.record
        assert record
        self._live.pop(entry.serial)
        self._part(entry)
        self.bytes -= entry.size
        entry.record, entry.reason = None, record.reason or reason
        entry.forget_at = self._clock() + max(record.ttl, _TRACE)
        self._gone[entry.serial] = entry

    def _evict(self, entry: _Entry) -> None:
        self.evicted += entry.record is not None
        self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        if self._live.pop(entry.serial, None):
            self.bytes -= entry.size
            self._part(entry)
        self._gone.pop(entry.serial, None)
        for key in entry.keys:
            bucket = self._index.get(key)
            if bucket and entry in bucket:
                bucket.remove(entry)
                if not bucket:
                    del self._index[key]

    def _part(self, entry: _Entry) -> None:
        """It is no longer its conversation's."""
        own = self._conversations.get(entry.conversation) if entry.conversation else None
        if own is not None and entry.serial in own:
            del own[entry.serial]
            if not own:
                self._conversations.pop(entry.conversation or b"")
