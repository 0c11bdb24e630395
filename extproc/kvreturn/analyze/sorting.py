"""Sort more records than fit into memory."""

import heapq
import struct
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Self

_LENGTH = struct.Struct(">I")
_OVERHEAD = 48  # bytes that CPython and the list need for a `bytes` object besides its contents
_FAN_IN = 64


class ExternalSort:
    """Collects byte strings and gives them back in order. What exceeds the budget lies in unnamed temporary files.

    Use as a context manager, which removes the files.

    Args:
        budget: bytes of memory for records.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held: list[bytes] = []
        self._size = 0
        self._runs: list[IO[bytes]] = []

    def __enter__(self) -> Self:
        """Nothing to do yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the files."""
        for run in self._runs:
            run.close()

    def add(self, record: bytes) -> None:
        """Take one more record."""
        self._held.append(record)
        self._size += len(record) + _OVERHEAD
        if self._size >= self._budget:
            self._held.sort()
            self._spill(self._held)
            self._held, self._size = [], 0
            if len(self._runs) >= _FAN_IN:
                merged, self._runs = self._runs, []
                self._spill(heapq.merge(*map(_read, merged)))
                for run in merged:
                    run.close()

    def drain(self) -> Iterator[bytes]:
        """All records in ascending order, once. Nothing may be added any more."""
        self._held.sort()
        return heapq.merge(*map(_read, self._runs), self._held) if self._runs else iter(self._held)

    def _spill(self, records: Iterable[bytes]) -> None:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._runs.append(file)
        for record in records:
            file.write(_LENGTH.pack(len(record)) + record)


def _read(run: IO[bytes]) -> Iterator[bytes]:
    run.seek(0)
    while head := run.read(_LENGTH.size):
        yield run.read(_LENGTH.unpack(head)[0])
