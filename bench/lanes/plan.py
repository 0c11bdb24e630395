"""How much is measured."""

from dataclasses import dataclass

from lanes.tools import Load

BODIES = {10_000: "10 KB", 100_000: "100 KB", 1_000_000: "1 MB"}
"""Request bodies by size in bytes."""
LOADS = (20, 256, 1000)
"""Streams of 30 tokens per second."""
RATE = 30
_LADDER = (64, 96, 128, 192, 256, 384, 512, 768, 1000, 1500, 2000, 3000)


@dataclass(frozen=True)
class Plan:
    """How much.

    Attributes:
        name: of it.
        bodies: rounds of first tokens.
        requests: in each of these.
        rounds: by number of streams.
        seconds: of each load's window.
        warm: seconds before it, by number of streams: the turns begin then, and each costs some milliseconds.
        ladder: numbers of streams to find the highest that is sustained, ascending.
        climb: seconds of each of these.
        rest: seconds in which all stand still, to see what they use then.
    """

    name: str
    bodies: int
    requests: int
    rounds: dict[int, int]
    seconds: float
    warm: dict[int, float]
    ladder: tuple[int, ...]
    climb: float
    rest: float

    def load(self, streams: int) -> Load:
        """The client's part."""
        return Load(streams, RATE, seconds=self.seconds, warm=self.warm[streams])

    def rung(self, streams: int) -> Load:
        """The client's part on a rung of the ladder."""
        return Load(streams, RATE, seconds=self.climb, warm=1.0 + streams / 200)


FULL = Plan("full", 7, 30, {20: 5, 256: 5, 1000: 3}, 4.0, {20: 1.5, 256: 2.5, 1000: 6.0}, _LADDER, 2.5, 10.0)
SHORT = Plan("short", 3, 10, {20: 2, 256: 2, 1000: 1}, 1.2, {20: 0.6, 256: 1.4, 1000: 1.8}, (), 0.0, 4.0)
