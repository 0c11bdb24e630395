"""One data-parallel rank of a node: an engine that comes and goes, at a side channel that stays."""

from collections.abc import Sequence

from kvreturn.sim.engine import Engine
from kvreturn.sim.fabric import Address, Identity


class Rank:
    """What the side channel of one engine leads to; implements `fabric.SideChannel`.

    Attributes:
        address: of the side channel.
        engine: the engine that lives now; None before the first start.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine that lives now."""
        if self._engine is None:
            raise RuntimeError("the node is not running: await start() first")
        return self._engine

    def replace(self, engine: Engine | None) -> None:
        """Let another engine live here, or none; requests of the one before break off."""
        if self._engine is not None:
            self._engine.drop()
        self._engine = engine or self._engine

    def identity(self) -> Identity:
        """See `fabric.SideChannel`."""
        return self.engine.identity()

    def read(self, engine_id: str, blocks: Sequence[int], request_id: str, *, held_only: bool) -> bytes:
        """See `fabric.SideChannel`."""
        return self.engine.read(engine_id, blocks, request_id, held_only=held_only)

    def notify(self, engine_id: str, request_id: str) -> bool:
        """See `fabric.SideChannel`."""
        return self.engine.notify(engine_id, request_id)

    def heartbeat(self, engine_id: str, request_id: str) -> bool:
        """See `fabric.SideChannel`."""
        return self.engine.heartbeat(engine_id, request_id)
