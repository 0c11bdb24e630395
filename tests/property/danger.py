"""What a danger is: a history that goes well, and goes wrong without its guard."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from property.history import History, Talk
from property.levels import LEVELS
from property.verdict import WrongAnswerError

Patch = pytest.MonkeyPatch
LONG = 2  # of `history.TEXTS`, and of `history.SYSTEMS`
TALKS = (Talk(system=LONG), Talk(system=1), Talk(system=LONG, salt="salt"))


@dataclass(frozen=True)
class Danger:
    """One danger.

    Attributes:
        history: where it comes up.
        level: at which the guard stands.
        unguard: removes the guard.
        levels: at which it is no danger, guarded.
        error: what comes of it without the guard.
        says: what is in its text, where others of its kind would prove nothing.
    """

    history: History
    level: str
    unguard: Callable[[Patch], None]
    levels: tuple[str, ...] = tuple(LEVELS)
    error: type[AssertionError] = WrongAnswerError
    says: str | None = None
