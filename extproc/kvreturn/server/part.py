"""A part of an answer in the fast lane, as the script in Envoy tells of it (envoy/lua/part.lua)."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvreturn.core.packed import unpack


@dataclass(frozen=True, slots=True)
class Begun:
    """How an answer began.

    Attributes:
        status: HTTP status.
        late: seconds since then.
        node: `ip:port` of the node that answered; None if Envoy does not tell.
    """

    status: int
    late: float
    node: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer.

    Attributes:
        number: from 1.
        last: whether the answer ends with it.
        begun: how the answer began; None unless it is the first part.
        marks: of its first pieces, how many bytes they have and how many seconds ago they came.
        text: D's bytes.
    """

    number: int
    last: bool
    begun: Begun | None
    marks: tuple[tuple[int, float], ...]
    text: bytes

    @classmethod
    def read(cls, about: str, text: bytes) -> "Part":
        """What a call of the script tells.

        Args:
            about: value of `x-kvreturn-part`: `NUMBER LAST`, in the first one `STATUS,MILLISECONDS,NODE`, then
                `BYTES:MILLISECONDS` for each mark.
            text: the message, packed.

        Raises:
            ValueError: it is no such text.
        """
        number, last, *marks = about.split(" ")
        begun = None
        if number == "1":
            status, ms, node = marks.pop(0).split(",") if marks else ("", "", "")
            begun = Begun(int(status), int(ms) / 1e3, node or None)
        sizes = [mark.split(":") for mark in marks]
        timed = tuple((int(size), int(ms) / 1e3) for size, ms in sizes)
        return cls(int(number), last == "1", begun, timed, unpack(text))

    def pieces(self) -> Iterator[tuple[bytes, float]]:
        """The text as it came, and how many seconds ago; what was not timed has come just now."""
        at = 0
        for size, late in self.marks:
            yield self.text[at : at + size], late
            at += size
        yield self.text[at:], 0.0
