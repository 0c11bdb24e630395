"""What a chaos run promises, and whether it holds; the table and the JSON of it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from faults.deployment import DEADLINE
from faults.run import Act, Phase

POINTS = 5.0
"""Percentage points by which reuse may be lower after an event than before."""
ADDED = 1e3 * 2 * DEADLINE + 200
"""Milliseconds by which time to first token (p99) may grow while Redis stands still, beyond what computing cold costs:
the store's deadline twice (the turn before, and its session), and a longer queue before P. What it varies by on this
machine while nothing is wrong comes to that."""
_HEAD = ("event", "turns", "errors", "wrong", "lost", "allowed", "refused", "reuse %", "p99 ms", "what happened")
_WIDTHS = (20, 6, 7, 6, 5, 8, 8, 16, 12, 0)


def broken(phases: Sequence[Phase], acts: Sequence[Act]) -> list[str]:
    """The promises that did not hold, a sentence each."""
    found = [f"{p.name}: {p.wrong} wrong answers" for p in phases if p.wrong]
    found += [f"{p.name}: no turn ended" for p in phases if not p.sent]
    acted = {id(act.during) for act in acts}
    calm = [phase for phase in phases if id(phase) not in acted]
    found += [
        f"{phase.name}: {len(phase.errors)} turns failed while nothing was wrong ({_kinds(phase)})"
        for phase in calm
        if phase.errors
    ]
    usual = [phase.p99 for phase in calm if phase.p99 is not None]
    bound = ADDED + (max(usual) - min(usual) if usual else 0.0)
    for act in acts:
        lost, refused = len(act.lost), len(act.refused)
        if lost > act.told.lost:
            found.append(f"{act.name}: {lost} streams were lost, only {act.told.lost} were on what was killed")
        if refused > act.told.refused:
            found.append(f"{act.name}: {refused} other turns failed, at most {act.told.refused} should")
        before, after = act.before.reuse, act.after.reuse
        if before is None or after is None or after < before - POINTS:
            found.append(f"{act.name}: reuse is {_percent(after)}% after it, was {_percent(before)}% before")
        if act.told.window and (act.added is None or act.added > bound):
            found.append(f"{act.name}: time to first token (p99) grew by {act.added} ms, more than {bound:.0f} ms")
    return found


def table(acts: Sequence[Act]) -> str:
    """One line for each event; reuse and time to first token (p99) are those before, during and after it."""
    lines = ["  ".join(f"{word:<{width}}" for word, width in zip(_HEAD, _WIDTHS, strict=True)).rstrip()]
    for act in acts:
        three = (act.before, act.during, act.after)
        cells = (
            act.name,
            *map(str, (len(act.during.sent), len(act.during.errors), act.during.wrong, len(act.lost), act.told.lost)),
            str(len(act.refused)),
            " ".join(f"{_percent(phase.reuse):>4}" for phase in three),
            " ".join("-" if phase.p99 is None else f"{phase.p99:.0f}" for phase in three),
            act.told.note + (f"; p99 +{act.added:.0f} ms beyond being cold" if act.added is not None else ""),
        )
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip())
    return "\n".join(lines)


def numbers(phases: Sequence[Phase], acts: Sequence[Act]) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "simulated_nodes": True,
        "promises_broken": broken(phases, acts),
        "turns": sum(len(p.sent) for p in phases),
        "wrong": sum(p.wrong for p in phases),
        "phases": [_phase(p) for p in phases],
        "events": [
            {
                "event": act.name,
                "note": act.told.note,
                "lost": len(act.lost),
                "lost_allowed": act.told.lost,
                "refused": len(act.refused),
                "refused_allowed": act.told.refused,
                "reuse_percent": [p.reuse for p in (act.before, act.during, act.after)],
                "added_p99_ms": act.added,
            }
            for act in acts
        ],
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "seconds": phase.ended - phase.begun,
        "turns": len(phase.sent),
        "errors": Counter(sent.error for sent in phase.errors),
        "wrong": phase.wrong,
        "reuse_percent": phase.reuse,
        "outcomes": phase.outcomes,
        "ttft_p99_ms": phase.p99,
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _kinds(phase: Phase) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in Counter(sent.error for sent in phase.errors).items())
