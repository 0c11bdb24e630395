"""The response direction of an exchange: what may be a turn's answer is read, stripped, and settled."""

import asyncio
import logging
import re
from functools import partial

from kvreturn._proto.envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    HttpBody,
    ProcessingRequest,
    ProtocolConfiguration,
)
from kvreturn.core.api import API, Responses
from kvreturn.core.capture import BodyCapture, Capture, open_capture
from kvreturn.core.ports import Refuse
from kvreturn.core.refusal import strip_refusal
from kvreturn.core.scrub import foreign_headers
from kvreturn.core.turn import Turn
from kvreturn.server.intake import SETUP
from kvreturn.server.messages import (
    CONTINUE_RESPONSE_BODY,
    CONTINUE_RESPONSE_HEADERS,
    CONTINUE_RESPONSE_TRAILERS,
    Headers,
    Message,
    echo,
    headers_answer,
    read_headers,
    read_upstream,
    refused_by,
)
from kvreturn.server.record import TurnRecord
from kvreturn.server.request import Mode
from kvreturn.server.response import ResponseSide, UnreadableEncodingError, content_decoder
from kvreturn.server.world import World

log = logging.getLogger("kvreturn")

_OK, _ERRORS = 200, 400
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Answering:
    """What an exchange knows, and what it does with the response and with refusals of our own.

    Args:
        world: what all exchanges share.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._limits = world.settings.limits  # until its end, whatever is reloaded meanwhile
        self._config = ProtocolConfiguration()
        self._headers: dict[str, str] = {}
        self._response: ResponseSide | None = None
        self._turn: Turn | None = None
        self._record: TurnRecord | None = None
        self._api: API = Responses()  # reads the response, and gives our own errors their shape
        self._looks = False  # whether the response can have a handle in it: it is a turn's, or a stored one
        self._keeper: str | None = None  # the node that keeps this turn's response, until that is remembered
        self._route: str | None = None
        # Nothing more is to be answered. Closed with OK, Envoy goes on without us, also should we die meanwhile.
        self.over = False

    @property
    def answering(self) -> bool:
        """Whether bytes of D's answer may have gone on, so that another answer is impossible."""
        return self._response is not None

    def _refuse_setup(self) -> list[Message]:
        log.error(SETUP)
        return self._refuse(500, SETUP, "InternalServerError", "setup")

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
