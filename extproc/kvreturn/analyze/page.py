"""The report as one HTML file that loads nothing."""

from collections.abc import Iterable, Sequence
from html import escape

from kvreturn.analyze.report import Report

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #666; --back: #fff; --ink: #1a1a1a; }
@media (prefers-color-scheme: dark) { :root { --soft: #aaa; --back: #16181b; --ink: #e8e8e8; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--back); color: var(--ink); }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-size: 1.2rem; border-left: 4px solid #1f97ad; padding-left: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td:not(.basis) { white-space: nowrap; }
td.basis { color: var(--soft); font-size: .9em; }
svg { width: 100%; height: auto; }
"""


def render(report: Report, svg: str) -> str:
    """A whole page.

    Args:
        report: what to show.
        svg: the plots, as an element; empty if there is nothing to plot.
    """
    figures = [(escape(f.label), f.text, f.kind, escape(f.basis)) for f in report.figures]
    ttls = [
        (f"{r.ttl_s:,g}", f"{r.covered_turn_share:.1%}", f"{r.covered_token_share:.1%}", f"{r.pinned_mean_gb:,.2f}")
        for r in report.ttls
    ]
    bad = [(escape(b.reason), f"{b.lines:,}", escape(", ".join(b.first))) for b in report.bad]
    outcomes = [(name, f"{count:,}") for name, count in report.outcomes.items()]
    parts = [
        f'<p class="verdict">{escape(report.verdict)}</p>',
        svg,
        _table("Figures", ("figure", "value", "what it is", "what it rests on"), figures, "tntb"),
        _table(
            "TTL",
            ("TTL, s", "turns within", "repeated tokens within", "KV held on D, mean GB"),
            ttls,
            "nnnn",
        ),
        _table("Outcomes in the turn log", ("outcome", "turns"), outcomes, "tn"),
        _table("Bad lines", ("reason", "lines", "first"), bad, "tnb"),
    ]
    if report.notes:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{escape(n)}</li>" for n in report.notes) + "</ul>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>kvreturn analyze: {escape(report.level)}</title><style>{_STYLE}</style>"
        f"<h1>kvreturn analyze</h1>{''.join(parts)}</html>\n"
    )


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], classes: str) -> str:
    """A table under its title; nothing if it has no rows. `classes`: t text, n number, b basis, by column."""
    body = "".join(f"<tr>{_cells('td', row, classes)}</tr>" for row in rows)
    if not body:
        return ""
    return f'<h2>{title}</h2><div class="wide"><table><tr>{_cells("th", heads, classes)}</tr>{body}</table></div>'


def _cells(tag: str, texts: Sequence[str], classes: str) -> str:
    names = {"t": "", "n": ' class="n"', "b": ' class="basis"'}
    return "".join(f"<{tag}{names[c]}>{text}</{tag}>" for text, c in zip(texts, classes, strict=True))
