"""The report as one HTML file."""

from html import escape

from kvreturn.analyze.report import Report
from kvreturn.report.page import document, table


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
        table("Figures", ("figure", "value", "what it is", "what it rests on"), figures, "tntb"),
        table(
            "TTL",
            ("TTL, s", "turns within", "repeated tokens within", "KV held on D, mean GB"),
            ttls,
            "nnnn",
        ),
        table("Outcomes in the turn log", ("outcome", "turns"), outcomes, "tn"),
        table("Bad lines", ("reason", "lines", "first"), bad, "tnb"),
    ]
    if report.notes:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{escape(n)}</li>" for n in report.notes) + "</ul>")
    return document(f"kvreturn analyze: {report.level}", "kvreturn analyze", parts)
