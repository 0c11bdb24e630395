"""How numbers are spread: turns, tokens, gaps."""

import math
import random
from dataclasses import dataclass
from typing import Self

_FORMS = "NUMBER, constant:N, uniform:LOW:HIGH, lognormal:MEAN[:MEDIAN/MEAN] or exponential:MEAN"
_MEDIAN_RATIO = 0.85  # of vLLM's multi-turn benchmark, if it is not told


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of numbers that are not negative.

    Attributes:
        kind: its name.
        first: value, lowest value or mean.
        second: highest value (uniform), median over mean (lognormal).
    """

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `lognormal:500` and the like; the kinds are those of vLLM's multi-turn benchmark, but for zipf.

        Raises:
            ValueError: says what can be given.
        """
        kind, _, rest = text.partition(":") if ":" in text else ("constant", "", text)
        try:
            numbers = [float(part) for part in rest.split(":")]
        except ValueError:
            raise ValueError(f"{text!r} is no distribution: give {_FORMS}") from None
        if kind == "lognormal" and len(numbers) == 1:
            numbers.append(_MEDIAN_RATIO)
        if len(numbers) != _NUMBERS.get(kind) or not all(0 <= n < math.inf for n in numbers):
            raise ValueError(f"{text!r} is no distribution of numbers from 0 on: give {_FORMS}")
        spread = cls(kind, *numbers)
        if kind == "uniform" and spread.second < spread.first:
            raise ValueError(f"{text!r}: the second number is below the first")
        if kind == "lognormal" and not (spread.first > 0 and 0 < spread.second < 1):
            raise ValueError(f"{text!r}: the mean must be above 0, and the median over it between 0 and 1")
        return spread

    @property
    def mean(self) -> float:
        """What draws come to on average."""
        return (self.first + self.second) / 2 if self.kind == "uniform" else self.first

    def draw(self, rng: random.Random) -> float:
        """One number."""
        match self.kind:
            case "uniform":
                return rng.uniform(self.first, self.second)
            case "lognormal":  # median = exp(mu), mean = exp(mu + sigma**2 / 2)
                return rng.lognormvariate(math.log(self.first * self.second), math.sqrt(2 * math.log(1 / self.second)))
            case "exponential":
                return rng.expovariate(1 / self.first) if self.first else 0.0
            case _:
                return self.first

    def __str__(self) -> str:
        """As `parse` reads it."""
        numbers = [self.first, self.second][: _NUMBERS[self.kind]]
        return ":".join([*([] if self.kind == "constant" else [self.kind]), *(f"{n:g}" for n in numbers)])


_NUMBERS = {"constant": 1, "uniform": 2, "lognormal": 2, "exponential": 1}
