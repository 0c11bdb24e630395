"""Cutting bytes in pieces, as networks do."""

import random
from collections.abc import Iterator, Sequence


def in_two(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Cut at every offset, both ends included."""
    for at in range(len(data) + 1):
        yield data[:at], data[at:]


def singly(data: bytes) -> list[bytes]:
    """One byte at a time."""
    return [data[i : i + 1] for i in range(len(data))]


def by(size: int, data: bytes) -> list[bytes]:
    """Pieces of `size` bytes."""
    return [data[i : i + size] for i in range(0, len(data), size)]


def at(offsets: Sequence[int], data: bytes) -> list[bytes]:
    """Cut at these offsets, taken modulo the length; empty pieces may come out, as they do on the wire."""
    points = sorted(o % (len(data) + 1) for o in offsets)
    return [data[a:b] for a, b in zip([0, *points], [*points, len(data)], strict=True)]


def randomly(rng: random.Random, data: bytes, mean: int) -> list[bytes]:
    """Pieces of about `mean` bytes."""
    pieces, start = [], 0
    while start < len(data):
        size = 1 + int(rng.expovariate(1 / mean))
        pieces.append(data[start : start + size])
        start += size
    return pieces
