"""What several routers learn of eager returns whose next turn comes to any of them."""

from typing import Any

import pytest

from kvreturn.core.choice import Chooser
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Taken
from kvreturn.server.comers import Comers
from kvreturn.server.tasks import Tasks
from support.harness import Clock, harness, settings

P = "10.0.0.1:8100"


class Routers:
    """Two of them with one store, and what they learn."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.tasks = Tasks()
        worlds = [harness(clock=self.clock).world for _ in range(2)]
        worlds[1].guard = worlds[0].guard
        self.worlds = worlds
        for world in worlds:
            world.settings = settings(store={"url": "redis://shared"})
        self.choosers = [Chooser(), Chooser()]
        self.comers = [Comers(w, c, self.tasks) for w, c in zip(worlds, self.choosers, strict=True)]

    async def overdue(self) -> None:
        """Ten minutes later."""
        await self.tasks.drain(1.0)
        self.clock.now += 600
        for comers in self.comers:
            comers.give_up()
        await self.tasks.drain(1.0)

    def habits(self) -> list[dict[Any, int]]:
        return [chooser.view().habits["stop"].fates for chooser in self.choosers]

    def evictions(self) -> list[dict[Any, int]]:
        return [chooser._prefill.of(P).standing.fates.tally() for chooser in self.choosers]


@pytest.fixture
def routers() -> Routers:
    return Routers()


async def test_a_return_is_not_unused_because_its_next_turn_came_to_another_router(routers: Routers) -> None:
    a, b = routers.comers
    a.returned(b"1", P, "stop")
    a.returned(b"2", P, "stop")
    a.returned(b"3", P, "stop")
    b.came(b"1", "used", P)
    a.came(b"2", "evicted", P)
    await routers.overdue()
    assert routers.habits() == [{"evicted": 1, "used": 1, "unused": 1}, {}]
    assert routers.evictions() == [{"evicted": 1}, {"used": 1}]  # each by what it saw of P


async def test_while_the_store_is_away_nothing_is_learned(routers: Routers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_: object) -> Taken:
        return Taken(None, Outcome.STORE_UNAVAILABLE)

    routers.comers[0].returned(b"1", P, "stop")
    monkeypatch.setattr(routers.worlds[0].guard, "take", away)
    await routers.overdue()
    assert routers.habits() == [{}, {}]


async def test_without_a_shared_store_nothing_is_told(routers: Routers) -> None:
    routers.worlds[1].settings = settings()
    routers.comers[0].returned(b"1", P, "stop")
    routers.comers[1].came(b"1", "used", P)
    await routers.overdue()
    assert routers.habits() == [{"unused": 1}, {}]
