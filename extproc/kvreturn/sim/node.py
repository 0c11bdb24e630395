"""A simulated vLLM node: an engine, its HTTP server and its side channel."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from kvreturn.sim.clock import Clock, RealClock
from kvreturn.sim.config import NodeConfig
from kvreturn.sim.engine import Engine
from kvreturn.sim.fabric import Address, Fabric, HttpFabric, Identity
from kvreturn.sim.faults import Faults
from kvreturn.sim.http import application
from kvreturn.sim.serving import NODE
from kvreturn.sim.stats import BlockUse, NodeStats

_SHUTDOWN = 0.2  # seconds that open requests get before they are cut


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that a node received.

    Attributes:
        path: without the query.
        headers: names in lower case.
        body: bytes as received.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes


class SimNode:
    """One node.

    Args:
        config: its settings.
        clock: time; the machine's if left out.
        fabric: the way to other nodes; HTTP if left out. Nodes of one process share a `LocalFabric`.

    Attributes:
        config: its settings.
        clock: time.
        faults: what is to go wrong.
        requests: the latest requests, oldest first.
        created: Unix time of the start.
    """

    def __init__(self, config: NodeConfig, clock: Clock | None = None, fabric: Fabric | None = None) -> None:
        self.config = config
        self.clock = clock or RealClock()
        self.faults = Faults()
        self.requests: deque[Asked] = deque(maxlen=config.keep_requests)
        self.created = int(time.time())
        self._own_fabric = fabric is None
        self._fabric: Fabric = fabric if fabric is not None else HttpFabric()
        self._address = Address(config.side_host, config.side_port)
        self._engine: Engine | None = None
        self._runner: web.AppRunner | None = None

    @property
    def engine(self) -> Engine:
        """The engine that lives now."""
        if self._engine is None:
            raise RuntimeError("the node is not running: await start() first")
        return self._engine

    @property
    def stats(self) -> NodeStats:
        """Counters since the last restart, and blocks as they are now."""
        return self.engine.stats()

    def blocks(self) -> BlockUse:
        """What the blocks are used for now. With nothing to do and all TTLs over, all are `free` or `cached`."""
        return self.engine.block_use()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen.

        Returns:
            The base URL, without a slash at its end.
        """
        if self.config.role != "single":
            self._address = await self._fabric.serve(self, self._address)
        self._engine = Engine(self.config, self.clock, self._fabric, self._address)
        app = application()
        app[NODE] = self
        # A client that leaves cancels its handler: that is how vLLM aborts a request.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, reuse_address=True).start()
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Break all connections and stop listening."""
        if self._engine is not None:
            self._engine.drop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self._fabric.withdraw(self._address)
        if self._own_fabric:
            await self._fabric.close()

    def restart(self) -> None:
        """As if the process had been replaced: a new engine id at the same addresses, nothing kept."""
        self.engine.drop()
        self._engine = Engine(self.config, self.clock, self._fabric, self._address)

    def remember(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Note a request."""
        self.requests.append(Asked(path, {name.lower(): value for name, value in headers.items()}, body))

    # --- fabric.SideChannel: the address outlives engines ---

    def identity(self) -> Identity:
        """See `fabric.SideChannel`."""
        return self.engine.identity()

    def read(self, engine_id: str, blocks: Sequence[int], request_id: str, *, held_only: bool) -> bytes:
        """See `fabric.SideChannel`."""
        return self.engine.read(engine_id, blocks, request_id, held_only=held_only)

    def notify(self, engine_id: str, request_id: str) -> bool:
        """See `fabric.SideChannel`."""
        return self.engine.notify(engine_id, request_id)

    def heartbeat(self, engine_id: str, request_id: str) -> bool:
        """See `fabric.SideChannel`."""
        return self.engine.heartbeat(engine_id, request_id)


async def run_node(
    config: NodeConfig,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    clock: Clock | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve one node until cancelled.

    Args:
        config: its settings.
        host: address to listen on.
        port: 0 takes a free one.
        clock: time; the machine's if left out.
        ready: called with the base URL once the node listens.
    """
    node = SimNode(config, clock)
    url = await node.start(host, port)
    try:
        if ready is not None:
            ready(url)
        await asyncio.get_running_loop().create_future()
    finally:
        await node.stop()
