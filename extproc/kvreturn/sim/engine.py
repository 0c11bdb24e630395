"""One life of a node's engine: what the API server and the side channel ask of it."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from collections.abc import Sequence as List
from dataclasses import asdict
from typing import Any, TypeVar
from uuid import uuid4
from zlib import crc32

from kvreturn.sim.blocks import BlockHasher, BlockPool
from kvreturn.sim.clock import Clock
from kvreturn.sim.config import NodeConfig
from kvreturn.sim.connector import EngineDiedError, LoadError
from kvreturn.sim.connector_kvreturn import KvreturnConnector
from kvreturn.sim.connector_stock import StockConnector
from kvreturn.sim.errors import EngineDeadError, GenerationError
from kvreturn.sim.fabric import Address, Fabric, Identity, RefusedError
from kvreturn.sim.holds import Holds
from kvreturn.sim.scheduler import Scheduler
from kvreturn.sim.sequence import Job, Sequence, Step
from kvreturn.sim.stats import BlockUse, Counters, NodeStats

T = TypeVar("T")
_Queue = asyncio.Queue[Step | Exception]


class DroppedError(Exception):
    """The process went away under the request: its connection breaks."""


class Engine:
    """Computes generations.

    Args:
        config: the node's settings.
        clock: time.
        fabric: the way to peers.
        address: the own side channel, as handles name it.
        name: its id.
    """

    def __init__(self, config: NodeConfig, clock: Clock, fabric: Fabric, address: Address, name: str) -> None:
        self.id = name
        self.config = config
        self.clock = clock
        self.fabric = fabric
        self.address = address
        self.dead = False
        self.counters = Counters()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._live: dict[str, _Queue] = {}
        # No two nodes agree about monotonic time: handles carry such times, and nobody may compare them with his own.
        self._epoch = float(crc32(f"{config.role}{address.port}".encode()) % 100_000)
        self._scheduler = Scheduler(self)
        self._connector: StockConnector | None = None
        if config.role != "single":
            self._connector = KvreturnConnector(self) if config.connector == "kvreturn" else StockConnector(self)
            self._scheduler.connector = self._connector

    @property
    def pool(self) -> BlockPool:
        """The KV blocks."""
        return self._scheduler.pool

    @property
    def holds(self) -> Holds:
        """What is kept of finished requests."""
        return self._scheduler.holds

    # --- for the API server ---

    @property
    def plugin(self) -> bool:
        """Whether kvreturn's plugin is installed."""
        return isinstance(self._connector, KvreturnConnector)

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the engine has died."""
        if self.dead:
            raise EngineDeadError

    async def generate(self, request_id: str, jobs: List[Job]) -> AsyncGenerator[Step, None]:
        """Run the jobs of one request side by side; closing the generator aborts them.

        Yields:
            Steps of all jobs, as they come.

        Raises:
            EngineDeadError: the engine has died, or does now.
            GenerationError: a load failed.
            DroppedError: the node was restarted.
        """
        if request_id in self._live:
            self.die()  # field report 68: two live requests with one id
        self.check_alive()
        queue = self._live[request_id] = _Queue()
        tasks = []
        try:
            for i, job in enumerate(jobs):
                seq = self._sequence(request_id if len(jobs) == 1 else f"{i}_{request_id}", job)
                tasks.append(self.spawn(self._run(seq, i, queue)))
            left = len(jobs)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= item.finish_reason is not None
                yield item
        finally:
            if self._live.get(request_id) is queue:
                del self._live[request_id]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def reject(self, params: Mapping[str, Any] | None) -> None:
        """A request was refused before it reached the engine; blocks that a peer keeps for it are freed."""
        if params and self._connector is not None and not self.dead:
            try:
                self._connector.rejected(params)
            except EngineDiedError:
                self.die()

    def die(self) -> None:
        """The engine process ends: all requests fail, now and later."""
        self._stop(EngineDeadError())

    def drop(self) -> None:
        """The whole node goes away."""
        self._stop(DroppedError())
        for task in self._tasks:
            task.cancel()

    def _stop(self, error: Exception) -> None:
        self.dead = True
        self._scheduler.stop()
        for queue in self._live.values():
            queue.put_nowait(error)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run in the background, for as long as the engine lives."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def now(self) -> float:
        """The engine's own monotonic clock, seconds."""
        return self.clock.now() + self._epoch

    def stats(self) -> NodeStats:
        """The engine at this moment."""
        self.holds.reap()
        return NodeStats(
            **asdict(self.counters),
            engine_alive=not self.dead,
            blocks_free=self.pool.free,
            blocks_used=self.pool.used,
            blocks_pinned=len(self.holds.held("pin", "lease")),
            pins=self.holds.count("pin"),
            leases=self.holds.count("lease"),
            expired_holds=self.holds.expired,
            early_releases=self.holds.released_early,
        )

    def block_use(self) -> BlockUse:
        """What the blocks are used for at this moment."""
        self.holds.reap()
        return self._scheduler.block_use()

    # --- the side channel ---

    def identity(self) -> Identity:
        """See `fabric.SideChannel`."""
        if self.dead:
            raise RefusedError("dead")
        return Identity(self.id, self.config.block_size, self.now())

    def read(self, engine_id: str, blocks: List[int], request_id: str, *, held_only: bool) -> bytes:
        """See `fabric.SideChannel`."""
        self._check(engine_id)
        if held_only and request_id not in self.holds:
            raise RefusedError("not_held")
        try:
            raw = self.pool.dump(blocks)
        except IndexError:
            raise RefusedError("blocks") from None
        self.notify(engine_id, request_id)
        return raw

    def notify(self, engine_id: str, request_id: str) -> bool:
        """See `fabric.SideChannel`."""
        self._check(engine_id)
        held = self.holds.free(request_id)
        self.counters.late_notifications += not held
        return held

    def heartbeat(self, engine_id: str, request_id: str) -> bool:
        """See `fabric.SideChannel`."""
        self._check(engine_id)
        return self.holds.renew(request_id, self.config.lease * 2 / 3)  # vLLM's rule

    def _check(self, engine_id: str) -> None:
        if self.dead:
            raise RefusedError("dead")
        if engine_id != self.id:
            raise RefusedError("engine_id")

    # --- one sequence ---

    def _sequence(self, request_id: str, job: Job) -> Sequence:
        images = job.prompt.images
        hasher = BlockHasher(self.config.block_size, adapter=job.adapter, salt=job.salt, images=images)
        hasher.extend(job.prompt.tokens)
        return Sequence(job, f"{request_id}-{uuid4().hex[:8]}", hasher, list(job.prompt.tokens))

    async def _run(self, seq: Sequence, position: int, queue: _Queue) -> None:
        try:
            await self._scheduler.run(seq, position, queue.put_nowait)
        except LoadError:
            queue.put_nowait(GenerationError())
        except EngineDiedError:
            self.die()
        except Exception as error:  # noqa: BLE001 - the API server answers it with a 500
            queue.put_nowait(error)
