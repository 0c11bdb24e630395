"""Envoy's ext_proc filter, as a server sees it: plays HTTP exchanges, and enforces the contract.

Which messages come in which mode was recorded from Envoy 1.40.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import grpc

from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from support.contract import ContractError, Passed, Side, check_mutation
from support.messages import (
    ALL_MODES,
    Headers,
    Kind,
    Mode,
    Modes,
    Request,
    Response,
    body_message,
    headers_message,
    request_headers,
    trailers_message,
)
from support.streams import Stream, StreamError

__all__ = [
    "ALL_MODES",
    "ContractError",
    "Envoy",
    "Kind",
    "Mode",
    "Modes",
    "Passed",
    "Request",
    "Response",
    "body_message",
    "headers_message",
    "request_headers",
    "trailers_message",
]


class Envoy:
    """One exchange.

    Attributes:
        upstream: what goes to the decode node.
        client: what goes to the client.
        answered: whether it was the server that answered the client.
        failed: the gRPC status with which the server ended the stream, if not OK.
        answers: all answers, in order.
        silence: seconds without an answer that is due: nobody else would end the wait in FULL_DUPLEX_STREAMED.
    """

    silence = 5.0

    def __init__(self, stream: Stream, modes: Modes | None = None) -> None:
        self.modes = modes or Modes()
        self.answers: list[pb.ProcessingResponse] = []
        self.answered = False
        self.failed: grpc.StatusCode | None = None
        self._stream = stream
        self._sides: dict[Kind, Side] = {
            "request": Side("request", self.modes),
            "response": Side("response", self.modes),
        }
        self._closed = False

    @property
    def upstream(self) -> Passed:
        return self._sides["request"].passed

    @property
    def client(self) -> Passed:
        return self._sides["response"].passed

    async def play(self, request: Request, response: Response | Callable[[Passed], Response]) -> Passed:
        """The whole exchange. Returns what the client got."""
        if await self.request(request):
            await self.respond(response(self.upstream) if callable(response) else response)
        await self.finish()
        return self.client

    async def request(self, request: Request) -> bool:
        """The request side. Returns whether the request went on."""
        message = request_headers(request, modes=self.modes)
        headers = {h.key: h.raw_value.decode("latin-1") for h in message.request_headers.headers.headers}
        await self._send("request", message, headers, request.pieces, trailers=request.trailers)
        return not (self.answered or self.failed)

    async def respond(self, response: Response) -> None:
        """The response side."""
        headers = {":status": str(response.status), **response.headers}
        message = headers_message("response", headers, end=not response.pieces, node=response.node)
        await self._send("response", message, headers, response.pieces, trailers=response.trailers)

    async def finish(self) -> None:
        """End the stream as Envoy does after the last answer; nothing more may come from the server."""
        await self._stream.half_close()
        while not self._closed:
            await self._take()

    async def _send(
        self, kind: Kind, message: pb.ProcessingRequest, headers: Headers, pieces: Sequence[bytes], *, trailers: bool
    ) -> None:
        side = self._sides[kind]
        side.headers_sent(headers, end=not pieces)
        await self._give(message)
        ahead = side.mode == Mode.FULL_DUPLEX_STREAMED or (kind == "request" and self.modes.early)
        if not (ahead and pieces):
            await self._until(lambda: not side.headers_due)
        for data, end in _cut(side.mode, pieces, trailers=trailers):
            if self.answered or self.failed:
                return
            if self._closed:
                side.go_past(data, end=end)
                continue
            side.body_sent(data, end=end)
            await self._give(body_message(kind, data, end=end))
        if side.mode != Mode.FULL_DUPLEX_STREAMED and not (ahead and trailers):
            await self._until(lambda: side.settled)
        if trailers and pieces and not (self.answered or self.failed):
            if self._closed or not self.modes.trailers:
                side.passed.ended = side.passed.trailers = True
                return
            side.trailers_sent()
            await self._give(trailers_message(kind))
        await self._until(lambda: side.settled)

    async def _give(self, message: pb.ProcessingRequest) -> None:
        if not self._closed:
            await self._stream.send(message)

    async def _until(self, done: Callable[[], bool]) -> None:
        while not (done() or self._closed or self.answered):
            await self._take()

    async def _take(self) -> None:
        try:
            async with asyncio.timeout(self.silence):  # `wait_for` can lose a cancellation before Python 3.12
                message = await self._stream.receive()
        except TimeoutError:
            raise ContractError("silence: an answer is due, and nothing comes") from None
        except StreamError as e:
            self._closed, self.failed = True, e.code
            if self.client.headers is None and not self.answered:
                self.client.headers, self.client.ended = {":status": "500"}, True
            return
        if message is not None:
            self.answers.append(message)
            self._apply(message)
            return
        self._closed = True
        for side in self._sides.values() if not self.answered else ():
            side.closed()

    def _apply(self, message: pb.ProcessingResponse) -> None:
        which = message.WhichOneof("response")
        if self.answered or which is None:
            raise ContractError("a message after an immediate response, or one without content")
        if which == "immediate_response":
            self._immediate(message.immediate_response)
            return
        kind, _, part = which.partition("_")
        side = self._sides["request" if kind == "request" else "response"]
        if part == "headers":
            side.headers_answer(getattr(message, which), message)
        elif part == "body":
            side.body_answer(getattr(message, which), message)
        else:
            side.trailers_answer(getattr(message, which))

    def _immediate(self, response: pb.ImmediateResponse) -> None:
        if self.client.headers is not None:
            raise ContractError("an immediate response after the response has begun (envoy#23652)")
        check_mutation(response.headers, immediate=True)
        self.answered = True
        headers = {o.header.key: o.header.raw_value.decode("latin-1") for o in response.headers.set_headers}
        self.client.headers = {":status": str(response.status.code), **headers}
        self.client.pieces, self.client.ended = [response.body], True


def _cut(mode: int, pieces: Sequence[bytes], *, trailers: bool) -> Iterable[tuple[bytes, bool]]:
    """A body as messages: data, and whether the stream ends with it."""
    if not pieces:
        return []
    if mode == Mode.BUFFERED:
        return [(b"".join(pieces), not trailers)]
    if mode == Mode.FULL_DUPLEX_STREAMED and not trailers:
        return [*((p, False) for p in pieces if p), (b"", True)]
    return [(p, i == len(pieces) - 1 and not trailers) for i, p in enumerate(pieces) if p or i == len(pieces) - 1]
