"""ext_proc messages: reading Envoy's, building ours, the constant ones once.

Envoy's contract: headers carry their value in `raw_value` (older ones in `value`), only one of both may be set, and
`append_action` must be explicit, since its zero value appends (envoy#31555, #29424).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from google.protobuf import struct_pb2

from kvreturn._proto.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from kvreturn._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from kvreturn._proto.envoy.type.v3.http_status_pb2 import HttpStatus
from kvreturn.core.address import RANK_HEADER, split_address, split_seat
from kvreturn.core.ports import Refuse

# Envoy advises at most 64 KiB a message; the rest is for the message around the bytes.
CHUNK = 62_000
METADATA = "kvreturn"
DECODE_NODE = "decode_node"

Message = ProcessingResponse | bytes
"""An answer: a message, or one that is serialised already."""


@dataclass(slots=True)
class Headers:
    """Changes to headers: `set` replaces, `remove` removes."""

    set: dict[str, str] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)

    def mutation(self) -> HeaderMutation | None:
        """As a message; None if there is nothing to change."""
        if not self.set and not self.remove:
            return None
        return HeaderMutation(
            set_headers=[
                HeaderValueOption(
                    header=HeaderValue(key=k, raw_value=v.encode()),
                    append_action=HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
                )
                for k, v in self.set.items()
            ],
            remove_headers=self.remove,
        )


def read_headers(headers: HeaderMap) -> dict[str, str]:
    """Headers as `joined` has them. Bytes beyond ASCII as Latin-1."""
    return joined((h.key, h.raw_value.decode("latin-1") if h.raw_value else h.value) for h in headers.headers)


def joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Values by lower-case name; several of one name are joined by a comma."""
    out: dict[str, str] = {}
    for name, value in headers:
        key = name.lower()
        out[key] = f"{out[key]},{value}" if key in out else value
    return out


def read_attribute(message: ProcessingRequest, name: str) -> str | None:
    """A string attribute that the filter was configured to send (`request_attributes`, `response_attributes`)."""
    for attributes in message.attributes.values():
        value = attributes.fields.get(name)
        if value is not None and value.string_value:
            return str(value.string_value)
    return None


def read_metadata(message: ProcessingRequest, key: str) -> str | None:
    """A text of our namespace in Envoy's dynamic metadata, if the filter is configured to send it."""
    ours = message.metadata_context.filter_metadata.get(METADATA)
    return ours.fields[key].string_value or None if ours and key in ours.fields else None


def read_upstream(message: ProcessingRequest) -> str | None:
    """Address of the node that answered, if Envoy tells: it may be another one than ours, if that was down."""
    upstream = read_attribute(message, "upstream.address")
    try:
        split_address(upstream or "")
    except ValueError:
        return None
    return upstream


def headers_answer(*, response: bool, common: CommonResponse) -> ProcessingResponse:
    """The answer to request headers, or to response headers."""
    answer = HeadersResponse(response=common)
    return ProcessingResponse(response_headers=answer) if response else ProcessingResponse(request_headers=answer)


def body_answer(*, response: bool, common: CommonResponse) -> ProcessingResponse:
    """The answer to a body message."""
    answer = BodyResponse(response=common)
    return ProcessingResponse(response_body=answer) if response else ProcessingResponse(request_body=answer)


def replace(common: CommonResponse, body: bytes) -> None:
    """Replace a body message's bytes (all modes but full duplex).

    Args:
        common: of the answer, in its place there: a message that is put into another one is copied, with the body.
        body: the new bytes.
    """
    if body:
        common.body_mutation.body = body
    else:
        common.body_mutation.clear_body = True


