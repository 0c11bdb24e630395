"""The report as one HTML file."""

from collections.abc import Iterator
from html import escape

from kvreturn.bench.sample import LEGS
from kvreturn.bench.stats import COLUMNS
from kvreturn.bench.summary import Summary, counted, percent
from kvreturn.bench.text import number
from kvreturn.report.page import document, table

_LABELS = {"void": "Meaningless", "doubt": "Warning", "note": "Note"}


def render(summary: Summary, svg: str) -> str:
    """A whole page.

    Args:
        summary: what to show.
        svg: the plots, as an element; empty if there is nothing to plot.
    """
    return document("kvreturn bench", "kvreturn bench", _parts(summary, svg))


def _parts(summary: Summary, svg: str) -> Iterator[str]:
    yield f'<p class="verdict">{escape(summary.verdict)}</p>'
    if summary.doubts:
        items = (f'<li class="{d.level}"><b>{_LABELS[d.level]}</b>{escape(d.text)}</li>' for d in summary.doubts)
        yield f'<ul class="told">{"".join(items)}</ul>'
    yield _cards(summary)
    yield svg
    for leg in LEGS:
        rows = [(name, *(number(row[c]) for c in COLUMNS)) for name, row in summary.legs[leg].tables.items()]
        yield table(f"Statistics, {leg}", ("", *COLUMNS), rows, "t" + "n" * len(COLUMNS))
    pairs = zip(*(counted(summary.legs[leg]) for leg in LEGS), strict=True)
    yield table("Counted", ("", *LEGS), [(label, escape(a), escape(b)) for (label, a), (_, b) in pairs], "tww")
    params = [(escape(name), escape(value)) for name, value in summary.params.items()]
    yield table("Parameters", ("option", "value"), params, "tw")


def _cards(summary: Summary) -> str:
    """The four numbers to see first."""
    c, on = summary.comparison, summary.legs["on"]
    if c is None:
        return ""
    reuse = next(text for label, text in counted(on) if label == "follow-up turns with reuse")
    cards = [
        (f"{c.ratio:.2f}x", "median TTFT, off over on"),
        (f"{c.saved_ms:,.0f} ms", "TTFT saved per follow-up turn, mean"),
        (percent(on.look.read), "of prompt tokens read back from D"),
        (reuse, "of follow-up turns reused something"),
    ]
    return '<div class="cards">' + "".join(f"<div><b>{a}</b><span>{b}</span></div>" for a, b in cards) + "</div>"
