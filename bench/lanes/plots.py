"""The report as pictures. Imports matplotlib: see `kvreturn.report.drawing`."""

from collections.abc import Callable
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvreturn.report import drawing
from kvreturn.report.drawing import ON, finish
from lanes.figures import Estimate, Figures, LoadFigures
from lanes.plan import BODIES
from lanes.run import Run
from lanes.waterfall import Waterfall

# Told apart on white and on black, also by the colour-blind; and by their markers.
_STYLES = {
    "envoy": ("#8a8f98", "s"),
    "portable": ("#1f97ad", "o"),
    "fast": ("#3f6fd1", "D"),
    "proxy": ("#d0702a", "^"),
    "vllm-router": ("#9a63c4", "v"),
}

_OVER = "#d64545"


def loads_svg(run: Run, figures: Figures) -> str:
    """How each grows with the load: delay, CPU, memory."""
    return drawing.svg(partial(_loads, run, figures))


def first_svg(run: Run, figures: Figures) -> str:
    """Time to first token by body size."""
    return drawing.svg(partial(_first, run, figures))


def waterfall_svg(falls: list[Waterfall]) -> str:
    """The request path, one picture for each size of body."""
    return drawing.svg(partial(_falls, falls))


def _loads(run: Run, figures: Figures) -> Figure:
    figure = Figure(figsize=(8, 11), layout="constrained")
    delays, cpu, memory = figure.subplots(3)
    _by_load(delays, run, figures, lambda f: f.delay_p50)
    delays.set(yscale="log", ylabel="ms, median")
    handles, labels = delays.get_legend_handles_labels()
    _finish(delays, "Delay of a token from node to client")
    _by_load(cpu, run, figures, lambda f: f.cpu)
    cpu.set(ylabel="ms of CPU time", ylim=(0, None))
    _finish(cpu, "CPU of everything in between, for 1,000 tokens")
    _by_load(memory, run, figures, lambda f: f.memory)
    memory.set(ylabel="KiB for each stream", yscale="log")
    _finish(memory, "Memory over idle")
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _finish(axes: Axes, title: str) -> None:
    """All share one legend, which stands elsewhere."""
    finish(axes, title)
    legend = axes.get_legend()
    if legend:
        legend.remove()


def _by_load(axes: Axes, run: Run, figures: Figures, what: Callable[[LoadFigures], Estimate]) -> None:
    for name, label in run.labels.items():
        colour, marker = _STYLES[name]
        found = [f for f in figures.loads if f.candidate == name]
        axes.plot([f.streams for f in found], [what(f).value for f in found], f"{marker}-", color=colour, label=label)
    over = [f for f in figures.loads if f.survived < 1]
    axes.plot([f.streams for f in over], [what(f).value for f in over], "x", color=_OVER, label="overload")
    streams = sorted({f.streams for f in figures.loads})
    axes.set(xscale="log", xlabel="streams of 30 tokens per second")
    axes.set_xticks(streams, [str(n) for n in streams])
    axes.minorticks_off()


def _first(run: Run, figures: Figures) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(run.labels)
    for index, (name, label) in enumerate(run.labels.items()):
        found = [f for f in figures.first if f.candidate == name]
        places = [i + width * (index - (len(run.labels) - 1) / 2) for i in range(len(found))]
        heights = [f.p50.value for f in found]
        axes.bar(places, heights, width=width * 0.9, color=_STYLES[name][0], label=label)
        for x, y in zip(places, heights, strict=True):
            axes.annotate(f"{y:.2g}", (x, y), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(BODIES)), list(BODIES.values()))
    axes.set(yscale="log", ylabel="ms, median", xlabel="request body")
    handles, labels = axes.get_legend_handles_labels()
    _finish(axes, "Time to first token")
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    axes.grid(visible=False, axis="x")
    return figure


def _falls(falls: list[Waterfall]) -> Figure:
    figure = Figure(figsize=(8, 3 * len(falls)), layout="constrained")
    for axes, fall in zip(figure.subplots(len(falls), squeeze=False)[:, 0], falls, strict=True):
        names = [bar.step for bar in fall.bars]
        axes.barh(names, [bar.length for bar in fall.bars], left=[bar.begin for bar in fall.bars], color=ON)
        for bar in fall.bars:
            axes.annotate(f" {bar.length:.2f}", (bar.begin + bar.length, bar.step), va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="ms since the router has the request's headers", xlim=(0, fall.router * 1.08))
        finish(axes, f"Request path, {BODIES[fall.body]} body")
        axes.grid(visible=False, axis="y")
    return figure
