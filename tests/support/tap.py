"""A relay before a server that keeps every byte that clients get."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from kvreturn.core.address import split_address

_SECRETS = (
    *('transfer_params"', 'transfer_params\\"', '"remote_', "block_ids", "digests", '"kvreturn"'),
    *("x-kvreturn", "decode_node"),
)
"""What stands in handles and in our headers, and in nothing that a client may see."""
_CHUNK_LINE = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")


@dataclass
class Tap:
    """The relay.

    Attributes:
        address: where clients connect, once it runs.
        received: what clients got, by connection.
        sent: what the server got, by connection, in the pieces in which it came.
        delay: seconds by which clients get everything later.
    """

    address: str = ""
    received: list[bytearray] = field(default_factory=list)
    sent: list[list[bytes]] = field(default_factory=list)
    delay: float = 0.0

    @contextlib.asynccontextmanager
    async def before(self, server: str) -> AsyncIterator[None]:
        """Relay to the server at this address."""
        relays: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

        def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._relay(server, reader, writer))
            relays[task] = writer
            task.add_done_callback(relays.pop)

        listener = await asyncio.start_server(relay, "127.0.0.1", 0, backlog=1024)
        self.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            listener.close()
            running = list(relays)
            for task, writer in relays.items():
                task.cancel()
                writer.close()  # here too: a task that has not begun yet never will
            await asyncio.gather(*running, return_exceptions=True)

    async def _relay(self, server: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept, sent = bytearray(), list[bytes]()
        self.received.append(kept)
        self.sent.append(sent)
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            far_reader, far_writer = await asyncio.open_connection(*split_address(server))
            with contextlib.closing(far_writer):
                pumps = [
                    asyncio.create_task(_pump(reader, far_writer, sent.append)),
                    asyncio.create_task(_pump(far_reader, writer, kept.extend, lambda: self.delay)),
                ]
                try:  # whoever closes closes both: no client here, and no server, goes on after that
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)

    def leaks(self, *more: str) -> set[str]:
        """What clients got of handles, addresses and our headers.

        Args:
            more: texts that must not be there either.
        """
        # Chunked coding may cut a word in two.
        texts = [text.lower() for got in self.received for text in (bytes(got), _CHUNK_LINE.sub(b"", got))]
        return {word for word in (*_SECRETS, *more) if any(word.lower().encode() in text for text in texts)}


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    keep: Callable[[bytes], None],
    delay: Callable[[], float] = lambda: 0.0,
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            keep(data)
            await asyncio.sleep(delay())
            writer.write(data)
            await writer.drain()
