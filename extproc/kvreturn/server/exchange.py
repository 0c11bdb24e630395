"""One HTTP exchange, as one ext_proc stream sees it: Envoy's messages in, our answers out."""

import asyncio
import logging
import re
from collections.abc import Callable
from functools import partial

from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProtocolConfiguration,
)
from kvreturn.core.api import API, Responses
from kvreturn.core.capture import BodyCapture, Capture, open_capture
from kvreturn.core.identity import find_session
from kvreturn.core.ports import Refuse
from kvreturn.core.refusal import strip_refusal
from kvreturn.core.scrub import foreign_headers
from kvreturn.core.turn import Turn
from kvreturn.server.drive import drive, scrub
from kvreturn.server.intake import SETUP, is_read, refused, stored_response, turn_api
from kvreturn.server.messages import (
    CONTINUE_REQUEST_BODY,
    CONTINUE_REQUEST_TRAILERS,
    CONTINUE_RESPONSE_BODY,
    CONTINUE_RESPONSE_HEADERS,
    CONTINUE_RESPONSE_TRAILERS,
    Headers,
    Message,
    echo,
    headers_answer,
    leave,
    read_headers,
    read_upstream,
    refused_by,
    towards,
)
from kvreturn.server.record import PREFILL_HEADERS, TurnRecord
from kvreturn.server.request import LateTrailersError, Metadata, Mode, RequestSide, TooLargeError, routed
from kvreturn.server.response import ResponseSide, UnreadableEncodingError, content_decoder
from kvreturn.server.world import ForeignError, World

log = logging.getLogger("kvreturn")

