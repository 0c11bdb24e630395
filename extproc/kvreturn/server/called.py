"""A request in the fast lane: what the script in Envoy (envoy/lua/request.lua) tells of it, and what it is told."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvreturn._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import ProtocolConfiguration
from kvreturn.core.ports import Refuse
from kvreturn.core.splice import pieces
from kvreturn.server.messages import Headers, Message, joined
from kvreturn.server.request import Metadata, RequestSide

CALLED = ProtocolConfiguration(
    request_body_mode=ProcessingMode.BodySendMode.BUFFERED, response_body_mode=ProcessingMode.BodySendMode.STREAMED
)
"""How bodies come, as ext_proc would say it: a request's is whole, a response's comes bit by bit."""


@dataclass(frozen=True, slots=True)
class Go:
    """A request goes on.

    Attributes:
        headers: what changes in them.
        metadata: what Envoy is told.
        body: its new body; None if that stays as it is.
    """

    headers: Headers
    metadata: Metadata
    body: bytes | None = None


class CalledSide(RequestSide):
    """The request direction where a script calls: the body came whole, and all goes back in one answer.

    Args:
        limit: bytes of the largest body.

    Attributes:
        go: what becomes of the request, once that is known.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(CALLED, limit)
        self.go: Go | None = None

    def forward(self, body: bytes, headers: Headers, metadata: Metadata) -> list[Message]:
        """See `RequestSide.forward`."""
        self.go = Go(headers, metadata, body)
        return []


def read_head(head: bytes) -> dict[str, str]:
    """The request's headers.

    Args:
        head: `name:value` and a line end for each, as Envoy has them: no line end can be in either.

    Returns:
        Headers as `joined` has them. Bytes beyond ASCII as Latin-1.

    Raises:
        ValueError: it is no such text.
    """
    return joined(map(_header, head.decode("latin-1").split("\n")[:-1]))


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line[1:].partition(":")  # Envoy's own names begin with one
    if not colon:
        raise ValueError(f"{line[:40]!r} is no header")
    return line[:1] + name, value


def reply(told: Go | Refuse, body: bytes) -> bytes:
    """What the script is told.

    Args:
        told: what to do.
        body: the client's.

    Returns:
        Lines, an empty one, and bytes. The first line is `go` or `answer STATUS`. Those after it are
        `set NAME:VALUE` and `remove NAME` for headers, `meta KEY:VALUE`, and what makes the new body, in order:
        `keep FROM TO` for bytes of the old one, counted from 0, and `put SIZE` for so many of those behind the lines.
    """
    if isinstance(told, Refuse):
        headers = Headers(set={**told.headers, "content-type": told.content_type})
        return _lines([f"answer {told.status}", *_changes(headers)]) + told.body
    lines = ["go", *_changes(told.headers), *(f"meta {key}:{value}" for key, value in told.metadata)]
    if told.body is None or told.body == body:
        return _lines(lines)
    made = pieces(body, told.body) or [b""]
    lines += [f"put {len(p)}" if isinstance(p, bytes) else f"keep {p[0]} {p[1]}" for p in made]
    return _lines(lines) + b"".join(p for p in made if isinstance(p, bytes))


def _changes(headers: Headers) -> Iterable[str]:
    yield from (f"remove {name}" for name in headers.remove)
    yield from (f"set {name}:{value}" for name, value in headers.set.items())


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in [*lines, ""]).encode()
