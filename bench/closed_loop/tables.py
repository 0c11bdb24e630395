"""Runs as tables in Markdown, and as numbers for others to read."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from closed_loop.running import Part, Run

Runs = Mapping[str, Sequence[Run]]
"""By way, one run for each seed."""

ALLOWED = 0.9
"""Of the better of lazy and eager: what auto must reach."""


def of_ways(runs: Runs, phase: int) -> list[str]:
    """One line for each way: medians over the seeds of one phase."""
    lines = [
        "| way | turns/s | failed | TTFT p50 ms | p99 ms | P computed | P read | D pinned | outcomes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, each in runs.items():
        parts = [run.parts[phase] for run in each]
        cells = [
            way,
            f"{_median(parts, lambda p: p.rate):.2f}",
            f"{sum(p.failures.total() for p in parts)}",
            f"{_median(parts, lambda p: p.quantile(50)) * 1e3:,.0f}",
            f"{_median(parts, lambda p: p.quantile(99)) * 1e3:,.0f}",
            f"{_median(parts, lambda p: p.computed / p.turns):,.0f}",
            f"{_median(parts, lambda p: p.read / p.turns):,.0f}",
            f"{_median(parts, lambda p: statistics.fmean(p.pinned)):.0%}",
            _shares(sum((p.outcomes for p in parts), Counter())),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def of_choices(runs: Runs) -> list[str]:
    """What auto chose and why, phase by phase, all seeds together."""
    auto = runs["auto"]
    lines = ["| phase | turns | eager | why |", "|---|---|---|---|"]
    for i, part in enumerate(auto[0].parts):
        choices = sum((run.parts[i].choices for run in auto), Counter[str]())
        total = max(choices.total(), 1)
        eager = sum(n for choice, n in choices.items() if choice.startswith("eager"))
        lines.append(f"| {part.phase} | {choices.total()} | {eager / total:.0%} | {_shares(choices)} |")
    return lines


def ratios(runs: Runs, phase: int) -> list[float]:
    """Turns per second of auto over those of the better of lazy and eager, seed by seed."""
    rates = {way: [run.parts[phase].rate for run in each] for way, each in runs.items()}
    return [
        auto / max(lazy, eager) for auto, lazy, eager in zip(rates["auto"], rates["lazy"], rates["eager"], strict=True)
    ]


def numbers(runs: Runs) -> dict[str, Any]:
    """Everything, by way, seed and phase."""
    return {
        way: [
            [
                {
                    "phase": part.phase,
                    "turns_per_second": round(part.rate, 4),
                    "turns": part.turns,
                    "failures": dict(part.failures),
                    "ttft_p50": round(part.quantile(50), 4),
                    "ttft_p99": round(part.quantile(99), 4),
                    "computed_tokens": part.computed,
                    "read_tokens": part.read,
                    "pinned": round(statistics.fmean(part.pinned), 4),
                    "outcomes": dict(part.outcomes),
                    "choices": dict(part.choices),
                }
                for part in run.parts
            ]
            for run in each
        ]
        for way, each in runs.items()
    }


def _median(parts: Sequence[Part], figure: Callable[[Part], float]) -> float:
    return statistics.median(map(figure, parts))


def _shares(counts: Counter[str]) -> str:
    total = max(counts.total(), 1)
    return ", ".join(f"{word} {count / total:.0%}" for word, count in counts.most_common())
