"""Numbers about samples: of each leg, and of both together."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvreturn.bench.run import Run
from kvreturn.bench.sample import LegName, Sample

FIELDS = (
    *("ttft_ms", "tpot_ms", "latency_ms", "input_num_turns", "input_num_tokens", "output_num_tokens"),
    "output_num_chunks",
)
"""What vLLM's multi-turn benchmark describes, in its order."""
COLUMNS = ("count", "mean", "std", "min", "25%", "50%", "75%", "90%", "99%", "max")
_QUANTILES = {"25%": 0.25, "50%": 0.5, "75%": 0.75, "90%": 0.9, "99%": 0.99}


def quantile(ordered: Sequence[float], q: float) -> float:
    """Of numbers in ascending order, between two of them by a straight line, as numpy and pandas do it."""
    at = (len(ordered) - 1) * q
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def describe(values: Sequence[float]) -> dict[str, float]:
    """The row of a table; `COLUMNS` are its names. There must be a value at least."""
    ordered = sorted(values)
    row = {
        "count": float(len(ordered)),
        "mean": statistics.fmean(ordered),
        "std": statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
        "min": ordered[0],
        **{name: quantile(ordered, q) for name, q in _QUANTILES.items()},
        "max": ordered[-1],
    }
    return {name: row[name] for name in COLUMNS}


def tables(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """A row for each of `FIELDS`, and for the TTFT of follow-up turns alone; none without samples."""
    rows = {name: [getattr(s, name) for s in samples] for name in FIELDS}
    rows["follow_up_ttft_ms"] = [s.ttft_ms for s in samples if s.turn > 0]
    return {name: describe(values) for name, values in rows.items() if values}


@dataclass(frozen=True, slots=True)
class Pair:
    """The same turn of the same conversation, in both legs."""

    off: Sample
    on: Sample


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both legs side by side, over follow-up turns that both have answered: first ones have nothing to reuse.

    Attributes:
        pairs: what is compared.
        off_ms: median TTFT without read-back.
        on_ms: median TTFT with it.
        saved_ms: mean of what each turn's TTFT fell by.
        by_round: ratio of the medians, off over on, in each round that has pairs.
        equal: share of pairs whose answers are the same.
    """

    pairs: Sequence[Pair]
    off_ms: float
    on_ms: float
    saved_ms: float
    by_round: Sequence[float]
    equal: float

    @property
    def ratio(self) -> float:
        """How many times shorter the median TTFT is with read-back."""
        return self.off_ms / self.on_ms

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "pairs": len(self.pairs),
            "ttft_off_median_ms": self.off_ms,
            "ttft_on_median_ms": self.on_ms,
            "ttft_ratio": self.ratio,
            "ttft_saving_mean_ms": self.saved_ms,
            "ttft_ratio_by_round": list(self.by_round),
            "equal_answers_share": self.equal,
        }


def compare(run: Run) -> Comparison | None:
    """Put the turns of both legs side by side; None if there are no such pairs."""
    off, on = (_by_place(run.samples(leg)) for leg in ("off", "on"))
    pairs = [Pair(off[place], on[place]) for place in off if place in on]
    if not pairs:
        return None
    rounds = sorted({p.off.round for p in pairs})
    medians = [
        (_median(of, "off"), _median(of, "on")) for of in ([p for p in pairs if p.off.round == r] for r in rounds)
    ]
    return Comparison(
        pairs=pairs,
        off_ms=_median(pairs, "off"),
        on_ms=_median(pairs, "on"),
        saved_ms=statistics.fmean(p.off.ttft_ms - p.on.ttft_ms for p in pairs),
        by_round=[a / b for a, b in medians],
        equal=statistics.fmean(p.off.text == p.on.text for p in pairs),
    )


def _by_place(samples: Sequence[Sample]) -> dict[tuple[int, str, int], Sample]:
    return {(s.round, s.conversation_id, s.turn): s for s in samples if s.turn > 0}


def _median(pairs: Sequence[Pair], leg: LegName) -> float:
    return statistics.median((p.off if leg == "off" else p.on).ttft_ms for p in pairs)
