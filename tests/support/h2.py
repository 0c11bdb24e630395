"""An HTTP/2 client of few words: one request with prior knowledge (RFC 9113), with trailers if wanted."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from kvreturn.core.address import split_address

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _GOAWAY, _WINDOW = 0, 1, 3, 4, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_FRAME = 16_384  # bytes, the largest that a peer must take
_WIDE = (1 << 31) - 1
# HPACK's static table (RFC 7541, appendix A) has these; what a peer says of any other status is not needed here.
_STATUS = {0x88: 200, 0x89: 204, 0x8A: 206, 0x8B: 304, 0x8C: 400, 0x8D: 404, 0x8E: 500}


@dataclass
class H2Answer:
    """What came back.

    Attributes:
        status: 0 for one that is not in HPACK's static table.
        body: of the answer.
        blocks: number of header blocks, 2 if trailers came.
    """

    status: int = 0
    body: bytes = b""
    blocks: int = 0


async def h2_request(
    address: str, headers: Mapping[str, str], body: bytes, trailers: Mapping[str, str] | None = None
) -> H2Answer:
    """Send a request, pseudo headers included, and take the answer.

    Raises:
        ConnectionError: the peer reset the stream, or hung up before the end.
    """
    reader, writer = await asyncio.open_connection(*split_address(address))
    try:
        # SETTINGS: an initial window for all that may come (id 4), and the same for the connection.
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, b"\0\4" + _WIDE.to_bytes(4)))
        writer.write(_frame(_WINDOW, 0, 0, (_WIDE - 65_535).to_bytes(4)))
        writer.write(_frame(_HEADERS, _END_HEADERS, 1, _block(headers)))
        # No more than the first window, 65,535 bytes: a client that sends more must wait for the peer's leave.
        assert len(body) < 1 << 16
        pieces = [body[i : i + _FRAME] for i in range(0, len(body), _FRAME)]
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1 and trailers is None
            writer.write(_frame(_DATA, _END_STREAM if last else 0, 1, piece))
        if trailers is not None:
            writer.write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, 1, _block(trailers)))
        return await _answer(reader, writer)
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> H2Answer:
    answer = H2Answer()
    while True:
        try:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3]))
        except asyncio.IncompleteReadError:
            raise ConnectionError("the peer hung up") from None
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:])
        if kind in {_RST, _GOAWAY}:
            raise ConnectionError(f"frame {kind}: {payload!r}")
        if kind == _SETTINGS and not flags & _ACK:
            writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        if stream != 1:
            continue
        if kind == _HEADERS:
            answer.blocks += 1
            if answer.blocks == 1:
                answer.status = _STATUS.get(next(b for b in payload if b & 0xE0 != 0x20), 0)
        if kind == _DATA:
            answer.body += payload
        if kind in {_HEADERS, _DATA} and flags & _END_STREAM:
            return answer


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def _block(headers: Mapping[str, str]) -> bytes:
    """Literal fields without indexing and without Huffman coding (RFC 7541, 6.2.2)."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())


def _text(text: str) -> bytes:
    raw = text.encode()
    assert len(raw) < 127
    return bytes([len(raw)]) + raw
