"""The report as pictures. Imports matplotlib: see `kvreturn.report.drawing`."""

from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvreturn.analyze.analysis import Analysis
from kvreturn.analyze.report import Report
from kvreturn.report import drawing
from kvreturn.report.drawing import OFF, ON, finish


def save(analysis: Analysis, report: Report, path: Path) -> None:
    """Write a picture, in the format of the path's ending."""
    drawing.save(partial(_figure, analysis, report), path)


def svg(analysis: Analysis, report: Report) -> str:
    """An `<svg>` element, in the text colour of the page it stands in."""
    return drawing.svg(partial(_figure, analysis, report))


def _figure(analysis: Analysis, report: Report) -> Figure:
    figure = Figure(figsize=(8, 11 if report.ttls else 4), layout="constrained")
    if report.ttls:
        gaps, ttls, prefill = figure.subplots(3)
        _gaps(gaps, analysis)
        _ttls(ttls, analysis, report)
        _prefill(prefill, analysis)
    else:
        _outcomes(figure.subplots(), report)
    return figure


def _gaps(axes: Axes, analysis: Analysis) -> None:
    points = analysis.tally.gaps.points()
    axes.step([max(x, 0.1) for x, _ in points], [100 * y for _, y in points], where="post", color=ON)
    axes.axvline(analysis.options.ttl, color=OFF, linestyle="--", label=f"TTL {analysis.options.ttl:g} s")
    axes.set(xscale="log", xlabel="seconds between two turns", ylabel="% of follow-up turns", ylim=(0, 101))
    axes.xaxis.set_major_formatter("{x:,g}")
    finish(axes, "How soon the next turn comes")


def _ttls(axes: Axes, analysis: Analysis, report: Report) -> None:
    ttls = [r.ttl_s for r in report.ttls]
    lines = axes.plot(
        ttls,
        [100 * r.covered_token_share for r in report.ttls],
        "o-",
        color=ON,
        label="repeated tokens",
    )
    axes.set(xscale="log", xlabel="TTL, s", ylabel="% within the TTL", ylim=(0, 101))
    axes.set_xticks(ttls, [f"{t:g}" for t in ttls])
    axes.minorticks_off()
    memory = axes.twinx()
    memory.spines["right"].set_visible(True)
    lines += memory.plot(ttls, [r.pinned_mean_gb for r in report.ttls], "s--", color=OFF, label="KV held on D")
    memory.set_ylabel(f"GB, mean ({analysis.options.rates.bytes_per_token:,} bytes/token)")
    memory.set_ylim(bottom=0)
    memory.yaxis.set_major_formatter("{x:,g}")
    finish(axes, "What each TTL covers and costs", lines)


def _prefill(axes: Axes, analysis: Analysis) -> None:
    tally = analysis.tally
    for times, colour, label in (
        (tally.prefill_off, OFF, "off: P computes all"),
        (tally.prefill_on, ON, "on: P reads back"),
    ):
        points = times.points()
        values = [max(x * 1e3, 1) for x, _ in points]
        axes.step(values, [100 * y for _, y in points], where="post", color=colour, label=label)
    axes.set(xscale="log", xlabel="ms of prefill in a follow-up turn", ylabel="% of follow-up turns", ylim=(0, 101))
    axes.xaxis.set_major_formatter("{x:,g}")
    finish(axes, "Prefill time, estimated")


def _outcomes(axes: Axes, report: Report) -> None:
    names = list(reversed(report.outcomes))
    axes.barh(names, [report.outcomes[n] for n in names], color=ON)
    axes.set_xlabel("turns")
    finish(axes, "Outcomes in the turn log")
    axes.grid(visible=False, axis="y")
