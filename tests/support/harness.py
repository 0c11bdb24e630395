"""A router for tests: its service without a socket, a stub for prefill, and a clock that stands still."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter

from kvreturn.config import Settings
from kvreturn.core.ports import Ask
from kvreturn.server.service import ExternalProcessor
from kvreturn.server.world import World
from kvreturn.store.memory import MemoryStore
from kvreturn.telemetry.metrics import Metrics
from support.extproc import Envoy, Modes, Passed, Request, Response
from support.nodes import FakePrefill, Script, StubPrefill, chat, connector, decode_events, handle
from support.streams import LocalStream

DECODE = "10.0.0.2:8200"


def settings(**changes: Any) -> Settings:  # noqa: ANN401 - settings as YAML has them
    """Settings with two prefill nodes and one decode node, none of which exists."""
    plain: dict[str, Any] = {
        "pools": {"prefill": ["10.0.0.1:8100", "10.0.0.3:8100"], "decode": [DECODE]},
        "prefill": {"via": "direct"},
        "admin": None,
        "secret": "a secret of these tests",
    }
    return Settings.model_validate({**plain, **changes})


@dataclass
class Clock:
    """Monotonic seconds, moved by hand."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Harness:
    """One router.

    Attributes:
        settings: its settings.
        prefill: what it asks in place of prefill nodes; None for its own client.
        clock: its clock.
        world: its world.
        service: its service.
    """

    settings: Settings = field(default_factory=settings)
    prefill: StubPrefill | None = field(default_factory=StubPrefill)
    clock: Callable[[], float] = field(default_factory=Clock)
    world: World = field(init=False)
    service: ExternalProcessor = field(init=False)

    def __post_init__(self) -> None:
        self.world = World.create(self.settings, self.clock)
        if self.prefill:
            self.world.client = self.prefill
        self.service = ExternalProcessor(self.world)

    @property
    def stub(self) -> StubPrefill:
        """What it asks, where that is a stub."""
        assert self.prefill
        return self.prefill

    @property
    def asks(self) -> list[Ask]:
        """What the stub was asked."""
        return self.stub.asks

    @property
    def handles(self) -> int:
        """Handles in the store."""
        store = self.world.store
        assert isinstance(store, MemoryStore)
        return store.handles

    @property
    def records(self) -> int:
        """Records in the store, those without a handle included."""
        store = self.world.store
        assert isinstance(store, MemoryStore)
        return len(store)

    def metric(self, name: str, **labels: str) -> float:
        return self.world.metrics.value(f"kvreturn_{name}", **labels)

    def outcomes(self) -> dict[str, int]:
        """Turns by outcome, as the metrics count them."""
        return outcomes(self.world.metrics)

    def envoy(self, modes: Modes | None = None, role: str | None = None) -> Envoy:
        """A new exchange."""
        return Envoy(LocalStream(self.service, role), modes)

    async def play(
        self, request: Request, response: Response | Callable[[Passed], Response], modes: Modes | None = None
    ) -> Envoy:
        """A whole exchange, to the end of its stream."""
        envoy = self.envoy(modes)
        await envoy.play(request, response)
        assert not self.service.running
        return envoy

    async def turn(self, *contents: str, modes: Modes | None = None, **members: Any) -> Envoy:  # noqa: ANN401 - JSON
        """A chat turn that ends well: D says `Good morning` and leaves a handle."""
        response = Response(decode_events(params=handle()), node=DECODE)
        return await self.play(Request(pieces=[chat(*contents, **members)]), response, modes)


def harness(script: Script = connector, clock: Callable[[], float] | None = None, **changes: Any) -> Harness:  # noqa: ANN401
    """A router whose prefill nodes answer by `script`, with settings changed."""
    return Harness(settings(**changes), StubPrefill(script), clock or Clock())


def outcomes(metrics: Metrics) -> dict[str, int]:
    """Turns by outcome, as the metrics count them."""
    return counts(metrics.turns, "outcome")


def counts(counter: Counter, label: str) -> dict[str, int]:
    """What was counted, by one label."""
    found: dict[str, int] = {}
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                value = sample.labels[label]
                found[value] = found.get(value, 0) + int(sample.value)
    return found


@contextlib.asynccontextmanager
async def live(*nodes: FakePrefill | str, **changes: Any) -> AsyncIterator[Harness]:  # noqa: ANN401
    """A router with these prefill nodes, which it connects to, and a clock that runs."""
    addresses = [n if isinstance(n, str) else n.address for n in nodes]
    router = Harness(settings(pools={"prefill": addresses, "decode": [DECODE]}, **changes), None, time.monotonic)
    async with router.world.client:
        yield router


# Tasks that come and go by themselves: grpc.aio accepts streams in one, aiohttp's server keeps one for each connection,
# and health checks are made every few seconds.
_PEERS = ("AioServer", "RequestHandler.start", "HealthWatch._check")


def tasks() -> set["asyncio.Task[Any]"]:
    """All tasks but the one that asks, those of peers, and health checks."""
    own = asyncio.current_task()
    return {t for t in asyncio.all_tasks() if t is not own and not any(name in repr(t) for name in _PEERS)}


async def until(condition: Callable[[], object]) -> None:
    """Wait for something of which no event tells."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
