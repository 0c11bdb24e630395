"""The report as one HTML file."""

import os
import platform
from collections.abc import Iterable, Iterator
from html import escape

from kvreturn.report.page import document, table
from lanes import noise
from lanes.figures import Estimate, Figures
from lanes.plan import BODIES
from lanes.run import Run
from lanes.targets import Target

_LEVELS = {"met": "", "not met": "void", "too noisy": "doubt", "not measured": ""}


def render(run: Run, figures: Figures, promised: list[Target], plots: dict[str, str]) -> str:
    """A whole page.

    Args:
        run: what was measured.
        figures: of it.
        promised: what was promised of them.
        plots: SVG elements: `loads`, `first`, `waterfall`.
    """
    return document("kvreturn lanes", "Between client and node", _parts(run, figures, promised, plots))


def _parts(run: Run, figures: Figures, promised: list[Target], plots: dict[str, str]) -> Iterator[str]:
    count = {v: sum(t.verdict == v for t in promised) for v in _LEVELS}
    yield '<p class="verdict">' + ", ".join(f"{n} {v}" for v, n in count.items() if n) + "</p>"
    yield f"<p>{escape(_about(run))}</p>"
    yield _told(run)
    rows = [(t.figure, t.target, t.value, _verdict(t.verdict)) for t in promised]
    yield table("Targets", ("figure", "target", "measured", ""), [(*map(escape, r[:3]), r[3]) for r in rows], "wtwt")
    yield plots["first"]
    yield table(
        "Time to first token, ms",
        ("", "body", "p50", "p99", "added p50", "ratio"),
        (
            (escape(run.labels[f.candidate]), BODIES[f.body], *_cells(f.p50, f.p99, f.added, f.ratio))
            for f in figures.first
        ),
        "ttnnnn",
    )
    yield plots["waterfall"]
    yield _rest(run)
    yield plots["loads"]
    yield table(
        "Under load",
        (
            "",
            "load",
            "came",
            "delay p50, ms",
            "p99",
            "added p50",
            "added p99",
            "CPU ms/1,000",
            "ratio",
            "Python us/token",
            "KiB/stream",
        ),
        (
            (
                escape(run.labels[f.candidate]),
                f.load,
                f"{f.came:.0%}" + ("" if f.survived == 1 else " *"),
                *_cells(f.delay_p50, f.delay_p99, f.added_p50, f.added_p99, f.cpu, f.cpu_ratio, f.python, f.memory),
            )
            for f in figures.loads
        ),
        "ttnnnnnnnnn",
    )
    yield "<p>* not every token came as fast as it was sent, in every round: delays are those of an overload.</p>"
    yield table(
        "At rest, ms of CPU time in a second; taken off what is said of tokens",
        ("", ""),
        ((escape(run.labels[c]), f"{1e3 * sum(of.values()):.1f}") for c, of in run.rest.items()),
        "tn",
    )
    yield table(
        "Growth from the lowest to the highest load", ("", "delay p50", "CPU for a token"), _growth(run, figures), "tnn"
    )
    best = figures.sustained.items()
    yield table(
        "Highest sustained rate, tokens per second",
        ("", ""),
        ((escape(run.labels[c]), f"{n:,}") for c, n in best),
        "tn",
    )


def _about(run: Run) -> str:
    return (
        f"The {run.plan.name} run: {run.seconds / 60:.1f} minutes on {os.cpu_count()} cores ({platform.machine()}). "
        "Nodes that compute nothing, a client that checks every byte, all candidates in alternating order, the plain "
        "Envoy at both ends of each round. Delays are from the node's write of a token to the client's read of it; "
        "what is added is the difference to the plain Envoy in the same round. Medians over rounds. 20x30 is 20 "
        "streams of 30 tokens per second each; 'came' is the share of the tokens due that came in the window, over "
        "100% where some were late for it. Memory is over what the processes had before any load, so it says "
        "little of a few streams. The plain Envoy has one leg, all others two. vllm-router keeps no handle and "
        "strips none: it shows what two legs cost at least, with nothing read back."
    )


def _told(run: Run) -> str:
    loud = noise.words(run.noises)
    items = [f'<li class="doubt"><b>Noisy</b>{escape(loud)}</li>'] if loud else []
    items += [f"<li><b>Skipped</b>{escape(s.label)}: {escape(s.why)}</li>" for s in run.skipped]
    return f'<ul class="told">{"".join(items)}</ul>' if items else ""


def _verdict(verdict: str) -> str:
    colours = {"met": "var(--on)", "not met": "var(--bad)", "too noisy": "var(--warn)"}
    return f'<b style="color:{colours.get(verdict, "var(--soft)")}">{verdict}</b>'


def _rest(run: Run) -> str:
    rows = (
        (
            BODIES[w.body],
            *(f"{x:.2f}" for x in (w.ttft, w.floor, w.router, w.ttft - w.floor - w.router)),
        )
        for w in run.falls
    )
    heads = ("body", "first token", "of it plain Envoy", "router", "Envoy, its script, and what the steps leave out")
    return table("Where the time to first token goes, ms", heads, rows, "tnnnn")


def _growth(run: Run, figures: Figures) -> Iterator[tuple[str, str, str]]:
    for name, label in run.labels.items():
        found = [f for f in figures.loads if f.candidate == name]
        if len(found) > 1:
            low, high = found[0], found[-1]
            span = f" ({low.load} to {high.load})"
            delay, cpu = (
                b.value / a.value if a.value else 0.0 for a, b in ((low.delay_p50, high.delay_p50), (low.cpu, high.cpu))
            )
            yield escape(label) + span, f"{delay:,.1f}x", f"{cpu:.2f}x"


def _cells(*estimates: Estimate) -> Iterable[str]:
    return (f"{round(e.value, 3) + 0.0:,.3g}" if abs(e.value) < 100 else f"{e.value:,.0f}" for e in estimates)  # noqa: PLR2004
