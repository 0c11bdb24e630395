"""The request direction of one exchange: which answer Envoy expects, and when, in each body mode.

Envoy's contract (external_processor.proto): STREAMED and BUFFERED want exactly one answer per message. In
FULL_DUPLEX_STREAMED answers are `streamed_response` only, in the order headers, body, trailers, and the headers may
wait for the body. Headers are changed, and the route is chosen, only in the headers answer; in BUFFERED also in the
body's.
"""

from collections.abc import Sequence

from kvreturn._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import CommonResponse, ProtocolConfiguration
from kvreturn.server.messages import (
    CLEAR_REQUEST_BODY,
    CONTINUE_REQUEST_HEADERS,
    CONTINUE_REQUEST_TRAILERS,
    Headers,
    Message,
    body_answer,
    headers_answer,
    replace,
    streamed,
    with_metadata,
)

Mode = ProcessingMode.BodySendMode
Metadata = Sequence[tuple[str, str]]


class TooLargeError(Exception):
    """The body is over the limit."""


class LateTrailersError(Exception):
    """Trailers ended a STREAMED body: its last message was answered already, so the body has no way on."""


class RequestSide:
    """Collects the body, then lets the rewritten one go.

    Args:
        config: Envoy's, from the first message.
        limit: bytes of the largest body.
    """

    def __init__(self, config: ProtocolConfiguration, limit: int) -> None:
        self.mode = config.request_body_mode
        self.complete = False
        self._limit = limit
        self._body: list[bytes] = []  # as it came: most are of one piece, and large ones not to be copied
        self._size = 0
        self._waits = self.mode == Mode.FULL_DUPLEX_STREAMED or (
            self.mode == Mode.STREAMED and config.send_body_without_waiting_for_header_response
        )
        self._owed = 0  # STREAMED: messages that are answered when the headers are
        self._trailers = False

    @property
    def readable(self) -> bool:
        """Whether Envoy sends the body at all."""
        return self.mode in {Mode.STREAMED, Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED}

    @property
    def routes_first(self) -> bool:
        """Whether the headers must go, and with them the choice of a node, before the body comes."""
        return self.mode == Mode.STREAMED and not self._waits

    def open(self, headers: Headers | None = None, metadata: Metadata = ()) -> list[Message]:
        """The answer to the headers, as far as it is due before the body; `headers` count only if `routes_first`."""
        if self.routes_first:
            return [routed(headers or Headers(), metadata)]
        return [CONTINUE_REQUEST_HEADERS] if self.mode == Mode.BUFFERED else []

    def add(self, data: bytes, *, end: bool) -> list[Message]:
        """Take a body message; what must be answered at once.

        Raises:
            TooLargeError: checked as it grows, not at the end.
        """
        if self.complete:
            # Envoy can send a second message with end_of_stream for bodies over about 1 MB (envoy#46237).
            return [] if self.mode == Mode.FULL_DUPLEX_STREAMED else [CLEAR_REQUEST_BODY]
        self._body.append(data)
        self._size += len(data)
        if self._size > self._limit:
            raise TooLargeError
        self.complete = end or self.mode == Mode.BUFFERED
        if self.mode == Mode.STREAMED and not self.complete:
            if self._waits:
                self._owed += 1
            else:
                return [CLEAR_REQUEST_BODY]
        return []

    def end_by_trailers(self) -> list[Message]:
        """Trailers came: the body is whole, if it was not before. What must be answered at once.

        Raises:
            LateTrailersError: in STREAMED mode.
        """
        if self.complete:
            return [CONTINUE_REQUEST_TRAILERS]
        if self.mode == Mode.STREAMED:
            raise LateTrailersError
        self.complete = self._trailers = True
        return []

    def take(self) -> bytes:
        """The whole body. It is not kept here any longer."""
        body, self._body = self._body, []
        return body[0] if len(body) == 1 else b"".join(body)

    def forward(self, body: bytes, headers: Headers, metadata: Metadata) -> list[Message]:
        """Let the rewritten body go."""
        if self.mode == Mode.BUFFERED:
            # Envoy checks it in this mode, and removes it in the others (envoy#29536).
            headers.set["content-length"] = str(len(body))
            common = CommonResponse(header_mutation=headers.mutation(), clear_route_cache=True)
            answer = body_answer(response=False, common=common)
            replace(answer.request_body.response, body)
            return [with_metadata(answer, metadata)]
        answers: list[Message] = [] if self.routes_first else [routed(headers, metadata)]
        if self.mode == Mode.FULL_DUPLEX_STREAMED:
            answers += streamed(body, response=False, end=not self._trailers)
            return [*answers, CONTINUE_REQUEST_TRAILERS] if self._trailers else answers
        last = body_answer(response=False, common=CommonResponse())
        replace(last.request_body.response, body)
        return [*answers, *[CLEAR_REQUEST_BODY] * self._owed, last]


def routed(headers: Headers, metadata: Metadata) -> Message:
    """The answer to request headers that changes them and names the node."""
    common = CommonResponse(header_mutation=headers.mutation(), clear_route_cache=True)
    return with_metadata(headers_answer(response=False, common=common), metadata)
