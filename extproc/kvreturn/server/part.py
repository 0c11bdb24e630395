"""A part of an answer in the fast lane, as the script in Envoy tells of it (envoy/lua/part.lua)."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvreturn.core.packed import unpack


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer.

    Attributes:
        number: from 1.
        last: whether the answer ends with it.
        marks: of its first pieces, how many bytes they have and how many seconds ago they came.
        text: D's bytes.
    """

    number: int
    last: bool
    marks: tuple[tuple[int, float], ...]
    text: bytes

    @classmethod
    def read(cls, about: str, text: bytes) -> "Part":
        """What a call of the script tells.

        Args:
            about: value of `x-kvreturn-part`: `NUMBER LAST`, then `BYTES:MILLISECONDS` for each mark.
            text: the message, packed.

        Raises:
            ValueError: it is no such text.
        """
        number, last, *marks = about.split(" ")
        sizes = [mark.split(":") for mark in marks]
        return cls(int(number), last == "1", tuple((int(size), int(ms) / 1e3) for size, ms in sizes), unpack(text))

    def pieces(self) -> Iterator[tuple[bytes, float]]:
        """The text as it came, and how many seconds ago; what was not timed has come just now."""
        at = 0
        for size, late in self.marks:
            yield self.text[at : at + size], late
            at += size
        yield self.text[at:], 0.0
