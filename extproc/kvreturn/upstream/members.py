"""What answers about who is in a pool do to it."""

import asyncio
import logging
from collections.abc import Collection
from typing import Literal

from kvreturn.telemetry.nodes import NodeMetrics
from kvreturn.upstream.pool import Pool

log = logging.getLogger("kvreturn.pool")
Trouble = Literal["failed", "empty"]


class Members:
    """Takes answers about who is in a pool. One that cannot be used leaves the pool as it is.

    Args:
        pool: that they are about.
        metrics: counts those that cannot be used.

    Attributes:
        known: set once there was a first answer.
    """

    def __init__(self, pool: Pool, metrics: NodeMetrics) -> None:
        self.known = asyncio.Event()
        self._pool = pool
        self._metrics = metrics
        self._troubled: set[str] = set()

    def are(self, addresses: Collection[str], terminating: Collection[str] = ()) -> None:
        """These are all nodes, and those of them that are being taken away."""
        self._pool.update(sorted(addresses), terminating)
        self.known.set()

    def unknown(self, kind: Trouble, source: str, why: str) -> None:
        """There is no answer, or an empty one, which is taken for a mistake: nodes that are gone fail anyway."""
        self._metrics.discovery_errors.labels(self._pool.kind, kind).inc()
        if source not in self._troubled:
            self._troubled.add(source)
            log.warning("%s tells no %s nodes (%s); those that are known stay", source, self._pool.kind, why)

    def well(self, source: str) -> None:
        """There is an answer."""
        if source in self._troubled:
            self._troubled.discard(source)
            log.warning("%s tells %s nodes again", source, self._pool.kind)
