"""ext_proc messages as Envoy sends them, and the HTTP requests and responses that they are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvreturn._proto.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from kvreturn._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb

Mode = ProcessingMode.BodySendMode
Kind = Literal["request", "response"]
Headers = Mapping[str, str]


@dataclass(frozen=True)
class Modes:
    """How the filter is configured. `early` is `send_body_without_waiting_for_header_response`."""

    request: "ProcessingMode.BodySendMode" = Mode.BUFFERED
    response: "ProcessingMode.BodySendMode" = Mode.STREAMED
    early: bool = False
    trailers: bool = True

    @property
    def duplex(self) -> bool:
        return Mode.FULL_DUPLEX_STREAMED in {self.request, self.response}

    def __str__(self) -> str:
        names = {Mode.STREAMED: "streamed", Mode.FULL_DUPLEX_STREAMED: "duplex", Mode.BUFFERED: "buffered"}
        return f"{names[self.request]}{'-early' if self.early else ''}-{names[self.response]}"

    def config(self) -> pb.ProtocolConfiguration:
        return pb.ProtocolConfiguration(
            request_body_mode=self.request,
            response_body_mode=self.response,
            send_body_without_waiting_for_header_response=self.early,
        )


REQUEST_MODES = (
    (Mode.BUFFERED, False),
    (Mode.STREAMED, False),
    (Mode.STREAMED, True),
    (Mode.FULL_DUPLEX_STREAMED, False),
)
ALL_MODES = [
    Modes(request, response, early)
    for request, early in REQUEST_MODES
    for response in (Mode.STREAMED, Mode.FULL_DUPLEX_STREAMED)
]


@dataclass(frozen=True)
class Request:
    """A client's request; without `pieces` it has no body."""

    path: str = "/v1/chat/completions"
    pieces: Sequence[bytes] = ()
    method: str = "POST"
    headers: Headers = field(default_factory=lambda: {"content-type": "application/json"})
    trailers: bool = False


@dataclass(frozen=True)
class Response:
    """A node's response; without `pieces` it has no body."""

    pieces: Sequence[bytes] = ()
    status: int = 200
    headers: Headers = field(default_factory=lambda: {"content-type": "text/event-stream; charset=utf-8"})
    trailers: bool = False
    node: str | None = None  # attribute `upstream.address`


def header_map(headers: Headers) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode("latin-1")) for k, v in headers.items()])


def headers_message(
    kind: Kind, headers: Headers, *, end: bool = False, modes: Modes | None = None, node: str | None = None
) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    inner = message.request_headers if kind == "request" else message.response_headers
    inner.CopyFrom(pb.HttpHeaders(headers=header_map(headers), end_of_stream=end))
    if modes:
        message.protocol_config.CopyFrom(modes.config())
    if node:
        message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": node})
    return message


def body_message(kind: Kind, data: bytes, *, end: bool = False) -> pb.ProcessingRequest:
    body = pb.HttpBody(body=data, end_of_stream=end)
    return pb.ProcessingRequest(request_body=body) if kind == "request" else pb.ProcessingRequest(response_body=body)


def trailers_message(kind: Kind) -> pb.ProcessingRequest:
    trailers = pb.HttpTrailers(trailers=header_map({"x-checksum": "1"}))
    if kind == "request":
        return pb.ProcessingRequest(request_trailers=trailers)
    return pb.ProcessingRequest(response_trailers=trailers)


def request_headers(
    request: Request | None = None, *, modes: Modes | None = None, **headers: str
) -> pb.ProcessingRequest:
    """The first message of a stream. Names of `headers` have underscores for hyphens."""
    request = request or Request(pieces=[b"{}"])
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    pseudo = {":method": request.method, ":path": request.path, ":scheme": "http", ":authority": "llm.example"}
    return headers_message(
        "request", {**pseudo, **request.headers, **named}, end=not request.pieces, modes=modes or Modes()
    )
