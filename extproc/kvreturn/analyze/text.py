"""The report for a terminal."""

from collections.abc import Iterator

from kvreturn.analyze.report import Report


def render(report: Report) -> str:
    """Verdict first, then the figures, each with what it is and, by number, what it rests on."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield report.verdict
    yield ""
    labels = max(len(f.label) for f in report.figures)
    values = max(len(f.text) for f in report.figures)
    bases = {basis: number for number, basis in enumerate(dict.fromkeys(f.basis for f in report.figures), 1)}
    for f in report.figures:
        yield f"{f.label:<{labels}}  {f.text:>{values}}  {f.kind} [{bases[f.basis]}]"
    if report.ttls:
        yield ""
        yield f"{'TTL, s':>8}{'turns within':>14}{'repeated tokens within':>24}{'KV held on D, mean GB':>23}"
        for r in report.ttls:
            yield f"{r.ttl_s:>8,g}{r.covered_turn_share:>14.1%}{r.covered_token_share:>24.1%}{r.pinned_mean_gb:>23,.2f}"
    if report.outcomes:
        yield ""
        yield "outcomes in the turn log: " + ", ".join(f"{o} {n:,}" for o, n in report.outcomes.items())
    yield ""
    yield from (f"[{number}] {basis}" for basis, number in bases.items())
    if report.bad:
        yield ""
        for bad in report.bad:
            places = [*bad.first, "..."] if bad.lines > len(bad.first) else bad.first
            yield f"{bad.lines:,} bad lines: {bad.reason} ({', '.join(places)})"
    if report.notes:
        yield ""
        yield from (f"note: {n}" for n in report.notes)
