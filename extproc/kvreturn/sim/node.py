"""A simulated vLLM node: an engine, its HTTP server and its side channel."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import uuid4

from aiohttp import web

from kvreturn.sim.clock import Clock, RealClock
from kvreturn.sim.config import NodeConfig
from kvreturn.sim.engine import Engine
from kvreturn.sim.errors import ApiError
from kvreturn.sim.fabric import Address, Fabric, HttpFabric
from kvreturn.sim.faults import Faults
from kvreturn.sim.http import application
from kvreturn.sim.rank import Rank
from kvreturn.sim.serving import NODE, RANK_HEADER
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
        ranks: its engines (vLLM's `--data-parallel-size`).
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
        # One port after the other, as vLLM's NIXL connector has them (base port + rank); any port where it may be any.
        ports = [config.side_port and config.side_port + i for i in range(config.data_parallel_size)]
        self.ranks = [Rank(Address(config.side_host, port)) for port in ports]
        self._runner: web.AppRunner | None = None

    @property
    def engine(self) -> Engine:
        """The engine that lives now; of several, that of rank 0."""
        return self.ranks[0].engine

    def engine_for(self, headers: Mapping[str, str]) -> Engine:
        """The engine that a request goes to: the rank that it names, else the one with the fewest requests.

        Raises:
            ApiError: there is no such rank.
        """
        try:
            rank = int(headers.get(RANK_HEADER, ""))
        except ValueError:
            return min((r.engine for r in self.ranks), key=lambda e: e.stats().running + e.stats().waiting)
        if not 0 <= rank < len(self.ranks):
            raise ApiError(f"data_parallel_rank {rank} is out of range [0, {len(self.ranks)}).")
        return self.ranks[rank].engine

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
            for rank in self.ranks:
                rank.address = await self._fabric.serve(rank, rank.address)
        self.restart()
        app = application()
        app[NODE] = self
        # A client that leaves cancels its handler: that is how vLLM aborts a request.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, reuse_address=True, backlog=1024).start()
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Break all connections and stop listening."""
        for rank in self.ranks:
            rank.replace(None)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        for rank in self.ranks:
            await self._fabric.withdraw(rank.address)
        if self._own_fabric:
            await self._fabric.close()

    def restart(self) -> None:
        """As if the process had been replaced: a new engine id at the same addresses, nothing kept."""
        start, many = str(uuid4()), len(self.ranks) > 1
        for i, rank in enumerate(self.ranks):
            name = f"{start}_dp{i}" if many else start
            rank.replace(Engine(self.config, self.clock, self._fabric, rank.address, name))

    def remember(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Note a request."""
        self.requests.append(Asked(path, {name.lower(): value for name, value in headers.items()}, body))


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
