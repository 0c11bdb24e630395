"""Which turns follow each other, where no id says so. Turns come in the order of time."""

import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvreturn.analyze.observation import Answered, Link, Observation, Sizes, Turn
from kvreturn.core.fingerprint import Trail

_MAX_TURNS = 150_000  # about 60 MB
_MAX_CLIENTS = 20_000
_MAX_OPEN = 16  # conversations of one client at a time
_DIGEST = 16
_HEAD = struct.Struct(">dQIIqq?16s16s")
_NONE = bytes(_DIGEST)


def pack(observation: Observation, place: int) -> bytes:
    """An observation without a session as bytes that sort by time.

    Args:
        observation: it.
        place: of its line in the input.
    """
    o, s = observation, observation.sizes
    completion, cached = (-1 if n is None else n for n in (s.completion, s.cached))
    head = _HEAD.pack(
        *(o.ts, place, s.prompt, s.known, completion, cached, s.estimated), o.answered or _NONE, o.client or _NONE
    )
    return head + b"".join(o.digests)


def unpack(record: bytes) -> tuple[Observation, int]:
    """What `pack` made."""
    ts, place, prompt, known, completion, cached, estimated, answered, client = _HEAD.unpack_from(record)
    sizes = Sizes(prompt, known, None if completion < 0 else completion, None if cached < 0 else cached, estimated)
    digests = [record[i : i + _DIGEST] for i in range(_HEAD.size, len(record), _DIGEST)]
    answer, sender = (None if d == _NONE else d for d in (answered, client))
    return Observation(ts, sizes, digests=digests, answered=answer, client=sender), place


@dataclass(slots=True)
class _Open:
    """A turn that none has followed yet."""

    session: bytes
    keys: tuple[bytes, ...]
    answered: bool


class Linker:
    """Finds the turn before each turn as the router would, and gives both the same session.

    A handle is used once, so each turn is followed by one other at most: a branch begins a session.

    Attributes:
        forgotten: turns that were dropped to bound memory, so that none could be found to follow them.
    """

    def __init__(self, max_turns: int = _MAX_TURNS) -> None:
        self.forgotten = 0
        self._max_turns = max_turns
        self._sessions = 0
        self._turns = 0
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._by_key: dict[bytes, int] = {}
        self._clients: OrderedDict[bytes, list[tuple[int, bytes]]] = OrderedDict()

    def link(self, records: Iterable[bytes]) -> Iterator[Turn]:
        """Turns with their sessions.

        Args:
            records: packed observations in order.
        """
        for record in records:
            o, place = unpack(record)
            if o.client is not None:
                session = self._guess(o.client, o.sizes.prompt)
                yield Turn(session, o.ts, place, o.sizes, Link.GUESSED, Answered.UNKNOWN)
            else:
                session, answered = self._find(o)
                yield Turn(session, o.ts, place, o.sizes, Link.FOUND, answered)

    def _new(self) -> bytes:
        self._sessions += 1
        return self._sessions.to_bytes(8, "big")

    def _find(self, o: Observation) -> tuple[bytes, Answered]:
        trail = Trail(b"", (b"", *o.digests))
        session, answered = None, Answered.UNKNOWN
        key = next((k for k in trail.candidates() if k in self._by_key), None)
        if key is not None:
            before = self._take(self._by_key[key])
            session = before.session
            if before.answered:
                answered = Answered.CONFIRMED if key == before.keys[0] else Answered.REFUTED
        session = session or self._new()
        whole = Trail(b"", (b"", o.answered)).turn_key() if o.answered else None
        keys = tuple(k for k in (whole, trail.prompt_key()) if k)
        if keys:
            self._turns += 1
            self._open[self._turns] = _Open(session, keys, whole is not None)
            self._by_key.update(dict.fromkeys(keys, self._turns))
            if len(self._open) > self._max_turns:
                self._take(next(iter(self._open)))
                self.forgotten += 1
        return session, answered

    def _take(self, number: int) -> _Open:
        taken = self._open.pop(number)
        for key in taken.keys:
            if self._by_key.get(key) == number:
                del self._by_key[key]
        return taken

    def _guess(self, client: bytes, size: int) -> bytes:
        """The client's conversation whose last prompt was the longest that is shorter than this one."""
        known = self._clients.pop(client, [])
        best = max((c for c in known if c[0] < size), default=None)
        session = best[1] if best else self._new()
        self._clients[client] = [*(c for c in known if c is not best), (size, session)][-_MAX_OPEN:]
        if len(self._clients) > _MAX_CLIENTS:
            self._clients.popitem(last=False)
        return session
