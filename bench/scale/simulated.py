"""The model against the simulator: the product's router and kvreturn's simulated nodes, in virtual time.

Two comparisons. `agents`: what the agents of bench/closed_loop said to the simulator, and when, is played to the model
again. `published`: the published measurement (see `published.py`) on the simulator itself.
"""

import asyncio
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from closed_loop import virtual
from closed_loop.agents import Message, agent
from closed_loop.agents import Turn as Answered
from closed_loop.running import Deployed, deployed
from closed_loop.scenarios import SCALE, SCENARIOS, TIMING, Scenario
from closed_loop.scenarios import WAYS as CLOSED_WAYS
from closed_loop.scenarios import Way as ClosedWay
from kvreturn.sim import NodeConfig, Timing
from kvreturn.sim.words import WORDS
from scale.figures import Tally
from scale.published import CLIENTS, CONVERSATIONS
from scale.rates import ANSWER, QUESTION, TURNS, Rates
from scale.router import WAYS, Way
from scale.serving import Deployment, Serving
from scale.workload import Turn

_FIGURES = ("ttft_p50", "ttft_p90", "ttft_mean", "computed", "read", "pinned")
_LOOK = 2.0  # seconds between looks at D's pins
_AROUND = 3  # simulated tokens that the template puts around a message


@dataclass(frozen=True, slots=True)
class Agreement:
    """A figure, from both."""

    way: str
    figure: str
    simulated: float
    modelled: float


@dataclass(slots=True)
class _Heard:
    """What one conversation said."""

    begun: float
    turns: list[Turn]
    length: int
    ended: float
    opening: int


class _Recorder:
    """Between agents and gateway."""

    def __init__(self, on: Deployed) -> None:
        self._gateway = on.gateway
        self.conversations: list[_Heard] = []
        self._open: dict[int, _Heard] = {}
        self.first: list[float] = []
        self._asking: set[asyncio.Future[Answered]] = set()
        self._closed = asyncio.Event()

    async def ask(self, number: int, messages: list[Message]) -> Answered:
        if self._closed.is_set():
            await asyncio.get_running_loop().create_future()  # for ever
        asking = asyncio.ensure_future(self._gateway.ask(number, messages))
        self._asking.add(asking)
        answered = await asking
        self._asking.remove(asking)
        if answered.message is None:
            raise RuntimeError(f"a turn failed: {answered.failure}")
        prompt, output = answered.tokens
        begins = not any(message["role"] == "assistant" for message in messages)
        if begins:
            opening = len(str(messages[-1]["content"]).split())
            self._open[number] = _Heard(answered.asked, [], 0, answered.asked, opening)
            self.conversations.append(self._open[number])
        heard = self._open[number]
        finish = "tool_calls" if answered.message.get("tool_calls") else "stop"
        turn = Turn(prompt - heard.length, output, answered.asked - heard.ended, finish)
        heard.turns.append(turn)
        heard.length, heard.ended = prompt + output, answered.ended
        self.first.append(answered.first)
        return answered

    async def close(self) -> None:
        """Let nobody ask any more; what was asked is answered."""
        self._closed.set()
        await asyncio.gather(*self._asking)
        await asyncio.sleep(0)  # those who asked have it


def agents(scenario: Scenario, seconds: float, seed: int = 0) -> list[Agreement]:
    """Compare on a scenario of bench/closed_loop.

    Args:
        scenario: its first phase's agents, for so long, from empty nodes on.
        seconds: of virtual time.
        seed: of the agents.
    """
    found = []
    for closed, way in zip(CLOSED_WAYS, WAYS[1:], strict=True):
        random.seed(seed)  # the router looks at nodes at random intervals
        theirs, conversations = virtual.run(_simulate(scenario, closed, seconds, seed))
        ours = _model(scenario, way, seconds, conversations)
        found += [Agreement(way.name, name, theirs[name], ours[name]) for name in _FIGURES]
    return found


async def _simulate(
    scenario: Scenario, way: ClosedWay, seconds: float, seed: int
) -> tuple[dict[str, float], list[_Heard]]:
    async def active(_: int) -> None:
        return

    async with deployed(scenario.nodes(way), partial(scenario.settings, way)) as on:
        recorder, pinned = _Recorder(on), []
        tasks = [
            asyncio.create_task(agent(number, seed, recorder.ask, active))
            for number in range(scenario.phases[0].agents)
        ]
        for _ in range(round(seconds / _LOOK)):
            await asyncio.sleep(_LOOK)
            pinned.append(len(on.decode.engine.holds.held("pin")) / on.decode.config.num_blocks)
        await recorder.close()
        stats, turns = on.prefill.stats, len(recorder.first)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await on.world.returns.drain(0.0)
        for end in ends:
            if isinstance(end, Exception):
                raise end
    return _sum_up(recorder.first, stats.computed_tokens / turns, stats.read_tokens / turns, pinned), (
        recorder.conversations
    )


