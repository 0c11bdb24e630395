"""One HTTP exchange, as one ext_proc stream sees it: Envoy's messages in, our answers out."""

from collections.abc import Callable
from functools import partial

from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
)
from kvreturn.core.api import API
from kvreturn.core.identity import find_session
from kvreturn.core.ports import Refuse
from kvreturn.core.scrub import foreign_headers
from kvreturn.core.turn import Turn
from kvreturn.server.answering import Answering
from kvreturn.server.drive import drive, scrub
from kvreturn.server.intake import is_read, refused, stored_response, turn_api
from kvreturn.server.messages import (
    CONTINUE_REQUEST_BODY,
    CONTINUE_REQUEST_TRAILERS,
    Headers,
    Message,
    echo,
    headers_answer,
    leave,
    read_headers,
    towards,
)
from kvreturn.server.record import PREFILL_HEADERS, TurnRecord
from kvreturn.server.request import LateTrailersError, Metadata, Mode, RequestSide, TooLargeError, routed
from kvreturn.server.world import ForeignError, World


class Exchange(Answering):
    """Handles the messages of one stream, in order.

    Args:
        world: what all exchanges share.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._request: RequestSide | None = None  # None: this exchange's request is none of our business
        self._entered = False  # whether the turn counts as a live one
        self._stored: str | None = None  # the stored response that the client asks for
        self._forwarded = False
        self._opened = False

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
