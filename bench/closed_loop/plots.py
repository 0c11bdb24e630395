"""Runs as pictures."""

from collections import Counter
from pathlib import Path

from matplotlib.figure import Figure  # no pyplot: it would keep every figure

from closed_loop.running import Run
from closed_loop.scenarios import Scenario

_STEP = 30.0  # seconds of virtual time in one bar
_EAGER = {"tool_calls": "#1f97ad", "quick_gap": "#6cc3d2", "exploring": "#c9a227"}
_EAGER |= {"decode_pressure": "#0b5563", "decode_pins": "#3d7f73"}
_LAZY = {"evicted": "#d0702a", "prefill_pressure": "#8c3f0d", "default": "#b9b9b9", "wasted": "#6b6b6b"}
_OTHER = "#a487c0"


def choices(scenario: Scenario, run: Run, path: Path) -> None:
    """Why auto chose what, over time: eager upwards, lazy downwards."""
    bars = _bars(run)
    words = sorted({choice for _, counts in bars for choice in counts})
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    tops = {"eager": [0.0] * len(bars), "lazy": [0.0] * len(bars)}
    for word in words:
        choice, why = word.split()
        sign, colours = (1, _EAGER) if choice == "eager" else (-1, _LAZY)
        heights = [sign * counts[word] / max(counts.total(), 1) * 100 for _, counts in bars]
        times = [when for when, _ in bars]
        colour = colours.get(why, _OTHER)
        axes.bar(times, heights, width=0.9 * _STEP, bottom=tops[choice], color=colour, label=f"{choice}: {why}")
        tops[choice] = [top + height for top, height in zip(tops[choice], heights, strict=True)]
    edge = 0.0
    for phase in scenario.phases:
        axes.axvline(edge, color="black", linewidth=0.8)
        axes.text(edge + 5, 112, f"{phase.name}: {phase.agents} agents", fontsize=8)
        edge += phase.seconds
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="virtual seconds", ylabel="% of turns", ylim=(-105, 128), xlim=(0, edge))
    axes.set_yticks([-100, -50, 0, 50, 100], ["lazy 100", "50", "0", "50", "eager 100"])
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=80)


def _bars(run: Run) -> list[tuple[float, Counter[str]]]:
    """Choices of each step of time, and the middle of it."""
    bars: list[tuple[float, Counter[str]]] = []
    before: Counter[str] = Counter()
    begun = 0.0
    for when, counts in run.timeline:
        if when - begun >= _STEP:
            bars.append((begun + _STEP / 2, counts - before))
            begun, before = begun + _STEP, counts
    return bars
