"""Where both legs are played: behind gateways that are there, or on simulated nodes of our own."""

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvreturn.bench.counters import Meters
from kvreturn.bench.run import Leg
from kvreturn.bench.sample import LegName
from kvreturn.bench.talk import Talk
from kvreturn.demo.stack import SimOptions, Stack, simulated
from kvreturn.envoy.process import Sink

_WAYS: Mapping[LegName, str] = {"off": "off", "on": "lazy"}


@dataclass(frozen=True, slots=True)
class Manner:
    """How to ask, wherever: see `Talk`."""

    api: str = "chat"
    stream: bool = True
    timeout: float = 300.0
    headers: Mapping[str, str] = field(default_factory=dict)

    def talk(self, session: aiohttp.ClientSession, url: str, model: str) -> Talk:
        """Ask there."""
        return Talk(session, url, model, self.api, self.stream, self.timeout, self.headers)


@dataclass(frozen=True, slots=True)
class Target:
    """A leg on a running deployment.

    Attributes:
        url: base URL of the gateway's API.
        meters: its counters, and the model's name.
    """

    url: str
    meters: Meters


@dataclass(frozen=True, slots=True)
class Ground:
    """Where it is played.

    Attributes:
        legs: both.
        stack: the processes that were started for it, if any.
    """

    legs: Mapping[LegName, Leg]
    stack: Stack | None = None

    async def play(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it, while the processes live.

        Raises:
            ProcessError: one of them died.
        """
        await (self.stack.while_alive(work) if self.stack else work)


Open = Callable[[aiohttp.ClientSession], contextlib.AbstractAsyncContextManager[Ground]]


@contextlib.asynccontextmanager
async def on_deployment(
    targets: Mapping[LegName, Target], manner: Manner, session: aiohttp.ClientSession
) -> AsyncIterator[Ground]:
    """Play on what is there."""
    yield Ground({name: Leg(manner.talk(session, t.url, t.meters.model), t.meters) for name, t in targets.items()})


@contextlib.asynccontextmanager
async def on_sim(
    options: SimOptions, manner: Manner, sink: Sink, progress: Callable[[str], None], session: aiohttp.ClientSession
) -> AsyncIterator[Ground]:
    """Play on the stack of `kvreturn demo`: real Envoy and router, simulated nodes.

    Raises:
        ProcessError: it did not start.
    """
    async with simulated(options, sink, progress) as stack:
        legs: dict[LegName, Leg] = {}
        for name, way in _WAYS.items():
            front = stack.fronts[way]
            meters = Meters([f"{front.prefill}/metrics"], [front.router_metrics], f"demo-{way}")
            legs[name] = Leg(manner.talk(session, front.gateway, meters.model), meters)
        yield Ground(legs, stack)


def targets(
    urls: Sequence[str], models: Sequence[str], prefill: Sequence[str], routers: Sequence[Sequence[str]]
) -> dict[LegName, Target]:
    """Both legs' targets; of each pair, what is off comes first."""
    meters = [Meters(prefill, metrics, model) for metrics, model in zip(routers, models, strict=True)]
    off, on = (Target(*each) for each in zip(urls, meters, strict=True))
    return {"off": off, "on": on}
