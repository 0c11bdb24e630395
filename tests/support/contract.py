"""Envoy's contract for ext_proc answers, one direction at a time.

What Envoy would call spurious (it then fails the exchange), reject, ignore silently or lose is a `ContractError`.
"""

from collections import deque
from dataclasses import dataclass, field

from kvreturn._proto.envoy.config.core.v3.base_pb2 import HeaderValueOption
from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from support.messages import Headers, Kind, Mode, Modes

LARGEST_CHUNK = 64 << 10
LARGEST_HEADER = 16 << 10


class ContractError(AssertionError):
    """The server broke Envoy's contract."""


@dataclass
class Passed:
    """What has gone on in one direction.

    Attributes:
        headers: None as long as they have not.
        pieces: of the body, as they went.
        ended: whether the end of the stream went on.
        trailers: whether it was trailers that ended it.
        node: what the metadata `kvreturn`/`decode_node` (or `prefill_node`) said when the headers went.
        bypassed: whether bytes went on that the server did not vouch for, because it had closed the stream.
    """

    headers: dict[str, str] | None = None
    pieces: list[bytes] = field(default_factory=list)
    ended: bool = False
    trailers: bool = False
    node: str | None = None
    bypassed: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def status(self) -> int:
        return int((self.headers or {}).get(":status", "0"))


def check_mutation(mutation: pb.HeaderMutation, *, immediate: bool = False) -> None:
    """What Envoy accepts of header mutations, with its default mutation rules."""
    for option in mutation.set_headers:
        key, header = option.header.key, option.header
        if header.value or not header.raw_value:
            raise ContractError(f"{key}: only raw_value may be set, and it must not be empty")
        if option.append_action != HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD:
            raise ContractError(f"{key}: append_action {option.append_action} adds a second value")
        if len(header.raw_value) > LARGEST_HEADER or any(b in b"\r\n\0" for b in header.raw_value):
            raise ContractError(f"{key}: no valid header value")
    for name in [*(o.header.key for o in mutation.set_headers), *mutation.remove_headers]:
        if name != name.lower():
            raise ContractError(f"{name}: header names are lower case")
        if not immediate and (name in {"host", ":authority", ":scheme", ":method"} or name.startswith("x-envoy-")):
            raise ContractError(f"{name} may not be changed")
    if any(name.startswith(":") for name in mutation.remove_headers):
        raise ContractError("pseudo headers may not be removed")


