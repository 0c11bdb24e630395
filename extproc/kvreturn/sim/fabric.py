"""How simulated nodes reach each other's KV blocks: in one process, or over HTTP between processes.

It stands for NIXL: reads are one-sided, go by block id, and check nothing but the engine they were meant for.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp import web

_FIRST_PORT = 5600  # vLLM's default side channel port
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})  # noqa: S104 - names are compared, not bound
_CONNECT_TIMEOUT = 2.0
_MAX_BODY = 64 << 20  # a list of block ids can be long


class UnreachableError(Exception):
    """Nobody answers at that address."""


class RefusedError(Exception):
    """The peer answered, but not with what was asked for. `reason` is one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Address:
    """A side channel."""

    host: str
    port: int

    @property
    def key(self) -> tuple[str, int]:
        """Equal for all names of this machine."""
        return ("localhost" if self.host in _LOOPBACK else self.host, self.port)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a handshake tells.

    Attributes:
        engine_id: changes with every restart.
        block_size: tokens per block.
        now: the peer's monotonic clock, for the offset between the two.
    """

    engine_id: str
    block_size: int
    now: float


class SideChannel(Protocol):
    """What a node offers to its peers. `engine_id` names the engine that the caller means.

    Raises (all methods):
        RefusedError: `engine_id`: another engine lives here now. `blocks`: no such block. `not_held`: see `read`.
            `dead`: the engine has died.
    """

    def identity(self) -> Identity:
        """Handshake."""
        ...

    def read(self, engine_id: str, blocks: Sequence[int], request_id: str, *, held_only: bool) -> bytes:
        """Raw content of `blocks`, as it is now; then the blocks held for `request_id` are freed.

        With `held_only` (the kvreturn connector) it is refused where nothing is held for that request any more.
        """
        ...

    def notify(self, engine_id: str, request_id: str) -> bool:
        """Free what is held for `request_id`. Returns whether anything was."""
        ...

    def heartbeat(self, engine_id: str, request_id: str) -> bool:
        """Renew the lease of `request_id`. Returns whether there is one."""
        ...


class Fabric(Protocol):
    """Calls side channels by address.

    Raises (all calls):
        UnreachableError: nobody is there.
        RefusedError: see `SideChannel`.
    """

    async def serve(self, channel: SideChannel, address: Address) -> Address:
        """Offer `channel` at `address`; port 0 means any. Returns the address with its port."""
        ...

    async def withdraw(self, address: Address) -> None:
        """Stop offering it."""
        ...

    async def identity(self, address: Address) -> Identity:
        """See `SideChannel.identity`."""
        ...

    async def read(
        self, address: Address, engine_id: str, blocks: Sequence[int], request_id: str, *, held_only: bool
    ) -> bytes:
        """See `SideChannel.read`."""
        ...

    async def notify(self, address: Address, engine_id: str, request_id: str, *, heartbeat: bool = False) -> bool:
        """See `SideChannel.notify` and `SideChannel.heartbeat`."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class LocalFabric:
    """All nodes live in this process."""

    def __init__(self) -> None:
        self._channels: dict[tuple[str, int], SideChannel] = {}
        self._ports = count(_FIRST_PORT)

    async def serve(self, channel: SideChannel, address: Address) -> Address:
        """Offer `channel`."""
        address = Address(address.host, address.port or next(self._ports))
        self._channels[address.key] = channel
        return address

    async def withdraw(self, address: Address) -> None:
        """Stop offering it."""
        self._channels.pop(address.key, None)

    def _find(self, address: Address) -> SideChannel:
        channel = self._channels.get(address.key)
        if channel is None:
            raise UnreachableError(f"no node at {address.host}:{address.port}")
        return channel

    async def identity(self, address: Address) -> Identity:
        """Handshake."""
        return self._find(address).identity()

    async def read(
        self, address: Address, engine_id: str, blocks: Sequence[int], request_id: str, *, held_only: bool
    ) -> bytes:
        """Read blocks."""
        return self._find(address).read(engine_id, blocks, request_id, held_only=held_only)

    async def notify(self, address: Address, engine_id: str, request_id: str, *, heartbeat: bool = False) -> bool:
        """Free, or renew."""
        channel = self._find(address)
        return (channel.heartbeat if heartbeat else channel.notify)(engine_id, request_id)

    async def close(self) -> None:
        """Nothing to close."""


