"""One run: a scenario, a way, a seed."""

import asyncio
import contextlib
import random
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from closed_loop import virtual
from closed_loop.agents import Message, Turn, agent
from closed_loop.gateway import Gateway
from closed_loop.scenarios import Phase, Scenario, Way
from kvreturn.config import Settings
from kvreturn.server.service import ExternalProcessor
from kvreturn.server.world import World
from kvreturn.sim import LocalFabric, NodeConfig, SimNode

_LOOK = 2.0  # seconds between two looks at D's pins and the choices

Counts = Counter[str]


@dataclass(slots=True)
class Part:
    """What a phase of a run gave.

    Attributes:
        phase: its name.
        seconds: how long it took.
        turns: that ended in it.
        failures: of these, by kind.
        first: seconds to the first byte of each turn that did not fail.
        outcomes: of its turns, by the router's word.
        choices: `eager why` or `lazy why` of its turns.
        computed: prompt tokens that P computed, for turns and for returns.
        read: tokens that P read from D, for turns and for returns.
        pinned: share of D's blocks that were pinned, at each look.
    """

    phase: str
    seconds: float
    turns: int = 0
    failures: Counts = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    outcomes: Counts = field(default_factory=Counter)
    choices: Counts = field(default_factory=Counter)
    computed: int = 0
    read: int = 0
    pinned: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Turns per second that did not fail."""
        return len(self.first) / self.seconds

    def quantile(self, percent: int) -> float:
        """Seconds to first byte."""
        return statistics.quantiles(self.first, n=100, method="inclusive")[percent - 1]


@dataclass(slots=True)
class Run:
    """What a run gave.

    Attributes:
        parts: by phase.
        timeline: choices so far, `eager why` or `lazy why`, at each look; times count from the first phase's start.
    """

    parts: list[Part] = field(default_factory=list)
    timeline: list[tuple[float, Counts]] = field(default_factory=list)


def play(scenario: Scenario, way: Way, seed: int) -> Run:
    """Run it in virtual time."""
    random.seed(seed)  # the router looks at nodes at random intervals
    return virtual.run(_play(scenario, way, seed))


async def _play(scenario: Scenario, way: Way, seed: int) -> Run:
    async with deployed(scenario.nodes(way), partial(scenario.settings, way)) as deployment:
        observer = _Observer(deployment)
        tasks = [
            asyncio.create_task(agent(number, seed, observer.ask, observer.active))
            for number in range(max(phase.agents for phase in scenario.phases))
        ]
        try:
            return await observer.watch(scenario)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            await deployment.world.returns.drain(0.0)
            for end in ends:
                if isinstance(end, Exception):  # an agent never ends by itself
                    raise end


@dataclass(frozen=True, slots=True)
class Deployed:
    """One P, one D and a router, in virtual time."""

    gateway: Gateway
    world: World
    prefill: SimNode
    decode: SimNode


@contextlib.asynccontextmanager
async def deployed(
    nodes: tuple[NodeConfig, NodeConfig], settings: Callable[[str, str], dict[str, Any]]
) -> AsyncIterator[Deployed]:
    """Run them.

    Args:
        nodes: P's and D's settings.
        settings: gives the router's for the two addresses.
    """
    clock, fabric = virtual.LoopClock(), LocalFabric()
    p, d = (SimNode(config, clock, fabric) for config in nodes)
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for node in (p, d):
            addresses.append((await node.start()).removeprefix("http://"))
            stack.push_async_callback(node.stop)
        world = World.create(Settings.model_validate(settings(*addresses)), clock=clock.now)
        await stack.enter_async_context(world.client)
        await stack.enter_async_context(world.pressure)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        )
        yield Deployed(Gateway(ExternalProcessor(world), session, addresses[1]), world, p, d)


class _Observer:
    """Stands between agents and gateway, and counts."""

    def __init__(self, on: Deployed) -> None:
        self._gateway, self._world, self._p, self._d = on.gateway, on.world, on.prefill, on.decode
        self._turns: list[Turn] = []
        self._agents = 0
        self._changed = asyncio.Event()

    async def ask(self, number: int, messages: list[Message]) -> Turn:
        turn = await self._gateway.ask(number, messages)
        self._turns.append(turn)
        if number >= self._agents:  # its conversation is over: a pause of minutes would be another scenario
            return Turn(turn.asked, turn.first, turn.ended, None)
        return turn

    async def active(self, number: int) -> None:
        while number >= self._agents:
            self._changed.clear()
            await self._changed.wait()

    async def watch(self, scenario: Scenario) -> Run:
        """Let the phases pass."""
        self._let(scenario.phases[0].agents)
        await asyncio.sleep(scenario.warm_up)
        begun, run = asyncio.get_running_loop().time(), Run()
        at_start = self._choices()
        for phase in scenario.phases:
            self._let(phase.agents)
            run.parts.append(await self._part(phase, begun, run, at_start))
        return run

    def _let(self, agents: int) -> None:
        self._agents = agents
        self._changed.set()

    async def _part(self, phase: Phase, begun: float, run: Run, at_start: Counts) -> Part:
        part = Part(phase.name, phase.seconds)
        self._turns.clear()
        outcomes, choices, before = self._outcomes(), self._choices(), self._p.stats
        looks = round(phase.seconds / _LOOK)
        for _ in range(looks):
            await asyncio.sleep(_LOOK)
            part.pinned.append(len(self._d.engine.holds.held("pin")) / self._d.config.num_blocks)
            run.timeline.append((asyncio.get_running_loop().time() - begun, self._choices() - at_start))
        after = self._p.stats
        part.turns = len(self._turns)
        part.failures.update(t.failure for t in self._turns if t.failure)
        part.first = [t.first for t in self._turns if not t.failure]
        part.outcomes, part.choices = self._outcomes() - outcomes, self._choices() - choices
        part.computed = after.computed_tokens - before.computed_tokens
        part.read = after.read_tokens - before.read_tokens
        return part

    def _outcomes(self) -> Counts:
        return Counter({labels["outcome"]: value for labels, value in self._samples(self._world.metrics.turns)})

    def _choices(self) -> Counts:
        samples = self._samples(self._world.metrics.return_choices)
        return Counter({f"{labels['choice']} {labels['why']}": value for labels, value in samples})

    @staticmethod
    def _samples(counter: Any) -> Iterator[tuple[dict[str, str], int]]:  # noqa: ANN401 - a Prometheus counter
        for family in counter.collect():
            for sample in family.samples:
                yield sample.labels, int(sample.value)
