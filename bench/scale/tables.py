"""Runs as tables in Markdown."""

from collections.abc import Mapping, Sequence

from scale.figures import Figures
from scale.published import Comparison
from scale.rates import BYTES_PER_TOKEN
from scale.simulated import Agreement
from scale.sweeps import Sweep

Runs = Mapping[str, Sequence[Figures]]
"""By way, one for each point of a sweep."""


def of_sweep(sweep: Sweep, runs: Runs) -> list[str]:
    """One line for each point and way."""
    names = [
        "hit",
        "reused",
        "TTFT p50",
        "p90",
        "p99 ms",
        "P computes",
        "P busy",
        "D pinned, most",
        "D to P MB",
        "P to D MB",
    ]
    lines = [f"| {' | '.join([sweep.axis or 'case', 'way', *names])} |", "|---" * (len(names) + 2) + "|"]
    for i, point in enumerate(sweep.points):
        for way, found in runs.items():
            f = found[i]
            cells = [
                "" if way != next(iter(runs)) else point.label,
                way,
                f"{f.hit:.0%}",
                f"{f.reuse:.1%}",
                *(f"{f.ttft[p] * 1e3:,.0f}" if f.ttft else "-" for p in (50, 90, 99)),
                f"{f.computed:,.0f}",
                f"{f.busy:.0%}",
                f"{f.pinned[0]:.0%}, {f.pinned[1]:.0%}",
                f"{f.returned * BYTES_PER_TOKEN / 1e6:,.0f}",
                f"{f.moved * BYTES_PER_TOKEN / 1e6:,.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def of_regimes(sweep: Sweep, runs: Runs) -> list[str]:
    """What read-back gives in each case: auto against one-way."""
    lines = [
        "| case | TTFT p50 one-way | auto | p90 one-way | auto | P computes one-way | auto | less |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for i, point in enumerate(sweep.points):
        one, auto = runs["one-way"][i], runs["auto"][i]
        times = [
            f"{f.ttft[p] * 1e3:,.0f}" if f.ttft else f"{f.ttft_first[p] * 1e3:,.0f}"
            for p in (50, 90)
            for f in (one, auto)
        ]
        less = 1 - auto.computed / one.computed
        cells = [point.label, *times, f"{one.computed:,.0f}", f"{auto.computed:,.0f}", f"{less:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def of_published(rows: Sequence[Comparison], simulated: Sequence[float]) -> list[str]:
    """The published figures, the model's and the simulator's."""
    lines = ["| prompt | way | published | model | | simulator | |", "|---|---|---|---|---|---|---|"]
    for row, seconds in zip(rows, simulated, strict=True):
        theirs = seconds * 1e3
        lines.append(
            f"| {row.prefix:,} | {row.way} | {row.published:.0f} ms | {row.modelled:.0f} ms | {row.error:+.0%} "
            f"| {theirs:.0f} ms | {theirs / row.published - 1:+.0%} |"
        )
    return lines


def of_agreement(rows: Sequence[Agreement]) -> list[str]:
    """One line for each way: simulator, then model."""
    names = list(dict.fromkeys(row.figure for row in rows))
    lines = ["| way | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for way in dict.fromkeys(row.way for row in rows):
        mine = {row.figure: row for row in rows if row.way == way}
        cells = [f"{_short(mine[name].simulated)}, {_short(mine[name].modelled)}" for name in names]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3f}"  # noqa: PLR2004 - three digits
