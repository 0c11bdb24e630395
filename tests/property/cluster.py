"""P, D, a plain node as oracle and routers, in one event loop and on one clock that moves only when told.

Nothing in here waits for real time: an event loop whose nodes and streams have nothing left to do is seen to be idle,
and then the clock jumps to the next timer, as if the hours in between had passed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import aiohttp

from kvreturn.config import Settings
from kvreturn.server.service import ExternalProcessor
from kvreturn.server.world import World
from kvreturn.sim import NO_TIMING, LocalFabric, ManualClock, NodeConfig, SimNode
from property.history import Setup
from property.wording import ADAPTER, ALIAS, MODEL

_REQUEST: ContextVar[str] = ContextVar("request", default="")
"""The router's id of the request that the current task works for: the name of the turn, a dot, a number."""
_IDLE = 30  # passes of the event loop without an event: on loopback, what was sent has arrived a pass later
_SILENCE = 5_000  # milliseconds of real time without an event, although somebody waits
_LONGEST_WAIT = 3_600.0  # seconds of the clock: no TTL and no lease is that long
_PREFILL_TIMEOUT = 2 * _LONGEST_WAIT  # who waits for blocks until their TTL is over has not failed

Where = str
"""A point at which a turn can be held up: `send` (a message of Envoy's), `between` the legs, in node `P` or `D`."""


@dataclass
class Gate:
    """Holds up one turn when it comes to a point for the nth time."""

    where: Where
    nth: int
    passed: int = 0
    reached: bool = False
    _opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def at(self, where: Where) -> None:
        if where == self.where:
            self.passed += 1
            if self.passed == self.nth:
                self.reached = True
                await self._opened.wait()

    def open(self) -> None:
        self._opened.set()


@dataclass
class Watch:
    """Knows which turn a node works for, and what happens at all.

    Attributes:
        turn: name of the turn whose exchange the current task is a part of.
        gates: by turn.
        rendered: date and time of day at which a request's prompt was rendered, by the id of the request.
        events: grows with everything that happens.
        exchanges: how many exchanges have begun.
    """

    turn: ContextVar[str] = field(default_factory=lambda: ContextVar("turn", default=""))
    gates: dict[str, Gate] = field(default_factory=dict)
    rendered: dict[str, datetime] = field(default_factory=dict)
    events: int = 0
    exchanges: int = 0

    def new_id(self) -> str:
        """In place of the router's random ids."""
        self.events += 1
        return f"{self.turn.get()}.{self.events}"

    async def at(self, where: Where, turn: str) -> None:
        self.events += 1
        gate = self.gates.get(turn)
        if gate:
            await gate.at(where)


class NodeClock:
    """The common clock as one node has it: every moment at which work could take time is a gate."""

    def __init__(self, clock: ManualClock, watch: Watch, where: Where) -> None:
        self._clock = clock
        self._watch = watch
        self._where = where

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> datetime:
        self._watch.rendered[_REQUEST.get()] = self._clock.wall()
        return self._clock.wall()

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:  # not a timer
            await self._watch.at(self._where, _REQUEST.get().partition(".")[0])
        await self._clock.sleep(seconds)


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
        _REQUEST.set(headers.get("x-request-id", ""))
        super().remember(path, headers, body)


@dataclass
class Router:
    """One router process."""

    world: World
    service: ExternalProcessor


@dataclass
class Cluster:
    """Everything that a history runs on. `open_cluster` makes one.

    Attributes:
        disturbed: grows with every restart and injected fault: what runs meanwhile may fail.
        delayed: whether a node was told to be slow, so that somebody may wait for the clock alone.
        read_tokens: tokens that prefill engines which were replaced since had read back.
    """

    setup: Setup
    clock: ManualClock
    watch: Watch
    p: Node
    d: Node
    oracle: Node
    oracle_clock: OracleClock
    session: aiohttp.ClientSession
    stack: contextlib.AsyncExitStack
    routers: list[Router] = field(default_factory=list)
    disturbed: int = 0
    delayed: bool = False
    read_tokens: int = 0

    @property
    def router(self) -> Router:
        """The one that takes new exchanges; older ones end what they have begun."""
        return self.routers[-1]

    def url(self, node: Node, path: str) -> str:
        return f"http://{node.address}{path}"

    async def restart(self, who: str) -> None:
        self.disturbed += 1
        if who == "router":
            await self.start_router()
            return
        node = self.p if who == "P" else self.d
        if node is self.p:
            self.read_tokens += node.stats.read_tokens
        node.restart()

    async def start_router(self) -> None:
        world = World.create(_settings(self.setup, self.p.address, self.d.address), clock=self.clock.now)
        world.new_id = self.watch.new_id
        await self.stack.enter_async_context(world.client)
        self.routers.append(Router(world, ExternalProcessor(world)))

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
        return self.p.engine.counters.waiting + self.d.engine.counters.waiting

    def _next_timer(self) -> float | None:
        due = [when for when, _, future in self.clock._sleepers if not future.done()]
        return max(min(due) - self.clock.now(), 0.0) if due else None


def _settings(setup: Setup, p: str, d: str) -> Settings:
    return Settings.model_validate(
        {
            "pools": {"prefill": [p], "decode": [d]},
            "prefill": {
                "via": "direct",
                "timeout": _PREFILL_TIMEOUT,
                "on_failure": "fallback" if setup.fallback else "error",
                "pass_token_ids": setup.pass_token_ids or not setup.compares_prompts,
            },
            "store": {"ttl": setup.store_ttl},
            "proof": setup.proof,
            "limits": {"min_tokens": setup.threshold},
            "secret": setup.secret,
            "admin": None,
        }
    )


def _configs(setup: Setup) -> tuple[NodeConfig, NodeConfig, NodeConfig]:
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
    d = replace(
        base,
        role="decode",
        connector=setup.d,
        prefix_caching=setup.d_cache,
        num_blocks=setup.blocks(setup.d_room),
        bidirectional=setup.keeps_at_d,
    )
    return p, d, replace(base, role="single", prefix_caching=False, num_blocks=setup.blocks(4.0))


@contextlib.asynccontextmanager
async def open_cluster(setup: Setup) -> AsyncIterator[Cluster]:
    """A cluster for as long as the context lasts."""
    clock, fabric, watch, oracle_clock = ManualClock(setup.start), LocalFabric(), Watch(), OracleClock()
    p_config, d_config, oracle_config = _configs(setup)
    p = Node(p_config, NodeClock(clock, watch, "P"), fabric)
    d = Node(d_config, NodeClock(clock, watch, "D"), fabric)
    oracle = Node(oracle_config, oracle_clock, fabric)
    async with contextlib.AsyncExitStack() as stack:
        for node in (p, d, oracle):
            node.address = (await node.start()).removeprefix("http://")
            stack.push_async_callback(node.stop)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        cluster = Cluster(setup, clock, watch, p, d, oracle, oracle_clock, session, stack)
        await cluster.start_router()
        yield cluster
