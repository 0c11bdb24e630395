"""P, D, a plain node as oracle and routers, in one event loop and on one clock that moves only when told.

Nothing in here waits for real time: an event loop whose nodes and streams have nothing left to do is seen to be idle,
and then the clock jumps to the next timer, as if the hours in between had passed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import aiohttp

from kvreturn.config import Settings
from kvreturn.server.service import ExternalProcessor
from kvreturn.server.world import World
from kvreturn.sim import NO_TIMING, LocalFabric, ManualClock, NodeConfig, SimNode
from property.history import Setup
from property.holding import HeldClient, HeldReturns
from property.watch import REQUEST, NodeClock, Watch
from property.wording import ADAPTER, ALIAS, MODEL

_IDLE = 30  # passes of the event loop without an event: on loopback, what was sent has arrived a pass later
_SILENCE = 5_000  # milliseconds of real time without an event, although somebody waits
_LONGEST_WAIT = 3_600.0  # seconds of the clock: no TTL and no lease is that long
_AT_ONCE = 1e-6
_PREFILL_TIMEOUT = 2 * _LONGEST_WAIT  # who waits for blocks until their TTL is over has not failed


class OracleClock:
    """Tells the time at which the prompt of the request in question was rendered."""

    def __init__(self) -> None:
        self.reading = datetime.min  # noqa: DTZ901 - set before it is read

    def now(self) -> float:
        return 0.0

    def wall(self) -> datetime:
        return self.reading

    async def sleep(self, seconds: float) -> None:
        del seconds
        await asyncio.sleep(0)


class Node(SimNode):
    """A node whose tasks know for which request they work."""

    address: str = ""

    def remember(self, path: str, headers: Any, body: bytes) -> None:  # noqa: ANN401 - aiohttp's own mapping
        REQUEST.set(headers.get("x-request-id", ""))
        super().remember(path, headers, body)


@dataclass
class Router:
    """One router process."""

    world: World
    service: ExternalProcessor
    returns: HeldReturns


@dataclass
class Cluster:
    """Everything that a history runs on. `open_cluster` makes one.

    Attributes:
        nodes: P, P2 if there is one, and D.
        disturbed: grows with every restart and injected fault: what runs meanwhile may fail.
        delayed: whether a node was told to be slow, so that somebody may wait for the clock alone.
        read_tokens: tokens that prefill engines which were replaced since had read back.
        poisoned: which prefix cache has known something else under a hash than what belongs there, if one has.
    """

    setup: Setup
    clock: ManualClock
    watch: Watch
    nodes: dict[str, Node]
    oracle: Node
    oracle_clock: OracleClock
    session: aiohttp.ClientSession
    stack: contextlib.AsyncExitStack
    routers: list[Router] = field(default_factory=list)
    disturbed: int = 0
    delayed: bool = False
    read_tokens: int = 0
    poisoned: str | None = None
    _contents: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def p(self) -> Node:
        return self.nodes["P"]

    @property
    def d(self) -> Node:
        return self.nodes["D"]

    @property
    def prefill(self) -> list[Node]:
        """All prefill nodes."""
        return [node for name, node in self.nodes.items() if name != "D"]

    @property
    def router(self) -> Router:
        """The one that takes new exchanges; older ones end what they have begun."""
        return self.routers[-1]

    def url(self, node: Node, path: str) -> str:
        return f"http://{node.address}{path}"

    async def restart(self, who: str) -> None:
        self.disturbed += 1
        if who.endswith("router"):
            old = self.router
            await self.start_router()
            if who.startswith("killed"):
                await old.returns.drain(0)
            return
        self.check_caches()
        node = self.nodes[who]
        if who != "D":
            self.read_tokens += node.stats.read_tokens
        node.restart()

    def check_caches(self) -> None:
        """Note whether all prefix caches have the same under the same hash: it covers all that the KV depends on."""
        for name, node in self.nodes.items():
            pool = node.engine.pool
            for block_hash, block in pool._block_of.items():
                content = pool.dump([block])
                if self._contents.setdefault(block_hash, content) != content and not self.poisoned:
                    self.poisoned = name

    async def start_router(self) -> None:
        settings = _settings(self.setup, [p.address for p in self.prefill], self.d.address)
        world = World.create(settings, clock=self.clock.now)
        world.new_id = self.watch.new_id
        world.client = HeldClient(world, self.watch, self.clock)
        world.returns = returns = HeldReturns(world, self.watch, waits=self.setup.waits)
        await self.stack.enter_async_context(world.client)
        self.routers.append(Router(world, ExternalProcessor(world), returns))

    async def until(self, done: Callable[[], bool], what: str) -> None:
        """Let everybody work until something is done; let time pass where nothing else is left to happen."""
        idle = silence = 0
        events, waited = self.watch.events, 0.0
        while not done():
            await asyncio.sleep(0)
            if self.watch.events != events:
                idle, silence, events = 0, 0, self.watch.events
                continue
            idle += 1
            if idle % _IDLE:
                continue
            pause = self._next_timer() if self.delayed or self._waiting() else None
            if pause is None:
                silence += 1
                assert silence < _SILENCE, f"{what} hangs"
                await asyncio.sleep(0.001)
                continue
            waited += pause
            assert waited < _LONGEST_WAIT, f"{what} waits for ever"
            await self.clock.advance(pause)

    def _waiting(self) -> int:
        return sum(node.engine.counters.waiting for node in self.nodes.values())

    def _next_timer(self) -> float | None:
        due = [when for when, _, future in self.clock._sleepers if not future.done()]
        return max(min(due) - self.clock.now(), 0.0) if due else None


def _settings(setup: Setup, prefill: Sequence[str], d: str) -> Settings:
    return Settings.model_validate(
        {
            "pools": {"prefill": prefill, "decode": [d]},
            "prefill": {
                "via": "direct",
                "timeout": _PREFILL_TIMEOUT,
                "on_failure": "fallback" if setup.fallback else "error",
                "pass_token_ids": setup.pass_token_ids or not setup.compares_prompts,
            },
            "store": {"ttl": setup.store_ttl},
            "proof": setup.proof,
            "return": setup.returns,
            "models": {ADAPTER: {"return": setup.adapter_returns}},
            "returns": {
                "concurrency": setup.concurrency,
                "patience": _PREFILL_TIMEOUT,
                "deadline": _PREFILL_TIMEOUT,
                "wait": _PREFILL_TIMEOUT if setup.waits else _AT_ONCE,
            },
            "limits": {"min_tokens": setup.threshold},
            "secret": setup.secret,
            "admin": None,
        }
    )


def _configs(setup: Setup) -> tuple[dict[str, NodeConfig], NodeConfig]:
    """P, P2 if there is one, and D; and the oracle."""
    base = NodeConfig(
        model=MODEL,
        aliases=(ALIAS,),
        adapters=(ADAPTER,),
        template=setup.template,
        tokenizer=setup.tokenizer,
        block_size=setup.block_size,
        max_model_len=setup.max_model_len,
        num_blocks=setup.blocks(1.0),
        recompute_threshold=setup.threshold,
        decoder_ttl=setup.decoder_ttl,
        secret=setup.secret.encode(),
        timing=NO_TIMING,
        keep_requests=64,
    )
    p = replace(
        base,
        role="prefill",
        connector=setup.p,
        prefix_caching=setup.p_cache,
        num_blocks=setup.blocks(setup.p_room),
        bidirectional=setup.reads_at_p,
    )
    nodes = {"P": p}
    if setup.p2:
        nodes["P2"] = replace(p, connector=setup.p2.connector, bidirectional=setup.p2.flag)
    nodes["D"] = replace(
        base,
        role="decode",
        connector=setup.d,
        prefix_caching=setup.d_cache,
        num_blocks=setup.blocks(setup.d_room),
        bidirectional=setup.keeps_at_d,
    )
    return nodes, replace(base, role="single", prefix_caching=False, num_blocks=setup.blocks(4.0))


@contextlib.asynccontextmanager
async def open_cluster(setup: Setup) -> AsyncIterator[Cluster]:
    """A cluster for as long as the context lasts."""
    clock, fabric, watch, oracle_clock = ManualClock(setup.start), LocalFabric(), Watch(), OracleClock()
    configs, oracle_config = _configs(setup)
    nodes = {name: Node(config, NodeClock(clock, watch, name[0]), fabric) for name, config in configs.items()}
    oracle = Node(oracle_config, oracle_clock, fabric)
    async with contextlib.AsyncExitStack() as stack:
        for node in (*nodes.values(), oracle):
            node.address = (await node.start()).removeprefix("http://")
            stack.push_async_callback(node.stop)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        cluster = Cluster(setup, clock, watch, nodes, oracle, oracle_clock, session, stack)
        await cluster.start_router()
        yield cluster
