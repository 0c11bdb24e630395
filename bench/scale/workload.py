"""Conversations: when they begin, and what each of their turns adds.

Without recordings they are drawn from distributions (fitted.json, made by fit.py; it names its sources).
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

Kind = Literal["agent", "chat"]

_FITTED = Path(__file__).with_name("fitted.json")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn.

    Attributes:
        new: tokens that its prompt adds to what the conversation has so far.
        output: tokens of the answer.
        gap: seconds since the answer before.
        finish: why the answer ends.
        last: whether nobody comes after it.
    """

    new: int
    output: int
    gap: float
    finish: str
    last: bool = False


class Draws(Protocol):
    """Where a quantity comes from."""

    def draw(self, rng: random.Random) -> float:
        """One value."""
        ...


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution.

    Attributes:
        median: of it.
        sigma: standard deviation of the logarithm.
        most: larger values are cut to this.
    """

    median: float
    sigma: float
    most: float = math.inf

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return min(rng.lognormvariate(math.log(self.median), self.sigma), self.most)


@dataclass(frozen=True, slots=True)
class Habits:
    """Of those who converse.

    Attributes:
        first: tokens of the first prompt.
        tool: tokens that a tool's result adds.
        question: tokens that a person's next question adds.
        call: tokens of an answer that calls a tool.
        answer: tokens of one that does not.
        tool_gap: seconds that a tool takes.
        user_gap: seconds that a person takes.
        calls: tool calls in a row, on average; 0 for mere chats.
        goes_on: how often a person has another question.
        shared: tokens that all first prompts have in common.
        longest: tokens that a conversation may have.
    """

    first: Draws
    tool: Draws
    question: Draws
    call: Draws
    answer: Draws
    tool_gap: Draws
    user_gap: Draws
    calls: float
    goes_on: float
    shared: int
    longest: int = 120_000

    def conversation(self, rng: random.Random) -> list[Turn]:
        """The turns of one."""
        turns: list[Turn] = []
        new, gap, length = max(self.first.draw(rng), self.shared + 1.0), 0.0, 0.0
        while True:
            calls = rng.random() < self.calls / (self.calls + 1)
            output = max((self.call if calls else self.answer).draw(rng), 1)
            length += new + output
            if length > self.longest and turns:
                break
            turns.append(Turn(max(int(new), 1), int(output), gap, "tool_calls" if calls else "stop"))
            if calls:
                new, gap = self.tool.draw(rng), self.tool_gap.draw(rng)
            elif rng.random() < self.goes_on:
                new, gap = self.question.draw(rng), self.user_gap.draw(rng)
            else:
                break
        turns[-1] = replace(turns[-1], last=True)
        return turns


def habits(kind: Kind) -> Habits:
    """The fitted ones."""
    found: dict[str, Any] = json.loads(_FITTED.read_text())["habits"][kind]
    found = {name: Spread(**value) if isinstance(value, dict) else value for name, value in found.items()}
    return Habits(**found)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Conversations that begin at random, each pair as many.

    Attributes:
        habits: of all.
        conversations: how many there are.
        rate: how many begin per second.
        seed: of everything.
    """

    habits: Habits
    conversations: int
    rate: float
    seed: int = 0

    def __iter__(self) -> Iterator[tuple[float, list[Turn]]]:
        """Seconds since the one before, and the turns: the same each time."""
        rng = random.Random(self.seed)  # noqa: S311 - no secret
        for _ in range(self.conversations):
            yield rng.expovariate(self.rate), self.habits.conversation(rng)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Conversations as they were recorded, at the same times.

    Attributes:
        conversations: seconds at which each began, and its turns.
    """

    conversations: list[tuple[float, list[Turn]]] = field(repr=False)

    def __iter__(self) -> Iterator[tuple[float, list[Turn]]]:
        """As `Arrivals`."""
        before = 0.0
        for begun, turns in self.conversations:
            yield begun - before, turns
            before = begun


Workload = Arrivals | Recorded
