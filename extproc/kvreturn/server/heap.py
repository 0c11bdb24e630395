"""How the router's process keeps its memory: what the defaults of glibc and Python cost a server."""

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_KEPT = 32 << 20  # bytes; as much as glibc lets the second one be


def keep_large() -> None:
    """Keep the memory of one large body for the next one.

    By itself glibc maps memory for each of them, and gives it back at once: the kernel clears all its pages again and
    again, for every copy of the body. That was a quarter of the CPU time of a turn with a body of 1 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, and keep to their own ways
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, _KEPT)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


def leave_start_alone() -> None:
    """Have the garbage collector pass over all that there is by now: it is here to stay.

    To look through it again and again took 35 ms each time, for which all streams stood still.
    """
    gc.collect()
    gc.freeze()
