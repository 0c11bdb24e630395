"""A run as one thing to show, in whatever form."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvreturn.bench.counters import Look
from kvreturn.bench.doubts import Doubt, doubts, reuse_share
from kvreturn.bench.run import Run
from kvreturn.bench.sample import LEGS, LegName
from kvreturn.bench.stats import Comparison, compare, tables

_SLOWER = 0.95


@dataclass(frozen=True, slots=True)
class LegSummary:
    """One leg.

    Attributes:
        requests: turns that were answered.
        failures: turns that were not.
        seconds: that it was played for, in all rounds.
        tables: rows of statistics by field.
        look: what nodes and routers counted.
    """

    requests: int
    failures: int
    seconds: float
    tables: Mapping[str, Mapping[str, float]]
    look: Look

    @property
    def requests_per_sec(self) -> float:
        """Turns answered per second."""
        return self.requests / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        look = self.look
        return {
            "requests": self.requests,
            "failures": self.failures,
            "runtime_sec": self.seconds,
            "requests_per_sec": self.requests_per_sec,
            "statistics": self.tables,
            "prefill": {
                "prefix_caching": look.caching,
                "local_cache_share": look.local,
                "read_back_share": look.read,
                "computed_share": look.computed,
                "transfer_bytes_per_sec": look.rate,
            },
            "outcomes": dict(look.turns.most_common()) if look.routers else None,
            "reuse_share": reuse_share(look),
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that is shown.

    Attributes:
        params: what was asked for, by option.
        legs: both.
        comparison: of both; None if nothing can be compared.
        doubts: worst first.
        simulated: whether the nodes are.
    """

    params: Mapping[str, str]
    legs: Mapping[LegName, LegSummary]
    comparison: Comparison | None
    doubts: Sequence[Doubt]
    simulated: bool

    @property
    def void(self) -> bool:
        """Whether the comparison means nothing."""
        return any(d.level == "void" for d in self.doubts)

    @property
    def verdict(self) -> str:
        """In a sentence."""
        c = self.comparison
        if c is None or self.void:
            return "Nothing to compare: " + next(d.text for d in self.doubts if d.level == "void")
        turns = f"{len(c.pairs):,} follow-up turns"
        if c.ratio < _SLOWER:
            how = f"{1 / c.ratio:.2f} times longer"
        elif c.ratio < 1 / _SLOWER:
            how = "about the same"
        else:
            how = f"{c.ratio:.2f} times shorter"
        low, high = min(c.by_round), max(c.by_round)
        rounds = f"; off/on {low:.2f} to {high:.2f} in single rounds" if len(c.by_round) > 1 else ""
        where = " on simulated nodes" if self.simulated else ""
        return (
            f"With read-back, time to first token is {how}{where}: {c.on_ms:,.0f} ms instead of {c.off_ms:,.0f} "
            f"(medians of {turns}{rounds}); {abs(c.saved_ms):,.0f} ms "
            f"{'saved' if c.saved_ms >= 0 else 'lost'} per turn on average."
        )

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "verdict": self.verdict,
            "meaningful": not self.void,
            "simulated": self.simulated,
            "params": dict(self.params),
            "comparison": self.comparison and self.comparison.as_json(),
            "legs": {name: leg.as_json() for name, leg in self.legs.items()},
            "warnings": [asdict(d) for d in self.doubts],
        }


def summarize(run: Run, params: Mapping[str, str], *, simulated: bool) -> Summary:
    """Draw the conclusions."""
    legs = {}
    for leg in LEGS:
        samples = run.samples(leg)
        seconds = sum(p.seconds for p in run.played if p.leg == leg)
        legs[leg] = LegSummary(len(samples), len(run.failures(leg)), seconds, tables(samples), run.look(leg))
    return Summary(params, legs, compare(run), doubts(run, simulated=simulated), simulated)


def percent(share: float | None) -> str:
    """For people."""
    return "-" if share is None else f"{share:.1%}"


def counted(leg: LegSummary) -> list[tuple[str, str]]:
    """What nodes and routers counted in a leg, for people."""
    look = leg.look
    caching = {None: "not asked", True: "on", False: "off"}[look.caching]
    outcomes = ", ".join(f"{n:,} {name}" for name, n in look.turns.most_common())
    return [
        ("requests", f"{leg.requests:,}"),
        ("failures", f"{leg.failures:,}"),
        ("requests per second", f"{leg.requests_per_sec:,.2f}"),
        ("P's prefix cache", caching),
        ("prompt tokens in P's own cache", percent(look.local)),
        ("prompt tokens read back from D", percent(look.read)),
        ("prompt tokens computed by P", percent(look.computed)),
        ("read at", "-" if look.rate is None else f"{look.rate / 1e9:,.2f} GB/s"),
        ("follow-up turns with reuse", percent(reuse_share(look))),
        ("outcomes", outcomes or ("none" if look.routers else "not asked")),
    ]
