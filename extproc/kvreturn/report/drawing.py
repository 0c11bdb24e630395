"""Pictures for reports. Imports matplotlib, which takes half a second: import this only where one is wanted."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: it would keep every figure

# Both can be told apart, also by the colour-blind, on white and on black.
OFF, ON = "#d0702a", "#1f97ad"
_INK = "#010203"  # stands for the page's own text colour, see `svg`
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")

Draw = Callable[[], Figure]
"""Draws in the colours that are set."""


def finish(axes: Axes, title: str, handles: Sequence[Artist] = ()) -> None:
    """Title, grid, and a legend on the title's line, where it hides no data: both must be short.

    Args:
        axes: drawn already.
        title: above it.
        handles: what the legend names; all that has a label if empty. Nothing labelled, no legend.
    """
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    named = handles or axes.get_legend_handles_labels()[0]
    if named:
        axes.legend(handles=named, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(named))


def save(draw: Draw, path: Path) -> None:
    """Write a picture, in the format of the path's ending."""
    with _inked("black"):
        draw().savefig(path, dpi=150)


def svg(draw: Draw) -> str:
    """An `<svg>` element, in the text colour of the page it stands in."""
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}), _inked(_INK):
        draw().savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def _inked(ink: str) -> Any:  # noqa: ANN401 - matplotlib has no types
    style: dict[Any, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titleweight": "bold",
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "figure.constrained_layout.h_pad": 0.14,
    }
    return mpl.rc_context(dict.fromkeys(_INKED, ink) | style)
