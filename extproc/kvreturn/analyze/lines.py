"""Lines of files, one after the other, in memory for one line."""

import gzip
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

STDIN = "-"
_MAX_LINE = 64 << 20  # twice the largest request body that the router takes by default
_REPORT_EVERY = 2_000
_BOM = b"\xef\xbb\xbf"


class InputError(Exception):
    """An input that cannot be read, or no further; the message names it."""


@dataclass(slots=True)
class Line:
    """One line that is not blank.

    Attributes:
        source: name of the input.
        number: counted from 1 in each input.
        text: without white space at its ends; None if it is too long to be a request.
    """

    source: str
    number: int
    text: bytes | None


def total_size(names: Sequence[str]) -> int | None:
    """Bytes of all inputs as they lie on disk; None if one is no regular file."""
    paths = [Path(n) for n in names]
    if not all(p.is_file() for p in paths):
        return None
    return sum(p.stat().st_size for p in paths)


def read_lines(names: Sequence[str], progress: Callable[[int], None]) -> Iterator[Line]:
    """Lines of all inputs, in this order.

    Args:
        names: paths; `-` is standard input, and what ends in `.gz` is decompressed.
        progress: called now and then with the bytes that were read since the last call, as they lie on disk.

    Raises:
        InputError: an input cannot be opened or read.
    """
    for name in names:
        try:
            with ExitStack() as stack:
                raw = sys.stdin.buffer if name == STDIN else stack.enter_context(Path(name).open("rb"))
                file = stack.enter_context(gzip.GzipFile(fileobj=raw)) if name.endswith(".gz") else raw
                yield from _lines(name, file, raw, progress)
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise InputError(f"{name}: broken gzip data: {e}") from None
        except OSError as e:
            raise InputError(f"{name}: {e.strerror or e}") from None


def _lines(
    name: str, file: BinaryIO | gzip.GzipFile, raw: IO[bytes], progress: Callable[[int], None]
) -> Iterator[Line]:
    seekable = raw.seekable()
    number = told = 0
    while chunk := file.readline(_MAX_LINE):
        number += 1
        whole = chunk.endswith(b"\n") or len(chunk) < _MAX_LINE
        text = chunk.removeprefix(_BOM).strip() if number == 1 else chunk.strip()
        if not whole:
            while (rest := file.readline(_MAX_LINE)) and not rest.endswith(b"\n"):
                pass
            yield Line(name, number, None)
        elif text:
            yield Line(name, number, text)
        if seekable and number % _REPORT_EVERY == 0:
            progress(raw.tell() - told)
            told = raw.tell()
    if seekable:
        progress(raw.tell() - told)
