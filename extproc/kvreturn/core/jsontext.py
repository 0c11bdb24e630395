"""JSON objects as text: find, drop and replace members, leaving every other byte as it was.

Re-serialising a request would change spacing, escapes and number forms, and the chat template would render other
tokens (protocol.md, "Bytes"). So bodies are never written anew: members are found by position and spliced.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

_values = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STDLIB = json.JSONDecoder()
_SPACE = rb"[ \t\n\r]*"
_NAME = rb'%b("[^"\\\x00-\x1f]*(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*)*")%b:%b' % (_SPACE, _SPACE, _SPACE)
_OPEN = re.compile(_SPACE + rb"\{")
_FIRST, _NEXT = re.compile(_NAME), re.compile(_SPACE + b"," + _NAME)
_END = re.compile(_SPACE + rb"\}" + _SPACE)


_MAX_MEMBERS = 10_000  # no request or response has a hundredth of it; each costs time


class JSONTextError(ValueError):
    """The text is not what was asked for: no JSON, no object, or nested too deeply."""


def loads(text: bytes | bytearray | memoryview) -> Any:  # noqa: ANN401 - JSON
    """Decode JSON as vLLM does.

    vLLM reads requests with the standard library, which takes what stricter parsers refuse (NaN, lone surrogates), so
    that one has the last word.

    Raises:
        JSONTextError: no JSON, or nested too deeply.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        return json.loads(bytes(text).decode())
    except (ValueError, RecursionError) as e:
        raise JSONTextError(_short(e)) from None


class TooManyError(JSONTextError):
    """More members than anybody needs."""


class Member(NamedTuple):
    """One member of an object: its decoded name, and where name and value stand in the text."""

    name: str
    start: int
    value: int
    end: int


class ObjectText:
    """The text of one JSON object with the positions of its members. Duplicate names are kept apart."""

    def __init__(self, text: bytes) -> None:
        """Find the members.

        Raises:
            JSONTextError: `text` is not exactly one JSON object.
        """
        self.text = text
        try:
            if not text.isascii():  # which needs no copy
                text.decode()
        except UnicodeDecodeError as e:
            raise JSONTextError(_short(e)) from None
        try:
            self.members = _fast(text)
        except TooManyError:
            raise
        except (msgspec.MsgspecError, RecursionError, JSONTextError):
            self.members = _slow(text)

    def get(self, name: str) -> bytes | None:
        """The raw value of `name`; the last one of several, as JSON parsers have it."""
        at = self._find(name)
        return None if at is None else self.text[at]

    def load(self, name: str) -> Any:  # noqa: ANN401 - JSON
        """The decoded value of `name`, None where it is absent."""
        at = self._find(name)
        return None if at is None else loads(memoryview(self.text)[at])

    def _find(self, name: str) -> slice | None:
        """Where the value of `name` stands."""
        for member in reversed(self.members):
            if member.name == name:
                return slice(member.value, member.end)
        return None

    def __contains__(self, name: object) -> bool:
        """Whether a member of this name is there."""
        return any(member.name == name for member in self.members)

    def without(self, names: Collection[str]) -> bytes:
        """The text without the members of these names."""
        return self.edit(drop=names)

    def edit(self, drop: Collection[str] = (), put: Mapping[str, bytes] | None = None) -> bytes:
        """The text with some members dropped and others set.

        Args:
            drop: names to drop, each with one comma.
            put: raw values by name. The last member of that name is replaced in place and others of it are dropped;
                a new name goes to the end, in the order given.
        """
        return self._edit(drop, put)[0]

    def edited(self, drop: Collection[str] = (), put: Mapping[str, bytes] | None = None) -> "ObjectText":
        """The same as an `ObjectText`. Values are not read again, which takes half a millisecond for a megabyte.

        Args:
            drop: as for `edit`.
            put: as for `edit`; valid JSON.
        """
        new = ObjectText.__new__(ObjectText)
        new.text, sizes = self._edit(drop, put)
        size = iter(sizes)
        new.members = _members(new.text, lambda _, at: at + next(size))
        return new

    def _edit(self, drop: Collection[str], put: Mapping[str, bytes] | None) -> tuple[bytes, list[int]]:
        """See `edit`. Also gives the sizes of the values that are then there, in order."""
        put = dict(put or {})
        last = {m.name: m for m in self.members}
        cuts: list[tuple[int, int, bytes]] = []
        kept: list[int] = []
        pending: list[Member] = []  # dropped before any member is kept: they take the comma behind them
        for i, member in enumerate(self.members):
            if member.name in drop or (member.name in put and last[member.name] is not member):
                if kept:
                    cuts.append((self.members[i - 1].end, member.end, b""))
                else:
                    pending.append(member)
                continue
            if pending:
                cuts.append((pending[0].start, member.start, b""))
                pending = []
            raw = put.pop(member.name, None)
            kept.append(member.end - member.value if raw is None else len(raw))
            if raw is not None:
                cuts.append((member.value, member.end, raw))
        if pending:
            cuts.append((pending[0].start, pending[-1].end, b""))
        if put:
            at = self.members[-1].end if self.members else self.text.index(b"{") + 1
            new = b",".join(json.dumps(name).encode() + b":" + raw for name, raw in put.items())
            cuts.append((at, at, b"," + new if kept else new))
            kept += map(len, put.values())
        return _apply(self.text, cuts), kept

    def map_values(self, names: Collection[str], change: Callable[[bytes], bytes]) -> bytes:
        """The text with the raw values of these names passed through `change`."""
        return _apply(
            self.text,
            [(m.value, m.end, change(self.text[m.value : m.end])) for m in self.members if m.name in names],
        )


