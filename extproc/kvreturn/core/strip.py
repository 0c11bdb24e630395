"""Takes members out of JSON that streams by, without keeping it.

For what is too large to parse at once, and as the safety net when parsing went wrong: slower than scanning for the
name, but its memory does not grow with the text.
"""

import re
from collections.abc import Collection

_OUTSIDE = rb'"{}\[\],'  # what changes the state outside a string
_INSIDE = rb'"\\'
_LINE_ENDS = b"\r\n"
_DEPTH = 2  # the object itself, and an object that is directly a member's value: `response` in /v1/responses' events
_LONGEST_NAME = 256


class MemberStripper:
    """Removes members from objects at depth 1 and 2 of a stream of JSON texts. All else passes byte for byte.

    Args:
        names: names of the members to remove. Names written with escapes are not recognised: the text comes from
            vLLM, which writes plain ones.
        lines: the stream is made of lines (server-sent events): a line end begins afresh, so what is broken in one
            line, or no JSON at all, does not hide what is in the next.
    """

    def __init__(self, names: Collection[str], *, lines: bool = False) -> None:
        self._names = {b'"' + name.encode() + b'"' for name in names}
        self._lines = lines
        ends = _LINE_ENDS if lines else b""
        self._outside = re.compile(b"[" + _OUTSIDE + ends + b"]")
        self._inside = re.compile(b"[" + _INSIDE + ends + b"]")
        self.removed = 0
        self._reset()

    def _reset(self) -> None:
        self._depth = 0  # brackets we are inside of
        self._stack = bytearray()  # the outer ones of them
        self._in_string = False
        self._escaped = False
        self._held = bytearray()  # from a member's comma to the end of its name: nobody knows yet whether it stays
        self._naming = False  # inside `_held`
        self._dropping = 0  # depth of the object whose member is being removed, 0 if none
        self._kept: list[bool] = []  # for each in `_stack`, whether a member has been let through

    def decode(self, data: bytes) -> bytes:
        """Take bytes, return what may go on."""
        out = bytearray()
        at = 0
        while at < len(data):
            if self._escaped and not (self._lines and data[at] in _LINE_ENDS):
                self._escaped = False
                end = at + 1
                self._emit(out, data[at:end])
            else:
                match = (self._inside if self._in_string else self._outside).search(data, at)
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
        if byte in _LINE_ENDS:
            out += self.flush() + byte
            return
        if self._in_string:
            self._emit(out, byte)
            if byte == b"\\":
                self._escaped = True
            else:
                self._in_string = False
                self._name_ends(out)
            return
        if byte == b'"':
            self._in_string = True
        elif byte in b"{[":
            self._open(out, byte)
            return
        elif byte in b"}]":
            self._close(out, byte)
            return
        elif 0 < self._depth <= _DEPTH and self._stack[-1:] == b"{" and self._dropping in {0, self._depth}:
            # The comma behind a removed member goes with it if nothing before it was kept.
            self._held += byte if self._kept[-1] or not self._dropping else b""
            self._dropping = 0
            self._naming = True
            return
        self._emit(out, byte)

    def _open(self, out: bytearray, byte: bytes) -> None:
        self._emit(out, byte)
        self._depth += 1
        if self._depth <= _DEPTH:
            self._stack += byte
            self._kept.append(False)
            self._naming |= byte == b"{" and not self._dropping

    def _close(self, out: bytearray, byte: bytes) -> None:
        if self._naming:  # an empty object
            self._keep(out)
        if self._dropping == self._depth:
            self._dropping = 0
        if self._depth <= _DEPTH:
            del self._stack[-1:], self._kept[-1:]
        self._depth = max(self._depth - 1, 0)
        self._emit(out, byte)

    def _name_ends(self, out: bytearray) -> None:
        if not self._naming:
            return
        if bytes(self._held).lstrip(b", \t\r\n") in self._names:
            self._held.clear()
            self._naming = False
            self._dropping = self._depth
            self.removed += 1
        else:
            self._keep(out)

    def _keep(self, out: bytearray) -> None:
        out += self._held
        self._held.clear()
        self._naming = False
        if self._kept:
            self._kept[-1] = True
