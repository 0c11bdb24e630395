"""What differs between a body and the one that is to go on in its place: mostly a few bytes of a megabyte."""

_PROBE = 32  # bytes by which the rest of a body is recognised behind an edit
_WINDOW = 4096  # bytes within which it is looked for
_EDITS = 16
_BLOCK = 1 << 16  # bytes, of which copies stay in the processor's cache

Piece = tuple[int, int] | bytes
"""A slice of the old body, from and to; or bytes that are new."""


def pieces(old: bytes, new: bytes) -> list[Piece]:
    """How to make the new body of the old one: few pieces, where few members differ."""
    out: list[Piece] = []
    at = done = 0
    for _ in range(_EDITS):
        same = _alike(old, at, new, done)
        if same:
            out.append((at, at + same))
        at, done = at + same, done + same
        behind = _behind(old, at, new, done)
        if behind is None:
            break
        taken, put = behind
        if put > done:
            out.append(new[done:put])
        at, done = taken, put
    tail = _alike(old[at:][::-1], 0, new[done:][::-1], 0)
    fresh = new[done : len(new) - tail]
    return [*out, *([fresh] if fresh else []), *([(len(old) - tail, len(old))] if tail else [])]


def _behind(old: bytes, at: int, new: bytes, done: int) -> tuple[int, int] | None:
    """Where both go on alike behind an edit: something was taken out of the old one, or put into the new one."""
    probe = new[done : done + _PROBE]
    if len(probe) == _PROBE and (taken := old.find(probe, at, at + _WINDOW)) >= 0:
        return taken, done
    probe = old[at : at + _PROBE]
    if len(probe) == _PROBE and (put := new.find(probe, done, done + _WINDOW)) >= 0:
        return at, put
    return None


def _alike(old: bytes, at: int, new: bytes, done: int) -> int:
    """How many bytes are the same from there on. By blocks, then by halves: comparing bytes one by one is slow."""
    low, end = 0, min(len(old) - at, len(new) - done)
    while low + _BLOCK <= end and new.startswith(old[at + low : at + low + _BLOCK], done + low):
        low += _BLOCK
    high = min(low + _BLOCK, end)
    size = high - low
    while low < high:
        if new.startswith(old[at + low : at + low + size], done + low):
            low += size
            size = high - low
        else:
            high = low + size - 1
            size = (high - low + 1) // 2
    return low
