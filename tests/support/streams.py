"""ext_proc streams: one to a service in this process without a socket, one over real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from kvreturn.server.service import SERVICE, ExternalProcessor


class StreamError(Exception):
    """The server ended the stream with another status than OK."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code)
        self.code = code


class Stream(Protocol):
    """A stream, as the client has it."""

    async def send(self, message: pb.ProcessingRequest) -> None:
        """Send a message; without effect once the stream has ended."""

    async def receive(self) -> pb.ProcessingResponse | None:
        """The next message; None where the server ended the stream with OK.

        Raises:
            StreamError: it ended it otherwise.
        """

    async def half_close(self) -> None:
        """Nothing more is sent."""

    def cancel(self) -> None:
        """Reset the stream."""


class LocalStream:
    """Runs the service in a task of its own, which `cancel` cancels as grpc.aio does.

    Attributes:
        task: ends when the service is done with the stream.
    """

    def __init__(self, service: ExternalProcessor, role: str | None = None) -> None:
        self._role = role
        self._sent: asyncio.Queue[pb.ProcessingRequest | None] = asyncio.Queue()
        self._received: asyncio.Queue[pb.ProcessingResponse | StreamError | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(service))

    async def send(self, message: pb.ProcessingRequest) -> None:
        # As from the wire: the service must not see an object that a test still holds.
        self._sent.put_nowait(pb.ProcessingRequest.FromString(message.SerializeToString()))

    async def receive(self) -> pb.ProcessingResponse | None:
        got = await self._received.get()
        if isinstance(got, StreamError):
            raise got
        return got

    async def half_close(self) -> None:
        self._sent.put_nowait(None)

    def cancel(self) -> None:
        self.task.cancel()

    def invocation_metadata(self) -> list[tuple[str, str]]:
        """For the service: `ServicerContext.invocation_metadata`."""
        return [("x-kvreturn-role", self._role)] if self._role else []

    async def write(self, message: pb.ProcessingResponse | bytes) -> None:
        """For the service: `ServicerContext.write`."""
        text = message if isinstance(message, bytes) else message.SerializeToString()
        self._received.put_nowait(pb.ProcessingResponse.FromString(text))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """For the service: `ServicerContext.abort`."""
        del details
        raise StreamError(code)

    async def _run(self, service: ExternalProcessor) -> None:
        try:
            context: Any = self
            await service.process(self._requests(), context)
            self._received.put_nowait(None)
        except StreamError as e:
            self._received.put_nowait(e)
        except asyncio.CancelledError:
            if not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                return  # grpc.aio takes it for the client's cancellation, and sends nothing (grpc#29248)
            raise
        except Exception:  # noqa: BLE001 - what grpc.aio makes of it
            self._received.put_nowait(StreamError(grpc.StatusCode.UNKNOWN))

    async def _requests(self) -> AsyncIterator[pb.ProcessingRequest]:
        while (message := await self._sent.get()) is not None:
            yield message


class GrpcStream:
    """A stream of a real channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        method: Any = channel.stream_stream(
            f"/{SERVICE}/Process", pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString
        )
        self.call = method()

    async def send(self, message: pb.ProcessingRequest) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `receive` tells how it ended
            await self.call.write(message)

    async def receive(self) -> pb.ProcessingResponse | None:
        try:
            message = await self.call.read()
        except grpc.aio.AioRpcError as e:
            raise StreamError(e.code()) from None
        return message if isinstance(message, pb.ProcessingResponse) else None  # grpc.aio.EOF

    async def half_close(self) -> None:
        await self.call.done_writing()

    def cancel(self) -> None:
        self.call.cancel()