def drop_nested(raw: bytes, names: Collection[str]) -> bytes:
    """Drop members of these names from a JSON value at any depth. Values that hold none are returned as they are.

    Raises:
        JSONTextError: nested too deeply, or no JSON.
    """
    value = loads(raw)
    try:
        clean, changed = _prune(value, names)
        # In ASCII: lone surrogates, which clients do send, have no form in UTF-8.
        return json.dumps(clean, separators=(",", ":")).encode() if changed else raw
    except RecursionError as e:
        raise JSONTextError(_short(e)) from None


def _prune(value: Any, names: Collection[str]) -> tuple[Any, bool]:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        pairs = {k: _prune(v, names) for k, v in value.items() if k not in names}
        changed = len(pairs) < len(value) or any(c for _, c in pairs.values())
        return {k: v for k, (v, _) in pairs.items()}, changed
    if isinstance(value, list):
        items = [_prune(v, names) for v in value]
        return [v for v, _ in items], any(c for _, c in items)
    return value, False


def _members(text: bytes, value_end: Callable[[str, int], int]) -> list[Member]:
    """Walk over the members; `value_end` tells where the value of a name, beginning at a position, ends.

    Raises:
        JSONTextError: not one JSON object.
    """
    members: list[Member] = []
    opening = _OPEN.match(text)
    if not opening:
        raise JSONTextError("the body is not a JSON object")
    end = opening.end()
    head = _FIRST.match(text, end)
    while head:
        name, value = _name(head[1]), head.end()
        end = value_end(name, value)
        members.append(Member(name, head.start(1), value, end))
        if len(members) > _MAX_MEMBERS:
            raise TooManyError(f"an object with more than {_MAX_MEMBERS} members")
        head = _NEXT.match(text, end)
    if not _END.fullmatch(text, end):
        raise JSONTextError(f"not JSON: neither a member nor the end of the object at byte {end}")
    return members


def _fast(text: bytes) -> list[Member]:
    """By the lengths of the values that a fast parser found. Fails on duplicate names, of which it keeps one.

    Raises:
        JSONTextError: a value does not stand where it should.
    """
    values = _values.decode(text)

    def end(name: str, at: int) -> int:
        raw = bytes(values.get(name, b""))
        if not raw or not text.startswith(raw, at):
            raise JSONTextError("a value is out of place")
        return at + len(raw)

    return _members(text, end)


def _slow(text: bytes) -> list[Member]:
    """With the standard library's scanner, which takes NaN, lone surrogates and duplicate names.

    Reads the text as Latin-1, so that character positions are byte positions; all structure is ASCII either way.

    Raises:
        JSONTextError: not one JSON object.
    """
    try:
        latin = text.decode("latin-1")
        return _members(text, lambda _, at: _STDLIB.raw_decode(latin, at)[1])
    except JSONTextError:
        raise
    except (ValueError, RecursionError) as e:
        raise JSONTextError(_short(e)) from None


def _name(literal: bytes) -> str:
    name = loads(literal) if b"\\" in literal else literal[1:-1].decode()
    assert isinstance(name, str)
    return name


def _apply(text: bytes, cuts: Iterable[tuple[int, int, bytes]]) -> bytes:
    parts: list[bytes | memoryview] = []
    view, at = memoryview(text), 0  # so that what stays is copied once
    for start, end, new in cuts:
        parts += [view[at:start], new]
        at = end
    return b"".join([*parts, view[at:]])


def _short(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"[:200]
