"""The report for a terminal."""

from collections.abc import Iterator, Mapping

from kvreturn.bench.sample import LEGS
from kvreturn.bench.stats import COLUMNS
from kvreturn.bench.summary import Summary, counted

_LABELS = {"void": "MEANINGLESS", "doubt": "WARNING", "note": "NOTE"}


def render(summary: Summary) -> str:
    """Verdict and warnings first, then the statistics of both legs, then what was counted."""
    return "\n".join(_lines(summary))


def _lines(summary: Summary) -> Iterator[str]:
    yield summary.verdict
    yield ""
    yield from (f"{_LABELS[d.level]}: {d.text}" for d in summary.doubts)
    for leg in LEGS:
        rows = summary.legs[leg].tables
        if rows:
            yield ""
            yield from _table(f"{leg}:", rows)
    yield ""
    off, on = (counted(summary.legs[leg]) for leg in LEGS)
    first = max(len(label) for label, _ in off)
    second = max(len(text) for _, text in [*off, ("", "off")])
    yield f"{'':{first}}  {'off':<{second}}  on"
    for (label, a), (_, b) in zip(off, on, strict=True):
        yield f"{label:{first}}  {a:<{second}}  {b}"


def _table(title: str, rows: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    cells = [[title, *COLUMNS]] + [[name, *(number(row[c]) for c in COLUMNS)] for name, row in rows.items()]
    first, *widths = (max(len(row[i]) for row in cells) for i in range(len(COLUMNS) + 1))
    for row in cells:
        yield f"{row[0]:{first}}" + "".join(f"  {text:>{w}}" for text, w in zip(row[1:], widths, strict=True))


def number(value: float) -> str:
    """Short, and without decimals where there are none."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}" if value < 100 else f"{value:,.1f}"  # noqa: PLR2004
