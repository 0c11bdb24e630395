"""The two pools of one router, and what keeps them up to date."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Self

from kvreturn.config import Settings
from kvreturn.telemetry.metrics import Metrics
from kvreturn.telemetry.nodes import NodeMetrics
from kvreturn.upstream.discovery import Discovery, asked_for
from kvreturn.upstream.health import HealthWatch
from kvreturn.upstream.pool import Kind, Pool


class Nodes:
    """Pools, finding out who is in them, and health checks. As an async context manager, it keeps them up to date.

    Args:
        settings: the router's.
        metrics: gets those of the pools too.
        clock: monotonic seconds.
        through: address of Envoy's prefill listener; None to connect to prefill nodes directly.

    Attributes:
        prefill: the prefill nodes.
        decode: the decode nodes.
    """

    def __init__(self, settings: Settings, metrics: Metrics, clock: Callable[[], float], through: str | None) -> None:
        def pool(kind: Kind) -> Pool:
            source = settings.pools.sources[kind]
            known = [] if asked_for(source, settings) else source.static
            return Pool(known, clock, kind=kind, ranks=source.ranks, errors=settings.health.errors)

        self.prefill, self.decode = pool("prefill"), pool("decode")
        both = self.prefill, self.decode
        told = NodeMetrics(metrics, {p.kind: p.states for p in both})
        for one in both:
            one.ejected = partial(_count, told, one.kind)
        self._discovery = Discovery(settings, both, told)
        self._health = HealthWatch({self.prefill: through, self.decode: None}, settings.health, clock)
        self._running = AsyncExitStack()

    def apply(self, settings: Settings) -> None:
        """Go by other settings from now on."""
        self._discovery.apply(settings)
        self._health.settings = settings.health
        self.prefill.errors = self.decode.errors = settings.health.errors

    async def __aenter__(self) -> Self:
        """Begin."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._discovery)
            await stack.enter_async_context(self._health)
            self._running = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        await self._running.aclose()


def _count(told: NodeMetrics, kind: Kind, reason: str) -> None:
    told.ejections.labels(kind, reason).inc()
