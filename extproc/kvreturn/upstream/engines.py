"""Which engine lives at an address, so that the handles of one that was restarted are known to be dead."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from kvreturn.core.address import split_seat

# vLLM makes an id per process start, and of those of data-parallel engines one each of it: `{id}_dp{rank}`
# (EngineCoreProc.run_engine_core, vLLM 0.32.0).
_RANKED = re.compile(r"(.*)_dp(\d+)")
_PAST, _ADDRESSES = 8, 4096  # that are remembered


@dataclass(slots=True)
class _Life:
    start: str
    since: float
    ids: dict[str, None]  # in the order in which they were seen
    past: list[str] = field(default_factory=list)
    shared: bool = False


class Engines:
    """What answers have told, by address.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lives: dict[str, _Life] = {}

    def saw(self, node: str, engine: str) -> None:
        """An engine has answered at this node."""
        if not engine:
            return
        address, start = split_seat(node)[0], _start(engine)
        life = self._lives.get(address)
        if life is None:
            self._lives[address] = _Life(start, self._clock(), {engine: None})
            if len(self._lives) > _ADDRESSES:
                self._lives.pop(next(iter(self._lives)))
        elif life.start == start:
            life.ids[engine] = None
        else:
            # Nobody comes back from a restart: then a load balancer stands there, with several nodes behind it.
            life.shared = life.shared or start in life.past
            life.past = [*life.past, life.start][-_PAST:]
            life.start, life.since, life.ids = start, self._clock(), {engine: None}

    def gone(self, node: str, engine: str, age: float | None = None) -> bool:
        """Whether this engine, which once answered at this node, is known to live there no more.

        Args:
            node: an address, with or without a rank.
            engine: its id.
            age: seconds since it answered, if known: what answered before the present one came is gone, also if only
                another router has seen it.
        """
        life = self._lives.get(split_seat(node)[0])
        start = _start(engine)
        if life is None or life.shared or life.start == start:
            return False
        return start in life.past or (age is not None and self._clock() - age < life.since)

    def of(self, address: str) -> list[str]:
        """The ids of the engines that have answered at this address since its last restart."""
        life = self._lives.get(address)
        return list(life.ids) if life else []


def rank_of(engine: str) -> int | None:
    """The data-parallel rank that an engine's id tells, None if it tells none."""
    found = _RANKED.fullmatch(engine)
    return int(found[2]) if found else None


def _start(engine: str) -> str:
    found = _RANKED.fullmatch(engine)
    return found[1] if found else engine