class Side:
    """One direction of an exchange: what was sent to the server, what it owes, what has gone on."""

    def __init__(self, kind: Kind, modes: Modes) -> None:
        self.kind = kind
        self.mode = modes.request if kind == "request" else modes.response
        self.passed = Passed()
        self._duplex = modes.duplex
        self._headers: dict[str, str] = {}
        self._node: str | None = None
        self._headers_due = False
        self._trailers_due = False
        self._chunks: deque[tuple[bytes, bool]] = deque()  # not answered yet; not used in full duplex
        self._sent_end = False
        self._whole = False  # nothing more comes

    @property
    def headers_due(self) -> bool:
        return self._headers_due

    @property
    def settled(self) -> bool:
        """Whether everything that was sent so far was answered, as far as that can be told."""
        if self.mode == Mode.FULL_DUPLEX_STREAMED and self._whole and not self.passed.ended:
            return False
        return not (self._headers_due or self._trailers_due or self._chunks)

    # --- to the server ---

    def headers_sent(self, headers: Headers, *, end: bool) -> None:
        self._headers, self._headers_due, self._whole = dict(headers), True, end

    def body_sent(self, data: bytes, *, end: bool) -> None:
        self._whole |= end
        self._sent_end |= end
        if self.mode != Mode.FULL_DUPLEX_STREAMED:
            self._chunks.append((data, end))

    def trailers_sent(self) -> None:
        self._whole = self._trailers_due = True

    # --- from the server ---

    def headers_answer(self, answer: pb.HeadersResponse, message: pb.ProcessingResponse) -> None:
        if not self._headers_due:
            raise ContractError(f"spurious answer to {self.kind} headers")
        common = answer.response
        if common.status != pb.CommonResponse.CONTINUE or common.HasField("body_mutation"):
            raise ContractError("a headers answer that replaces the message")
        if self.kind == "response" and common.clear_route_cache:
            raise ContractError("clear_route_cache on a response")
        if message.HasField("mode_override") and self._duplex:
            raise ContractError("mode_override with FULL_DUPLEX_STREAMED (envoy#40340)")
        self._note_metadata(message)
        self._mutate(common.header_mutation)
        self._headers_due = False
        if self.mode != Mode.BUFFERED or self._whole:
            self._pass_headers()
        if self._whole and not (self._sent_end or self._trailers_due):
            self.passed.ended = True

    def body_answer(self, answer: pb.BodyResponse, message: pb.ProcessingResponse) -> None:
        common = answer.response
        if self._headers_due:
            raise ContractError(f"an answer to a {self.kind} body before that to its headers")
        if message.HasField("mode_override"):
            raise ContractError("mode_override in a body answer")
        if self.mode == Mode.FULL_DUPLEX_STREAMED:
            self._streamed(common)
            return
        if not self._chunks:
            raise ContractError(f"spurious answer to a {self.kind} body: each message has exactly one")
        if common.body_mutation.WhichOneof("mutation") == "streamed_response":
            raise ContractError("streamed_response is for FULL_DUPLEX_STREAMED only")
        data, end = self._chunks.popleft()
        if common.HasField("body_mutation"):
            data = b"" if common.body_mutation.clear_body else common.body_mutation.body
        if self.mode == Mode.BUFFERED:
            self._note_metadata(message)
            self._mutate(common.header_mutation)
            length = self._headers.get("content-length")
            if length is not None and int(length) != len(data):
                raise ContractError(f"content-length {length} for a body of {len(data)} bytes")
            self._pass_headers()
        elif common.HasField("header_mutation") or common.clear_route_cache or message.HasField("dynamic_metadata"):
            raise ContractError("headers, metadata and routes are settled before a STREAMED body (envoy#43708)")
        self._pass(data, end=end)

    def trailers_answer(self, answer: pb.TrailersResponse) -> None:
        if not self._trailers_due or self._headers_due or self._chunks:
            raise ContractError(f"spurious answer to {self.kind} trailers")
        check_mutation(answer.header_mutation)
        self._trailers_due = False
        self.passed.ended = self.passed.trailers = True

    def closed(self) -> None:
        """The server ended the stream with OK: Envoy goes on without it."""
        if self.mode == Mode.FULL_DUPLEX_STREAMED and self._headers and not self.passed.ended:
            raise ContractError(f"the stream was closed in a full duplex {self.kind}: bytes are lost")
        if self._headers and self.passed.headers is None:
            self._pass_headers()
        while self._chunks:
            data, end = self._chunks.popleft()
            self.passed.bypassed = True
            self._pass(data, end=end)
        self._headers_due = self._trailers_due = False

    def go_past(self, data: bytes, *, end: bool) -> None:
        """Bytes that the server never sees."""
        self.passed.bypassed |= bool(data)
        self._pass(data, end=end)

    def _streamed(self, common: pb.CommonResponse) -> None:
        streamed = common.body_mutation.streamed_response
        if common.body_mutation.WhichOneof("mutation") != "streamed_response":
            raise ContractError("full duplex answers are streamed_response only")
        if common.HasField("header_mutation") or common.clear_route_cache:
            raise ContractError("headers and routes are settled before the body")
        if len(streamed.body) > LARGEST_CHUNK:
            raise ContractError(f"an answer of {len(streamed.body)} bytes")
        if self.passed.ended:
            raise ContractError("an answer after the end of the stream")
        if streamed.end_of_stream and not self._sent_end:
            raise ContractError("end_of_stream was answered where none was received")
        if self._headers == {}:
            raise ContractError(f"an answer to a {self.kind} that never began")
        self._pass(streamed.body, end=streamed.end_of_stream)

    def _note_metadata(self, message: pb.ProcessingResponse) -> None:
        if message.HasField("dynamic_metadata"):
            if set(message.dynamic_metadata.fields) != {"kvreturn"}:
                raise ContractError("metadata outside of the namespace that the filter may receive")
            fields = message.dynamic_metadata.fields["kvreturn"].struct_value.fields
            unread = set(fields) - {"decode_node", "prefill_node", "turn", "router", "early"}
            if unread:
                raise ContractError(f"no Envoy of ours reads the metadata {unread}")
            for key in {"decode_node", "prefill_node"} & set(fields):
                self._node = fields[key].string_value

    def _mutate(self, mutation: pb.HeaderMutation) -> None:
        check_mutation(mutation)
        for name in mutation.remove_headers:
            self._headers.pop(name, None)
        for option in mutation.set_headers:
            if option.header.key == "content-length" and self.mode != Mode.BUFFERED:
                raise ContractError("content-length is Envoy's own business outside of BUFFERED (envoy#29536)")
            self._headers[option.header.key] = option.header.raw_value.decode("latin-1")

    def _pass_headers(self) -> None:
        if self.mode in {Mode.STREAMED, Mode.FULL_DUPLEX_STREAMED}:
            self._headers.pop("content-length", None)
        self.passed.headers, self.passed.node = self._headers, self._node

    def _pass(self, data: bytes, *, end: bool) -> None:
        if data:
            self.passed.pieces.append(data)
        self.passed.ended |= end
