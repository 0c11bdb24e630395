"""Takes members out of JSON that streams by, without keeping it.

For what is too large to parse at once, and as the safety net when parsing went wrong: slower than scanning for the
name, but its memory does not grow with the text.
"""

import re
from collections.abc import Collection

_OUTSIDE = re.compile(rb'["{}\[\],\n]')  # what changes the state outside a string
_INSIDE = re.compile(rb'["\\]')
_DEPTH = 2  # the object itself, and an object that is directly a member's value: `response` in /v1/responses' events
_LONGEST_NAME = 256


class MemberStripper:
    """Removes members from objects at depth 1 and 2 of a stream of JSON texts. All else passes byte for byte.

    Args:
        names: names of the members to remove. Names written with escapes are not recognised: the text comes from
            vLLM, which writes plain ones.
        lines: the stream is made of lines (server-sent events): a line end begins afresh. JSON strings hold no raw
            line ends, so this never happens inside a text.
    """

    def __init__(self, names: Collection[str], *, lines: bool = False) -> None:
        self._names = {b'"' + name.encode() + b'"' for name in names}
        self._lines = lines
        self.removed = 0
        self._reset()

    def _reset(self) -> None:
        self._stack = bytearray()  # opening brackets we are inside of
        self._in_string = False
        self._escaped = False
        self._held = bytearray()  # from a member's comma to the end of its name: nobody knows yet whether it stays
        self._naming = False  # inside `_held`
        self._dropping = 0  # depth of the object whose member is being removed, 0 if none
        self._kept: list[bool] = []  # by depth, whether a member has been let through

    def decode(self, data: bytes) -> bytes:
        """Take bytes, return what may go on."""
        out = bytearray()
        at = 0
        while at < len(data):
            if self._escaped:
                self._escaped = False
                end = at + 1
                self._emit(out, data[at:end])
            else:
                match = (_INSIDE if self._in_string else _OUTSIDE).search(data, at)
                end = match.end() if match else len(data)
                if match:
                    self._emit(out, data[at : end - 1])
                    self._step(out, data[end - 1 : end])
                else:
                    self._emit(out, data[at:end])
            at = end
        return bytes(out)

    def flush(self) -> bytes:
        """End of the stream. Returns what was held back."""
        out = bytes(self._held)
        self._reset()
        return out

    def _emit(self, out: bytearray, data: bytes) -> None:
        if self._naming:
            self._held += data
            if len(self._held) > _LONGEST_NAME:
                self._keep(out)
        elif not self._dropping:
            out += data

    def _step(self, out: bytearray, byte: bytes) -> None:
        if self._in_string:
            self._emit(out, byte)
            if byte == b"\\":
                self._escaped = True
            else:
                self._in_string = False
                self._name_ends(out)
            return
        depth = len(self._stack)
        if byte == b'"':
            self._in_string = True
        elif byte == b"\n":
            if self._lines:
                held = self.flush()
                out += held
        elif byte in b"{[":
            self._emit(out, byte)
            self._stack += byte
            self._kept.append(False)
            if byte == b"{" and depth < _DEPTH and not self._dropping:
                self._naming = True
            return
        elif byte in b"}]":
            self._close(out, byte, depth)
            return
        elif depth and depth <= _DEPTH and self._stack[-1:] == b"{" and self._dropping in {0, depth}:
            self._dropping = 0
            self._naming = True
            self._held += byte if self._kept[-1] else b""
            return
        self._emit(out, byte)

    def _close(self, out: bytearray, byte: bytes, depth: int) -> None:
        if self._naming:  # an empty object
            self._keep(out)
        if self._dropping == depth:
            self._dropping = 0
        if self._stack:
            self._stack.pop()
            self._kept.pop()
        self._emit(out, byte)

    def _name_ends(self, out: bytearray) -> None:
        if not self._naming:
            return
        if bytes(self._held).lstrip(b", \t\r\n") in self._names:
            self._held.clear()
            self._naming = False
            self._dropping = len(self._stack)
            self.removed += 1
        else:
            self._keep(out)

    def _keep(self, out: bytearray) -> None:
        out += self._held
        self._held.clear()
        self._naming = False
        if self._kept:
            self._kept[-1] = True
