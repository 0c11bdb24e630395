"""The report as pictures. Imports matplotlib: see `kvreturn.report.drawing`."""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvreturn.bench.run import Run
from kvreturn.bench.sample import LEGS, Sample
from kvreturn.bench.stats import Comparison, compare
from kvreturn.report import drawing
from kvreturn.report.drawing import OFF, ON, finish

_COLOURS = {"off": OFF, "on": ON}
_MARKERS = {"off": "s", "on": "o"}
_LABELS = {"off": "off: P computes the history", "on": "on: P reads it back"}


def save(run: Run, path: Path) -> None:
    """Write a picture, in the format of the path's ending. Both legs must have turns."""
    drawing.save(partial(_figure, run), path)


def svg(run: Run) -> str:
    """An `<svg>` element, in the text colour of the page it stands in."""
    return drawing.svg(partial(_figure, run))


def _figure(run: Run) -> Figure:
    figure = Figure(figsize=(8, 12), layout="constrained")
    prompts, turns, shares, rounds = figure.subplots(4)
    _by_prompt(prompts, run)
    _by_turn(turns, run)
    _shares(shares, run)
    _rounds(rounds, compare(run))
    return figure


def _by_prompt(axes: Axes, run: Run) -> None:
    for leg in LEGS:
        samples = run.samples(leg)
        axes.scatter(
            [s.input_num_tokens for s in samples],
            [s.ttft_ms for s in samples],
            s=18,
            alpha=0.7,
            linewidths=0,
            marker=_MARKERS[leg],
            color=_COLOURS[leg],
            label=_LABELS[leg],
        )
    axes.set(xlabel="prompt tokens", ylabel="TTFT, ms", ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    finish(axes, "TTFT by length of the prompt")


def _by_turn(axes: Axes, run: Run) -> None:
    for leg in LEGS:
        by_turn: dict[int, list[float]] = {}
        for sample in run.samples(leg):
            by_turn.setdefault(sample.turn + 1, []).append(sample.ttft_ms)
        turns = sorted(by_turn)
        medians = [statistics.median(by_turn[t]) for t in turns]
        axes.plot(turns, medians, f"{_MARKERS[leg]}-", color=_COLOURS[leg], label=leg)
        low, high = ([_quartile(by_turn[t], q) for t in turns] for q in (0, -1))
        axes.fill_between(turns, low, high, color=_COLOURS[leg], alpha=0.18, linewidth=0)
    axes.set(xlabel="turn of the conversation", ylabel="TTFT, ms", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(axes, "By turn: median, and the middle half")


def _quartile(values: Sequence[float], which: int) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[which] if len(values) > 1 else values[0]


def _shares(axes: Axes, run: Run) -> None:
    for leg in LEGS:
        times = sorted(s.ttft_ms for s in run.samples(leg) if _follows(s))
        shares = [100 * (i + 1) / len(times) for i in range(len(times))]
        axes.step(times, shares, where="post", color=_COLOURS[leg], label=leg)
    axes.set(xlabel="TTFT, ms", ylabel="% of follow-up turns", ylim=(0, 101), xlim=(0, None))
    finish(axes, "How many follow-up turns have begun to answer by then")


def _follows(sample: Sample) -> bool:
    return sample.turn > 0


def _rounds(axes: Axes, comparison: Comparison | None) -> None:
    ratios = comparison.by_round if comparison else []
    axes.bar(range(1, len(ratios) + 1), ratios, color=ON, width=0.6)
    axes.axhline(1, color=OFF, linestyle="--", label="no difference")
    axes.set(xlabel="round", ylabel="off / on", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(axes, "Ratio of the median TTFTs by round")
