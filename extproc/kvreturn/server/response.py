"""The response direction of one exchange: D's bytes through a capture, in each body mode."""

import zlib

from kvreturn._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import CommonResponse, HttpBody
from kvreturn.core.capture import Capture
from kvreturn.server.messages import (
    CLEAR_RESPONSE_BODY,
    CONTINUE_RESPONSE_BODY,
    CONTINUE_RESPONSE_TRAILERS,
    Headers,
    Message,
    body_answer,
    replace,
    streamed,
)

Mode = ProcessingMode.BodySendMode
_MEMBERS = 64  # gzip members in one message: a server writes one, and each costs time whatever is in it
_GZIP_OR_ZLIB = 47  # zlib's window bits for "tell by the header"


class UnreadableEncodingError(Exception):
    """A response in a content encoding that cannot be looked into, although none was asked for."""


class Inflater:
    """An incremental decoder for gzip and zlib, also for several gzip members in a row (RFC 1952, 2.2).

    Args:
        limit: bytes that one call may give. A thousandfold of what goes in is possible.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inflate = zlib.decompressobj(_GZIP_OR_ZLIB)

    def decode(self, data: bytes) -> bytes:
        """Take encoded bytes, return decoded ones.

        Raises:
            zlib.error: they are not what they are said to be, or a bomb.
        """
        out = self._inflate.decompress(data, self._limit + 1)
        for _ in range(_MEMBERS):
            if len(out) > self._limit:
                break
            if not self._inflate.unused_data:
                return out
            data, self._inflate = self._inflate.unused_data, zlib.decompressobj(_GZIP_OR_ZLIB)
            out += self._inflate.decompress(data, self._limit + 1 - len(out))
        raise zlib.error(f"more than {self._limit} bytes, or than {_MEMBERS} members, in one message")


def content_decoder(encoding: str, limit: int) -> Inflater | None:
    """A decoder for a `content-encoding`, None for plain bytes.

    Args:
        encoding: value of the header.
        limit: as for `Inflater`.

    Raises:
        UnreadableEncodingError: an encoding we cannot read.
    """
    if encoding in {"", "identity"}:
        return None
    if encoding in {"gzip", "x-gzip", "deflate"}:
        return Inflater(limit)
    raise UnreadableEncodingError(encoding)


class ResponseSide:
    """Passes a response through a capture.

    Args:
        mode: Envoy's body mode for responses.
        capture: what looks at it.
        decoder: undoes its content encoding; the client then gets plain bytes.
    """

    def __init__(self, mode: "ProcessingMode.BodySendMode", capture: Capture, decoder: Inflater | None) -> None:
        self.capture = capture
        self._decoder = decoder
        self._ended = False
        self._duplex = mode == Mode.FULL_DUPLEX_STREAMED
        self._buffered = mode == Mode.BUFFERED

    def body(self, message: HttpBody) -> list[Message]:
        """Take a body message, give its answer."""
        if self._ended:
            return [] if self._duplex else [CLEAR_RESPONSE_BODY]
        data = message.body
        out = self.capture.decode(self._decoder.decode(data) if self._decoder else data)
        if message.end_of_stream or self._buffered:
            out += self._finish()
        if self._duplex:
            return streamed(out, response=True, end=message.end_of_stream)
        if out == data:
            return [CONTINUE_RESPONSE_BODY]
        answer = body_answer(response=True, common=CommonResponse())
        common = answer.response_body.response
        replace(common, out)
        if self._buffered:
            mutation = Headers(set={"content-length": str(len(out))}).mutation()
            assert mutation
            common.header_mutation.CopyFrom(mutation)
        return [answer]

    def trailers(self) -> list[Message]:
        """Trailers end the body. In STREAMED mode there is no message left that could carry what was held back.

        The captures hold back as little as they can for that reason.
        """
        rest = b"" if self._ended else self._finish()
        answers = streamed(rest, response=True, end=False) if self._duplex else []
        return [*answers, CONTINUE_RESPONSE_TRAILERS]

    def _finish(self) -> bytes:
        self._ended = True
        return self.capture.flush()