def streamed(body: bytes, *, response: bool, end: bool) -> list[Message]:
    """Full duplex: these bytes as messages of at most CHUNK bytes, the last one ending the stream if `end`."""
    pieces = [body[i : i + CHUNK] for i in range(0, len(body), CHUNK)] or ([b""] if end else [])
    last = len(pieces) - 1
    return [
        body_answer(
            response=response,
            common=CommonResponse(
                body_mutation=BodyMutation(
                    streamed_response=StreamedBodyResponse(body=piece, end_of_stream=end and i == last)
                )
            ),
        )
        for i, piece in enumerate(pieces)
    ]


def echo(body: HttpBody, *, response: bool) -> list[Message]:
    """Full duplex: the same bytes again."""
    return streamed(body.body, response=response, end=body.end_of_stream)


def immediate(status: int, body: bytes, details: str, headers: Mapping[str, str]) -> ProcessingResponse:
    """Answer the client from here.

    Args:
        status: HTTP status.
        body: of the answer.
        details: a word for Envoy's access log.
        headers: of the answer.
    """
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=status),
            headers=Headers(set=dict(headers)).mutation(),
            body=body,
            details=f"kvreturn_{details}",
        )
    )


def refused_by(refusal: Refuse) -> ProcessingResponse:
    """The client gets a refusal."""
    headers = {**refusal.headers, "content-type": refusal.content_type}
    return immediate(refusal.status, refusal.body, refusal.why, headers)


def with_metadata(answer: ProcessingResponse, values: Iterable[tuple[str, str]]) -> ProcessingResponse:
    """Attach dynamic metadata, which Envoy's `override_host` policy reads, if there is any."""
    inner = struct_pb2.Struct()
    inner.update(dict(values))
    if inner.fields:
        answer.dynamic_metadata.fields[METADATA].struct_value.CopyFrom(inner)
    return answer


def towards(engine: str | None, changes: Headers, key: str = DECODE_NODE) -> list[tuple[str, str]]:
    """Send a request to an engine.

    Args:
        engine: its name in its pool; None to let Envoy choose.
        changes: to the request's headers; they get the engine's rank, if there are several behind its address.
        key: of the metadata.

    Returns:
        The metadata that names the node to Envoy.
    """
    if engine is None:
        return []
    address, rank = split_seat(engine)
    if rank is not None:
        changes.remove = [h for h in changes.remove if h != RANK_HEADER]
        changes.set[RANK_HEADER] = str(rank)
    return [(key, address)]


_SKIP_ALL = ProcessingMode(
    response_header_mode=ProcessingMode.HeaderSendMode.SKIP,
    request_body_mode=ProcessingMode.BodySendMode.NONE,
    response_body_mode=ProcessingMode.BodySendMode.NONE,
    request_trailer_mode=ProcessingMode.HeaderSendMode.SKIP,
    response_trailer_mode=ProcessingMode.HeaderSendMode.SKIP,
)


def leave(common: CommonResponse) -> ProcessingResponse:
    """The answer to request headers of an exchange that is none of our business from here on.

    Envoy takes the `mode_override` if the filter allows it, and ignores it otherwise; then all else is answered too.
    """
    return ProcessingResponse(request_headers=HeadersResponse(response=common), mode_override=_SKIP_ALL)


CONTINUE_REQUEST_HEADERS = headers_answer(response=False, common=CommonResponse()).SerializeToString()
CONTINUE_RESPONSE_HEADERS = headers_answer(response=True, common=CommonResponse()).SerializeToString()
CONTINUE_REQUEST_BODY = body_answer(response=False, common=CommonResponse()).SerializeToString()
CONTINUE_RESPONSE_BODY = body_answer(response=True, common=CommonResponse()).SerializeToString()
CONTINUE_REQUEST_TRAILERS = ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString()
CONTINUE_RESPONSE_TRAILERS = ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString()
_CLEAR = CommonResponse(body_mutation=BodyMutation(clear_body=True))
CLEAR_REQUEST_BODY = body_answer(response=False, common=_CLEAR).SerializeToString()
CLEAR_RESPONSE_BODY = body_answer(response=True, common=_CLEAR).SerializeToString()
