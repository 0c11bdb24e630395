"""Server-sent events, cut from a byte stream without losing a byte.

WHATWG's grammar (https://html.spec.whatwg.org/multipage/server-sent-events.html): lines end in LF, CRLF or CR, a blank
line ends an event, a colon begins a comment, one space after a field's colon is no part of its value.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Atomic, or the CR and the LF of one CRLF would count as two line ends.
_BLANK = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)+")
_LINE = re.compile(rb"[^\r\n]*(?>\r\n|\n|\r|$)")
_LEAD = re.compile(rb"[\r\n]+")
_LINE_ENDS = b"\r\n"
_BOM = b"\xef\xbb\xbf"  # may lead a stream


class SSEDecoder:
    """Holds back incomplete events: what goes in comes out, cut at the ends of events.

    `decode` and `flush` follow the convention of incremental decoders.
    """

    def __init__(self) -> None:
        self._tail = bytearray()
        self._cr = False  # whether there is a CR in it
        self._after_cr = False

    @property
    def pending(self) -> int:
        """Bytes of the incomplete event that is held back."""
        return len(self._tail)

    def decode(self, data: bytes) -> bytes:
        """Take bytes.

        Returns:
            All events that are now complete, with their blank lines; may be empty.
        """
        if not self._tail and data.endswith(b"\n\n"):  # what vLLM sends: whole events
            self._after_cr = False
            return data
        lead = b""
        if self._after_cr and data:
            # The event went out when its blank line's CR was seen; an LF behind it still belongs to it.
            self._after_cr = False
            if data[:1] == b"\n":
                lead, data = data[:1], data[1:]
        seen = len(self._tail)
        self._tail += data
        self._cr = self._cr or b"\r" in data
        cut = self._last_boundary(max(0, seen - 3))
        if not cut:
            return lead
        out = lead + bytes(memoryview(self._tail)[:cut])
        del self._tail[:cut]
        self._cr = b"\r" in self._tail
        self._after_cr = not self._tail and out.endswith(b"\r")
        return out

    def flush(self) -> bytes:
        """End of the stream. Returns the incomplete event, if there is one."""
        out = bytes(self._tail)
        self._tail.clear()
        self._cr = False
        return out

    def _last_boundary(self, start: int) -> int:
        """Where the last complete event ends, looking at line ends from `start` on; 0 if none does."""
        if not self._cr:
            return self._tail.rfind(b"\n\n", start) + 2 if self._tail.find(b"\n\n", start) >= 0 else 0
        if start and self._tail[start - 1] == _LINE_ENDS[0] and self._tail[start] == _LINE_ENDS[1]:
            start -= 1  # not between the two bytes of a CRLF
        end = 0
        for match in _BLANK.finditer(self._tail, start):
            end = match.end()
        return end


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        raw: its bytes, the blank line included.
        data: its data lines joined by LF, None where there is no data line.
        name: the value of its `event` field, empty if there is none.
    """

    raw: bytes
    data: bytes | None
    name: bytes = b""

    def with_data(self, data: bytes) -> bytes:
        """The event's bytes with other data, on one line. All lines but the data lines stay as they are.

        Args:
            data: JSON text. Line ends in it are white space between tokens, so they may become spaces.
        """
        out, done = bytearray(), False
        for line in _lines(self.raw):
            field, value = _field(line)
            if field != b"data":
                out += line
            elif not done:
                done = True
                content = line.rstrip(_LINE_ENDS)
                prefix = content[: len(content) - len(value)]
                out += prefix + data.replace(b"\r", b" ").replace(b"\n", b" ") + line[len(content) :]
        return bytes(out)


def split_events(text: bytes) -> list[Event]:
    """Cut whole events (`SSEDecoder.decode`'s, or `flush`'s last one) apart. Their `raw` add up to `text`.

    Line ends that lead are an event of their own, without data: they may be the rest of the blank line before.
    """
    lead = _LEAD.match(text)
    at = lead.end() if lead else 0
    events = [_event(text[:at])] if lead else []
    for match in _BLANK.finditer(text, at):
        events.append(_event(text[at : match.end()]))
        at = match.end()
    if at < len(text):
        events.append(_event(text[at:]))
    return events


def event_data(text: bytes) -> Iterable[bytes]:
    """The data of all of these events that have some: as `split_events` has it, but quicker."""
    lines = text.split(b"\n\n")
    # What vLLM sends: events of one line each.
    if b"\r" not in text and all(line.startswith(b"data: ") and b"\n" not in line for line in lines if line):
        return [line[len(b"data: ") :] for line in lines if line]
    return [event.data for event in split_events(text) if event.data is not None]


def _event(raw: bytes) -> Event:
    data: list[bytes] = []
    name = b""
    for line in _lines(raw):
        field, value = _field(line)
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return Event(raw, b"\n".join(data) if data else None, name)


def _lines(raw: bytes) -> list[bytes]:
    return [m[0] for m in _LINE.finditer(raw) if m[0]]


def _field(line: bytes) -> tuple[bytes, bytes]:
    """Field name and value of a line; a comment's name is empty."""
    name, _, value = line.rstrip(_LINE_ENDS).partition(b":")
    return name.removeprefix(_BOM), value.removeprefix(b" ")


def event_end(before: bytes, data: bytes) -> int | None:
    """Where in `data` the event ends that is passing, without keeping it.

    Args:
        before: the last bytes (three are enough) that passed before `data`.
        data: what comes now.

    Returns:
        Number of bytes of `data` that belong to the event, None if it goes on.
    """
    for match in _BLANK.finditer(before + data):
        if match.end() > len(before):
            return match.end() - len(before)
    return None