def _sum_up(first: Sequence[float], computed: float, read: float, pinned: Sequence[float]) -> dict[str, float]:
    deciles = statistics.quantiles(first, n=10, method="inclusive")
    numbers = deciles[4], deciles[8], statistics.fmean(first), computed, read, statistics.fmean(pinned)
    return dict(zip(_FIGURES, numbers, strict=True))


def _model(scenario: Scenario, way: Way, seconds: float, conversations: Sequence[_Heard]) -> dict[str, float]:
    p, d = scenario.nodes(CLOSED_WAYS[1])
    tally = Tally(0.0, seconds)
    shared = min(heard.turns[0].new - heard.opening for heard in conversations)  # system prompt and tools
    deployment = Deployment(
        Rates(TIMING, TIMING, front=0.0, room=0),
        ttl=d.decoder_ttl,
        budget=d.retention_budget,
        prefill_room=(p.num_blocks - 1) * p.block_size,
        decode_room=(d.num_blocks - 1) * d.block_size,
        shared=shared // p.block_size * p.block_size,
        block=p.block_size,
        threshold=p.recompute_threshold,
    )
    serving = Serving(deployment, way, tally)
    begun = 0.0
    arrivals = []
    for heard in sorted(conversations, key=lambda heard: heard.begun):
        arrivals.append((heard.begun - begun, heard.turns))
        begun = heard.begun
    serving.run(arrivals, 2 * seconds)  # all that were asked by then are answered, as in the simulator
    first = [*tally.first, *tally.later]
    computed = sum(p.computed for p in serving.prefill) / len(first)
    return _sum_up(first, computed, (tally.read + tally.returned) / len(first), tally.pinned)


def published(prefix: int, rates: Rates, *, read_back: bool) -> float:
    """The published measurement on simulated nodes with these rates. Gives mean seconds to the first token.

    As everywhere in bench/closed_loop, one simulated token stands for several. A simulated node has one fixed cost, so
    `rates.front` is part of it.
    """
    random.seed(0)
    return virtual.run(_published(prefix, rates, read_back=read_back))


async def _published(prefix: int, rates: Rates, *, read_back: bool) -> float:
    base = NodeConfig(
        connector="kvreturn",
        block_size=16 // SCALE,
        num_blocks=65_536,
        recompute_threshold=64 // SCALE,
        bidirectional=read_back,
        keep_requests=1,
    )
    fixed = rates.prefill.overhead + rates.front
    p = replace(base, role="prefill", timing=_scaled(rates.prefill, fixed), prefix_caching=False)
    d = replace(base, role="decode", timing=_scaled(rates.decode, rates.decode.overhead))
    way = CLOSED_WAYS[1] if read_back else CLOSED_WAYS[0]
    settings = partial(SCENARIOS["C"].settings, way)
    first: list[float] = []

    async def client(on: Deployed, numbers: Sequence[int]) -> None:
        talks = deque((number, [_user(prefix + QUESTION)]) for number in numbers)
        while talks:
            number, messages = talks.popleft()
            turn = await on.gateway.ask(number, messages, max_tokens=ANSWER // SCALE, ignore_eos=True, tools=None)
            assert turn.message
            first.append(turn.first)
            if len(messages) < 2 * TURNS - 1:
                talks.append((number, [*messages, turn.message, _user(QUESTION)]))

    async with deployed((p, d), settings) as on:
        await asyncio.gather(*(client(on, range(i, CONVERSATIONS, CLIENTS)) for i in range(CLIENTS)))
        await on.world.returns.drain(0.0)
    return statistics.fmean(first)


def _user(tokens: int) -> Message:
    words = random.choices(WORDS, k=tokens // SCALE - _AROUND)  # noqa: S311 - no secret
    return {"role": "user", "content": " ".join(words)}


def _scaled(timing: Timing, overhead: float) -> Timing:
    return replace(
        timing,
        prefill_rate=timing.prefill_rate / SCALE,
        decode_rate=timing.decode_rate / SCALE,
        bytes_per_token=timing.bytes_per_token * SCALE,
        overhead=overhead,
    )
