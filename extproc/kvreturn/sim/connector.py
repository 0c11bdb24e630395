"""What the connectors share: their errors, what they use of their engine, what they hand back."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvreturn.sim.blocks import BlockPool
from kvreturn.sim.clock import Clock
from kvreturn.sim.config import NodeConfig
from kvreturn.sim.fabric import Address, Fabric
from kvreturn.sim.holds import Holds, Kind
from kvreturn.sim.stats import Counters

T = TypeVar("T")


class LoadError(Exception):
    """The blocks could not be read. `reason` is a word of kvreturn's report."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StuckError(Exception):
    """The request waits for a load that nobody starts, until its client leaves; its blocks are then lost."""


class EngineDiedError(Exception):
    """An uncaught exception ended the engine process."""


class Services(Protocol):
    """What a connector uses of its engine."""

    id: str
    config: NodeConfig
    clock: Clock
    fabric: Fabric
    counters: Counters
    address: Address

    @property
    def pool(self) -> BlockPool:
        """The KV blocks."""
        ...

    @property
    def holds(self) -> Holds:
        """What is kept of finished requests."""
        ...

    def now(self) -> float:
        """The engine's own monotonic clock."""
        ...

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run in the background."""
        ...

    def die(self) -> None:
        """End the engine process."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer after the handshake.

    Attributes:
        address: where it is.
        engine_id: which engine it was.
        offset: its clock minus ours, seconds.
    """

    address: Address
    engine_id: str
    offset: float


@dataclass(frozen=True, slots=True)
class Farewell:
    """What remains of a finished sequence.

    Attributes:
        params: the handle for the response, or None.
        keep: how its blocks are kept, or None if they are freed.
        seconds: for how long.
        releasable: whether they may be let go before that, for want of room.
    """

    params: dict[str, Any] | None = None
    keep: Kind | None = None
    seconds: float = 0.0
    releasable: bool = False