class HttpFabric:
    """Nodes in other processes: `/side/identity`, `/side/read` and `/side/notify` on the side port."""

    def __init__(self) -> None:
        self._runners: dict[tuple[str, int], web.AppRunner] = {}
        self._session: aiohttp.ClientSession | None = None

    async def serve(self, channel: SideChannel, address: Address) -> Address:
        """Listen."""
        app = web.Application(client_max_size=_MAX_BODY)
        app.add_routes(_side_routes(channel))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        # One socket: "localhost" may mean two addresses, and port 0 would give each its own.
        host = "127.0.0.1" if address.host == "localhost" else address.host
        await web.TCPSite(runner, host, address.port, reuse_address=True, backlog=1024).start()
        address = Address(address.host, runner.addresses[0][1])
        self._runners[address.key] = runner
        return address

    async def withdraw(self, address: Address) -> None:
        """Stop listening."""
        runner = self._runners.pop(address.key, None)
        if runner is not None:
            await runner.cleanup()

    async def _call(self, address: Address, path: str, **body: Any) -> bytes:  # noqa: ANN401 - JSON values
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT)
            self._session = aiohttp.ClientSession(timeout=timeout)
        host = f"[{address.host}]" if ":" in str(address.host) else address.host
        try:
            async with self._session.post(f"http://{host}:{address.port}{path}", json=body) as answer:
                raw = await answer.read()
                if answer.status == web.HTTPConflict.status_code:
                    raise RefusedError(raw.decode())
                if not answer.ok:
                    raise UnreachableError(f"{address.host}:{address.port} is no side channel")
                return raw
        except (aiohttp.ClientError, ValueError, TimeoutError) as error:
            raise UnreachableError(str(error)) from error

    async def identity(self, address: Address) -> Identity:
        """Handshake."""
        raw = await self._call(address, "/side/identity")
        try:
            return msgspec.json.decode(raw, type=Identity)
        except msgspec.MsgspecError as error:
            raise UnreachableError(f"{address.host}:{address.port} is no side channel") from error

    async def read(
        self, address: Address, engine_id: str, blocks: Sequence[int], request_id: str, *, held_only: bool
    ) -> bytes:
        """Read blocks."""
        return await self._call(
            address, "/side/read", engine_id=engine_id, blocks=list(blocks), request_id=request_id, held_only=held_only
        )

    async def notify(self, address: Address, engine_id: str, request_id: str, *, heartbeat: bool = False) -> bool:
        """Free, or renew."""
        body = {"engine_id": engine_id, "request_id": request_id, "heartbeat": heartbeat}
        return await self._call(address, "/side/notify", **body) == b"true"

    async def close(self) -> None:
        """Close connections and listeners."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        await asyncio.gather(*(runner.cleanup() for runner in self._runners.values()))
        self._runners.clear()


def _side_routes(channel: SideChannel) -> list[web.RouteDef]:
    async def identity(_request: web.Request) -> web.Response:
        try:
            return web.json_response(asdict(channel.identity()))
        except RefusedError as error:
            return web.Response(status=web.HTTPConflict.status_code, text=error.reason)

    async def read(request: web.Request) -> web.Response:
        body = await request.json()
        try:
            raw = channel.read(body["engine_id"], body["blocks"], body["request_id"], held_only=body["held_only"])
        except RefusedError as error:
            return web.Response(status=web.HTTPConflict.status_code, text=error.reason)
        return web.Response(body=raw, content_type="application/octet-stream")

    async def notify(request: web.Request) -> web.Response:
        body = await request.json()
        try:
            held = (channel.heartbeat if body["heartbeat"] else channel.notify)(body["engine_id"], body["request_id"])
        except RefusedError as error:
            return web.Response(status=web.HTTPConflict.status_code, text=error.reason)
        return web.json_response(held)

    return [
        web.post("/side/identity", identity),
        web.post("/side/read", read),
        web.post("/side/notify", notify),
    ]
