"""What the fast lane's script kept of an answer (kvreturn/envoy/lua/kept.lua), as it came."""

import re

_RECORD = re.compile(rb"raw (\d+)\n|run (\d+) (\d+) (\d+)\n")


def unpack(packed: bytes) -> bytes:
    """All bytes of the pieces, in order.

    Args:
        packed: records one after another. Either `raw SIZE`, a line end and the bytes. Or `run HEAD TAIL SIZE`, a line
            end, how each piece begins, how each ends, and their middles with line ends between them.

    Raises:
        ValueError: it is no such text.
    """
    out, at = [], 0
    while at < len(packed):
        record = _RECORD.match(packed, at)
        if not record:
            raise ValueError(f"no record at byte {at}")
        raw, *run = (int(size or 0) for size in record.groups())
        begin = record.end()
        at = begin + raw + sum(run)
        if at > len(packed):
            raise ValueError(f"the record at byte {record.start()} is cut off")
        if record[1]:
            out.append(packed[begin:at])
        else:
            head, tail = packed[begin : begin + run[0]], packed[begin + run[0] : begin + run[0] + run[1]]
            middles = packed[begin + run[0] + run[1] : at].split(b"\n")
            out.append(head + (tail + head).join(middles) + tail)
    return b"".join(out)
