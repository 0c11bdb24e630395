"""Sweeps as pictures, readable on light and on dark pages."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: it would keep every figure
from matplotlib.ticker import FuncFormatter

from scale.figures import Figures
from scale.sweeps import Sweep
from scale.tables import Runs

_STYLES = {
    "spread": ("#8a8a8a", ":", "s"),
    "one-way": ("#c0562b", "-", "o"),
    "lazy": ("#b8901f", "--", "^"),
    "eager": ("#178fa3", "-.", "v"),
    "auto": ("#6a5acd", "-", "D"),
}
_INK, _PAPER = "#222222", "#ffffff"  # the picture brings its own page, so that dark pages cannot swallow its text

Panel = tuple[str, Callable[[Figures], float | None]]


def draw(sweep: Sweep, runs: Runs, panels: list[Panel], path: Path, *, logarithmic: bool) -> None:
    """One panel beside the other, one line for each way.

    Args:
        sweep: what is varied.
        runs: what it gave.
        panels: label of the vertical axis, and what to read from a run.
        path: of the PNG.
        logarithmic: whether the horizontal axis is.
    """
    figure = Figure(figsize=(4.3 * len(panels), 3.4), layout="constrained", facecolor=_PAPER)
    for axes, (label, value) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(axes, sweep, runs, value, label)
        if logarithmic:
            axes.set_xscale("log")
        axes.set_xticks([p.value for p in sweep.points], [p.label for p in sweep.points], fontsize=8)
        axes.minorticks_off()
    figure.suptitle(sweep.title, fontsize=10, color=_INK)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=len(labels), loc="outside lower center")
    figure.savefig(path, dpi=90)


def _panel(axes: Axes, sweep: Sweep, runs: Runs, value: Callable[[Figures], float | None], label: str) -> None:
    for way, found in runs.items():
        colour, line, marker = _STYLES[way]
        dots = [(p.value, v) for p, f in zip(sweep.points, found, strict=True) if (v := value(f)) is not None]
        axes.plot(*zip(*dots, strict=True), color=colour, linestyle=line, marker=marker, markersize=4, label=way)
    if "ms" in label:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(sweep.axis, fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def milliseconds(percentile: int) -> Panel:
    """Time to first token of later turns."""
    return f"TTFT p{percentile} of later turns, ms", lambda f: f.ttft[percentile] * 1e3 if f.ttft else None


PANELS: dict[str, tuple[list[Panel], bool]] = {
    "pairs": ([milliseconds(50), milliseconds(99)], True),
    "ttl": (
        [("hits, % of later turns", lambda f: f.hit * 100), ("D pinned, % of its KV", lambda f: f.pinned[0] * 100)],
        True,
    ),
    "cache": ([milliseconds(50), milliseconds(90), ("tokens P computes per turn", lambda f: f.computed)], True),
    "load": ([milliseconds(50), milliseconds(90)], False),
    "answers": ([milliseconds(50), ("tokens P computes per turn", lambda f: f.computed)], True),
    "link": ([milliseconds(50), milliseconds(90)], True),
}
"""By sweep: what is shown, and whether the horizontal axis is logarithmic."""
