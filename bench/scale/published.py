"""The published measurement, in the model: one pair, 10 conversations of 5 turns, two clients, no think time.

The blog's script sends with two clients, each going round its five conversations; a turn adds 150 tokens and gets 300.
P has no prefix cache, D has one. Means are over all turns, first ones included, as the blog tells to take them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scale.figures import Tally
from scale.loop import Steps
from scale.nodes import Talk
from scale.rates import ANSWER, LONG, QUESTION, SHORT, TURNS, Rates, fitted
from scale.router import WAYS, Way
from scale.serving import Deployment, Serving
from scale.workload import Turn

CLIENTS, CONVERSATIONS = 2, 10
ONE_WAY, LAZY, EAGER = WAYS[1], WAYS[2], WAYS[3]


def conversation(prefix: int) -> list[Turn]:
    """One of the script's."""
    first = Turn(prefix + QUESTION, ANSWER, 0.0, "stop")
    return [first, *[replace(first, new=QUESTION)] * (TURNS - 1)]


def ttft(way: Way, prefix: int, rates: Rates, *, caching: bool = False) -> float:
    """Mean seconds to the first token.

    Args:
        way: to serve.
        prefix: tokens of the first prompt, without its question.
        rates: of the nodes.
        caching: whether P has its prefix cache, without which nothing can go back eagerly.
    """
    tally = Tally(0.0, float("inf"))
    serving = Serving(Deployment(rates, caching=caching), way, tally)
    turns = conversation(prefix)

    def client(numbers: Sequence[int]) -> Steps:
        talks = deque((Talk(number), iter(turns)) for number in numbers)
        while talks:
            talk, left = talks.popleft()
            turn = next(left, None)
            if turn:
                yield from serving.turn(talk, turn, 0.0 if talk.turns else None)
                talks.append((talk, left))

    for i in range(CLIENTS):
        serving.loop.spawn(client(range(i, CONVERSATIONS, CLIENTS)))
    serving.loop.run(3_600.0)
    times = [*tally.first, *tally.later]
    return sum(times) / len(times)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published mean and the model's, both in milliseconds."""

    prefix: int
    way: str
    published: float
    modelled: float

    @property
    def error(self) -> float:
        """Relative, of the model."""
        return self.modelled / self.published - 1


def compare(rates: Rates | None = None) -> list[Comparison]:
    """All TTFTs that were published."""
    rates = rates or fitted()
    return [
        Comparison(point.prefix, way.name, theirs, ttft(way, point.prefix, rates) * 1e3)
        for point in (SHORT, LONG)
        for way, theirs in ((ONE_WAY, point.ttft_off), (LAZY, point.ttft_on))
    ]