_OK, _ERRORS = 200, 400
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Exchange:
    """Handles the messages of one stream, in order.

    Args:
        world: what all exchanges share.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._limits = world.settings.limits  # until its end, whatever is reloaded meanwhile
        self._config = ProtocolConfiguration()
        self._headers: dict[str, str] = {}
        self._request: RequestSide | None = None  # None: this exchange's request is none of our business
        self._response: ResponseSide | None = None
        self._turn: Turn | None = None
        self._record: TurnRecord | None = None
        self._entered = False  # whether the turn counts as a live one
        self._api: API = Responses()  # reads the response, and gives our own errors their shape
        self._looks = False  # whether the response can have a handle in it: it is a turn's, or a stored one
        self._stored: str | None = None  # the stored response that the client asks for
        self._keeper: str | None = None  # the node that keeps this turn's response, until that is remembered
        self._route: str | None = None
        self._forwarded = False
        self._opened = False
        # Nothing more is to be answered. Closed with OK, Envoy goes on without us, also should we die meanwhile.
        self.over = False

    async def handle(self, message: ProcessingRequest) -> list[Message]:
        """Answer one message."""
        kind = message.WhichOneof("request")
        if kind and not self._opened:
            self._opened = True
            self._config = message.protocol_config
            # A response may come first: another filter's refusal, which ours sees too (Envoy before 1.34).
            if kind not in {"request_headers", "response_headers"}:
                return self._refuse_setup()
        if kind == "response_body":
            return await self._response_body(message.response_body)
        if kind == "request_headers":
            return await self._request_headers(message.request_headers)
        if kind == "request_body":
            return await self._request_body(message.request_body)
        if kind == "request_trailers":
            return await self._request_trailers()
        if kind == "response_headers":
            return await self._response_headers(message)
        if kind == "response_trailers":
            return await self._response_trailers()
        return []  # a kind that is newer than our protos asks for no answer that we could give

    def fail(self) -> list[Message]:
        """The answer where `handle` raised. There is none any more once `answering`."""
        return self._refuse(500, "kvreturn: internal error", "InternalServerError", "internal")

    def took(self, seconds: float) -> None:
        """A message was under way here for so long."""
        if self._record:
            self._record.took(seconds)

    def close(self) -> None:
        """The stream has ended, for whatever reason."""
        if self._route:
            self._world.decode.finished(self._route, 1)
            self._route = None
        if self._entered and self._turn:
            self._world.admission.leave(self._turn.tenant)
        if self._response:
            self._response.capture.collect()
        if self._record:
            self._record.close()

    @property
    def answering(self) -> bool:
        """Whether bytes of D's answer may have gone on, so that another answer is impossible."""
        return self._response is not None

    # --- request ---

    async def _request_headers(self, message: HttpHeaders) -> list[Message]:
        self._headers = read_headers(message.headers)
        return await self._request_begins(end=message.end_of_stream)

    async def _request_begins(self, *, end: bool) -> list[Message]:
        """The request's headers are here; `end` if it has no body."""
        api = turn_api(self._headers)
        self._stored = None if api else stored_response(self._headers)
        changes = Headers(remove=foreign_headers(self._headers))
        bodiless = end or not is_read(self._headers)
        if bodiless and self._stored is None:
            return self._leave(changes)
        self._looks = (api or self._stored) is not None
        request = None
        if not bodiless:
            request = self._request = self._side()
            if not request.readable or (self._looks and self._config.response_body_mode == Mode.NONE):
                return self._refuse_setup()
            if api:
                self._begin(api)
        refusal = self._refusal()
        if refusal:
            return self._answer(refusal)
        if request and not request.routes_first:
            return request.open()
        go = request.open if request else self._let_go
        return await self._routed(lambda node: go(self._outward(changes), self._metadata(changes, node)))

    def _side(self) -> RequestSide:
        return RequestSide(self._config, self._limits.request_bytes)

    def _let_go(self, headers: Headers, metadata: Metadata) -> list[Message]:
        """A request whose body is not read goes on."""
        return [routed(headers, metadata)]

    def _refusal(self) -> Refuse | None:
        """Why a request is refused for its headers, or for the turns that there are already."""
        refusal = refused(self._headers, self._world.settings, self._api.error, ours=self._looks)
        if self._turn and not refusal:
            refusal = self._world.admission.enter(self._turn.tenant, self._api)
            self._entered = refusal is None
        return refusal

    def _leave(self, changes: Headers) -> list[Message]:
        """Let an exchange pass that is none of our business."""
        common = CommonResponse(header_mutation=changes.mutation())
        if self._duplex:
            # A `mode_override` is ignored here, and must not be sent (envoy#40340): bodies are echoed.
            return [headers_answer(response=False, common=common)]
        self.over = True
        return [leave(common)]

    @property
    def _duplex(self) -> bool:
        """Whether Envoy waits for our answers to every byte of a direction, so that the stream must stay open."""
        return Mode.FULL_DUPLEX_STREAMED in {self._config.request_body_mode, self._config.response_body_mode}

    def _begin(self, api: API) -> None:
        world = self._world
        self._api = api
        session = partial(find_session, self._headers, own=world.settings.session_header)
        self._turn = Turn(api, world.scope(self._headers), world.policy, world.judge, session)
        self._record = TurnRecord(world, self._turn, self._headers)

    def _refuse_setup(self) -> list[Message]:
        log.error(SETUP)
        return self._refuse(500, SETUP, "InternalServerError", "setup")

    async def _request_body(self, message: HttpBody) -> list[Message]:
        request = self._request
        if request is None:
            duplex = self._config.request_body_mode == Mode.FULL_DUPLEX_STREAMED
            return echo(message, response=False) if duplex else [CONTINUE_REQUEST_BODY]
        try:
            answers = request.add(message.body, end=message.end_of_stream)
        except TooLargeError:
            text = f"kvreturn: the request body is over {self._limits.request_bytes} bytes (limits.request_bytes)"
            return self._refuse(413, text, "RequestEntityTooLarge", "too_large")
        return [*answers, *await self._proceed(request)]

    async def _request_trailers(self) -> list[Message]:
        request = self._request
        if request is None:
            return [CONTINUE_REQUEST_TRAILERS]
        try:
            answers = request.end_by_trailers()
        except LateTrailersError:
            text = "kvreturn: requests with trailers need request_body_mode BUFFERED or FULL_DUPLEX_STREAMED"
            return self._refuse(400, text, "BadRequestError", "trailers")
        return [*answers, *await self._proceed(request)]

    async def _proceed(self, request: RequestSide) -> list[Message]:
        """Once the body is whole: decide, and let it go."""
        if not request.complete or self._forwarded:
            return []
        self._forwarded = True
        if self._turn and self._record:
            headers = {h: self._headers[h] for h in PREFILL_HEADERS if h in self._headers}
            decision = await drive(self._turn, request.take(), self._world, self._record, headers)
        else:
            decision = await scrub(request.take(), self._headers)
        if isinstance(decision, Refuse):
            return self._answer(decision)
        changes = self._outward(Headers(remove=foreign_headers(self._headers)))
        if self._record:
            self._record.forwarded()
        elif not self._looks:
            self.over = not self._duplex
        body, prefer, slack = decision.body, decision.decode_node, decision.slack
        named = partial(self._metadata, changes, slack=slack)
        return await self._routed(lambda node: request.forward(body, changes, named(prefer or node)))

    async def _routed(self, go: Callable[[str | None], list[Message]]) -> list[Message]:
        """Go to the decode node that has what the request needs: a response, or a prompt that begins with one."""
        prompt = self._turn.prompt if self._turn else None
        name = prompt.stored if prompt else self._stored
        try:
            return go(await self._world.owner(self._world.scope(self._headers), name) if name else None)
        except ForeignError:
            return self._refuse(404, "kvreturn: there is no response of this id", "NotFoundError", "foreign")

    def _outward(self, changes: Headers) -> Headers:
        """What changes in the headers of a request whose response we look at."""
        if self._looks:
            changes.set["x-request-id"] = self._record.request if self._record else self._world.new_id()
            if self._record:
                changes.set.update(self._record.trace.decode())
            # A compressed answer could not be looked into.
            changes.remove.append("accept-encoding")
        return changes

    def _metadata(self, changes: Headers, prefer: str | None, slack: int | None = None) -> list[tuple[str, str]]:
        """Choose the decode node, and tell Envoy."""
        if not self._looks:
            return []
        if self._route is None:
            self._route = self._world.decode.choose(prefer, slack=slack)
            if self._route:
                self._world.decode.started(self._route, 1)
        return towards(self._route, changes)

    def _refuse(self, status: int, text: str, kind: str, details: str) -> list[Message]:
        return self._answer(Refuse(status, self._api.error(text, kind, status), why=details))

    def _answer(self, refusal: Refuse) -> list[Message]:
        self.over = True
        self._world.metrics.refused.labels(refusal.why).inc()
        if self._record:
            self._record.refused(refusal.status)
        return self._say(refusal)

    def _say(self, refusal: Refuse) -> list[Message]:
        return [refused_by(refusal)]

    # --- response ---

    async def _response_headers(self, message: ProcessingRequest) -> list[Message]:
        if not self._looks:
            return [CONTINUE_RESPONSE_HEADERS]
        changes = self._response_begins(read_headers(message.response_headers.headers), read_upstream(message))
        if isinstance(changes, Refuse):
            return self._answer(changes)
        if message.response_headers.end_of_stream:
            await self._settle(end=True)
        return [headers_answer(response=True, common=CommonResponse(header_mutation=changes.mutation()))]

    def _response_begins(self, headers: dict[str, str], upstream: str | None) -> Headers | Refuse:
        """The response's headers are here.

        Args:
            headers: what they are.
            upstream: the node that answered, if Envoy tells.

        Returns:
            What changes in them, or what the client gets instead.
        """
        status, node = int(headers.get(":status", "0") or 0), upstream or self._route
        if self._record:
            self._record.responded(status, node, headers.get("content-type", "").lower())
            self._keeper = node if self._record.kept and status == _OK else None
        changes = Headers(remove=foreign_headers(headers))
        try:
            decoder = content_decoder(headers.get("content-encoding", "").strip().lower(), self._limits.response_bytes)
        except UnreadableEncodingError as e:
            text = f"kvreturn: the decode node answered with content-encoding {e}, although none was accepted"
            log.warning(text)
            return Refuse(502, self._api.error(text, "BadGateway", 502), why="encoding")
        if decoder:
            changes.remove.append("content-encoding")
        if "x-request-id" in headers and self._request_id:
            changes.set["x-request-id"] = self._request_id
        capture = self._capture(headers.get("content-type", "").lower(), status)
        self._response = ResponseSide(self._config.response_body_mode, capture, decoder)
        return changes

    @property
    def _request_id(self) -> str | None:
        """The client's own id for its request, which the node did not get, if it may be in an answer."""
        mine = self._headers.get("x-request-id", "")
        return mine if _REQUEST_ID.fullmatch(mine) else None

    def _capture(self, content_type: str, status: int) -> Capture:
        answer = self._turn.answer if self._turn else self._api.answer()
        if status >= _ERRORS:
            rewrite = partial(strip_refusal, api=self._api, status=status)
            return BodyCapture(answer, self._limits.response_bytes, rewrite=rewrite)
        return open_capture(
            content_type,
            answer,
            event_bytes=self._limits.event_bytes,
            response_bytes=self._limits.response_bytes,
            ids=self._turn.ids_in_answer if self._turn else None,
        )

    async def _response_body(self, message: HttpBody) -> list[Message]:
        response = self._response
        if response is None and self._looks:
            return self._refuse_setup()  # its headers were not sent, so that nobody can tell how to read it
        if response is None:
            duplex = self._config.response_body_mode == Mode.FULL_DUPLEX_STREAMED
            return echo(message, response=True) if duplex else [CONTINUE_RESPONSE_BODY]
        answers = response.body(message)
        if self._record:
            self._record.body(message.body)
        # Stored before the client sees the event that ends its turn: it cannot ask again earlier. Both calls at once.
        calls = [self._remember(self._keeper, response)] if self._keeper else []
        if response.capture.handle or message.end_of_stream:
            calls.append(self._settle(end=message.end_of_stream))
        if calls:
            await asyncio.gather(*calls)
        return answers

    async def _remember(self, keeper: str, response: ResponseSide) -> None:
        """Remember who keeps the response as soon as its id has passed: from then on the client may ask for it."""
        response.capture.collect()
        name = self._turn.answer.id if self._turn else None
        if name:
            self._keeper = None
            await self._world.set_owner(self._world.scope(self._headers), name, keeper)

    async def _response_trailers(self) -> list[Message]:
        if self._response is None:
            return [CONTINUE_RESPONSE_TRAILERS]
        answers = self._response.trailers()
        await self._settle(end=True)
        return answers

    async def _settle(self, *, end: bool) -> None:
        turn, record, response = self._turn, self._record, self._response
        if turn is None or record is None or response is None:
            return
        await record.settle(response.capture, end=end)
