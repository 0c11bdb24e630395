"""What is learned of eager returns: of each once, and nothing of those that are too many to be watched."""

from typing import Any

import pytest

from kvreturn.core import unseen as module
from kvreturn.core.choice import Chooser
from kvreturn.core.unseen import Unseen

P = "10.0.0.1:8000"


class Told(Chooser):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.fates: list[tuple[Any, ...]] = []

    def learned(self, *told: Any) -> None:  # noqa: ANN401 - any of the arguments
        self.fates.append(told)


def test_a_return_that_somebody_came_for_is_told_once() -> None:
    told = Told()
    unseen = Unseen(told)
    unseen.add(b"a", P, "stop", 0.0)
    assert unseen.came(b"a", "evicted", 5.0)
    assert not unseen.came(b"a", "used", 6.0)
    assert unseen.give_up(10_000.0) == []
    assert told.fates == [(P, "stop", "evicted", 5.0)]


def test_one_that_nobody_came_for_is_given_up_after_ten_minutes() -> None:
    told = Told()
    unseen = Unseen(told)
    unseen.add(b"a", P, None, 0.0)
    unseen.add(b"b", P, "stop", 1.0)
    assert unseen.give_up(599.9) == []
    assert unseen.give_up(600.0) == [(b"a", P, None)]
    assert unseen.give_up(600.0) == []
    assert not unseen.came(b"a", "used", 601.0)
    assert told.fates == []


def test_those_that_are_too_many_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 2)
    told = Told()
    unseen = Unseen(told)
    for i in range(3):
        unseen.add(b"%d" % i, P, "stop", 0.0)
    assert unseen.give_up(1.0) == []
    unseen.came(b"0", "used", 2.0)
    unseen.came(b"1", "used", 3.0)
    assert told.fates == [(P, "stop", "used", 3.0)]
