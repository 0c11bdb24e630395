"""The report as pictures. Imports matplotlib, which takes half a second: import this only where one is wanted."""

import io
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: it would keep every figure

from kvreturn.analyze.analysis import Analysis
from kvreturn.analyze.report import Report

# Both can be told apart, also by the colour-blind, on white and on black.
_OFF, _ON = "#d0702a", "#1f97ad"
_INK = "#010203"  # stands for the page's own text colour, see `svg`


def save(analysis: Analysis, report: Report, path: Path) -> None:
    """Write a picture, in the format of the path's ending."""
    _figure(analysis, report, "black").savefig(path, dpi=150)


def svg(analysis: Analysis, report: Report) -> str:
    """An `<svg>` element, in the text colour of the page it stands in."""
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure = _figure(analysis, report, _INK)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def _figure(analysis: Analysis, report: Report, ink: str) -> Figure:
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colours: dict[Any, str] = dict.fromkeys(names, ink)
    with mpl.rc_context(colours):
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
    axes.step([max(x, 0.1) for x, _ in points], [100 * y for _, y in points], where="post", color=_ON)
    axes.axvline(analysis.options.ttl, color=_OFF, linestyle="--", label=f"TTL {analysis.options.ttl:g} s")
    axes.set(xscale="log", xlabel="seconds between two turns", ylabel="% of follow-up turns", ylim=(0, 101))
    axes.set_title("How soon the next turn comes", loc="left")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False, loc="lower right")


def _ttls(axes: Axes, analysis: Analysis, report: Report) -> None:
    ttls = [r.ttl_s for r in report.ttls]
    lines = axes.plot(
        ttls,
        [100 * r.covered_token_share for r in report.ttls],
        "o-",
        color=_ON,
        label="repeated tokens within the TTL",
    )
    axes.set(xscale="log", xlabel="TTL, s", ylabel="% of repeated tokens", ylim=(0, 101))
    axes.set_xticks(ttls, [f"{t:g}" for t in ttls])
    axes.minorticks_off()
    axes.set_title("What each TTL covers, and what D holds for it", loc="left")
    axes.grid(visible=True, alpha=0.3)
    memory = axes.twinx()
    lines += memory.plot(ttls, [r.pinned_mean_gb for r in report.ttls], "s--", color=_OFF, label="KV held on D")
    memory.set_ylabel(f"GB, mean ({analysis.options.rates.bytes_per_token:,} bytes/token)")
    memory.set_ylim(bottom=0)
    memory.legend(handles=lines, frameon=False, loc="lower right")


def _prefill(axes: Axes, analysis: Analysis) -> None:
    tally = analysis.tally
    for times, colour, label in (
        (tally.prefill_off, _OFF, "off: P computes all"),
        (tally.prefill_on, _ON, "on: P reads back"),
    ):
        points = times.points()
        values = [max(x * 1e3, 1) for x, _ in points]
        axes.step(values, [100 * y for _, y in points], where="post", color=colour, label=label)
    axes.set(xscale="log", xlabel="ms of prefill in a follow-up turn", ylabel="% of follow-up turns", ylim=(0, 101))
    axes.set_title("Prefill time, estimated at the given rates", loc="left")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False, loc="lower right")


def _outcomes(axes: Axes, report: Report) -> None:
    names = list(reversed(report.outcomes))
    axes.barh(names, [report.outcomes[n] for n in names], color=_ON)
    axes.set_xlabel("turns")
    axes.set_title("Outcomes in the turn log", loc="left")
    axes.grid(visible=True, axis="x", alpha=0.3)
