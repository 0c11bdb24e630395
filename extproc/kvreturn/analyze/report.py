"""What the sums mean: a verdict, the figures, a table of TTLs, and what to know before believing it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvreturn.analyze.analysis import Analysis
from kvreturn.analyze.figures import GIGA, Figure, make_figures, share
from kvreturn.analyze.observation import Link
from kvreturn.analyze.tally import MeasuredTally
from kvreturn.core.outcome import Outcome

Level = Literal["worth it", "marginal", "not worth it", "nothing to tell"]
# Shares of the prefill time. Below the second the noise of a deployment is larger than the saving.
_WORTH, _MARGINAL = 0.2, 0.05
_ROOM = 0.5  # of D's memory: the rest is for the turns that run
_PULLED = 0.97


@dataclass(frozen=True, slots=True)
class TTLRow:
    """What D would cover and hold if it kept blocks for so long.

    Attributes:
        ttl_s: seconds.
        covered_turn_share: of all follow-up turns, those that come within it.
        covered_token_share: of all repeated tokens, those of these turns.
        pinned_mean_gb: GB of KV that all D together hold for turns to come, on average over the log.
    """

    ttl_s: float
    covered_turn_share: float
    covered_token_share: float
    pinned_mean_gb: float


@dataclass(frozen=True, slots=True)
class Bad:
    """Lines that could not be used, for one reason.

    Attributes:
        reason: why.
        lines: how many.
        first: where the first of them are, as `source:number`.
    """

    reason: str
    lines: int
    first: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is shown, in whatever form.

    Attributes:
        level: the verdict in a few words.
        verdict: in a sentence.
        figures: in order.
        ttls: ascending.
        outcomes: turns of kvreturn's own log by outcome.
        bad: most frequent first.
        notes: what to know before believing it.
    """

    level: Level
    verdict: str
    figures: Sequence[Figure]
    ttls: Sequence[TTLRow]
    outcomes: dict[str, int]
    bad: Sequence[Bad]
    notes: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """For programs: each figure by its name, and what it is under `about`."""
        return {
            "level": self.level,
            "verdict": self.verdict,
            **{f.name: f.value for f in self.figures},
            "ttls": [asdict(row) for row in self.ttls],
            "outcomes": self.outcomes,
            "bad": [asdict(bad) for bad in self.bad],
            "notes": self.notes,
            "about": {f.name: {"kind": f.kind, "basis": f.basis} for f in self.figures},
        }


def make_report(a: Analysis) -> Report:
    """Draw the conclusions."""
    ttls = _ttls(a) if a.tally.sums.follow_ups else []
    level, verdict = _verdict(a, ttls)
    outcomes = {o.value: n for o, n in a.measured.outcomes.most_common()}
    bad = [Bad(reason, count, a.intake.examples[reason]) for reason, count in a.intake.bad.most_common()]
    return Report(level, verdict, make_figures(a), ttls, outcomes, bad, _notes(a))


def _ttls(a: Analysis) -> list[TTLRow]:
    t, s, rows = a.tally, a.tally.sums, []
    for i, ttl in enumerate(t.waits.edges):
        turns, tokens, held = t.waits.within(i)
        pinned = share(held, t.seconds) * a.options.rates.bytes_per_token / GIGA
        rows.append(TTLRow(ttl, share(turns, s.follow_ups), share(tokens, s.repeated), pinned))
    return rows


def _verdict(a: Analysis, ttls: Sequence[TTLRow]) -> tuple[Level, str]:
    sums, measured, room = a.tally.sums, a.measured, a.options.decode_bytes
    if not sums.turns and measured.outcomes and not measured.follow_ups:
        return "nothing to tell", f"Nothing to tell: {_why_no_follow_ups(measured)}"
    if not sums.turns and measured.outcomes:
        read = share(measured.read, measured.follow_up_prompt)
        ahead = share(measured.ahead, measured.follow_up_prompt)
        level = _level(read + ahead)
        also = f", and {ahead:.0%} eagerly before they came" if ahead else ""
        return (
            level,
            f"{level.capitalize()}: P read back {read:.0%} of the prompt tokens of follow-up turns{also} (measured).",
        )
    if not sums.turns:
        hint = " Of kvreturn, give the router's log: Envoy's has no conversations." if a.intake.other else ""
        return "nothing to tell", f"Nothing to tell: no line of the input is a turn that can be used.{hint}"
    if not sums.follow_ups:
        return "not worth it", f"Not worth it: none of the {sums.turns:,} turns follows another one of the input."
    if a.options.rates.gain <= 0:
        return "not worth it", "Not worth it: at these rates P computes a token sooner than it reads one from D."
    row = next(row for row in ttls if row.ttl_s == a.options.ttl)
    saved = share(sums.saved, sums.computed)
    level = _level(saved)
    facts = (
        f"{share(sums.repeated, sums.follow_up_prompt):.0%} of the prompt tokens of follow-up turns repeat the turn "
        f"before, {row.covered_turn_share:.0%} of these turns come within {row.ttl_s:g} s, and reading back saves an "
        f"estimated {saved:.0%} of all prefill time, while D holds {row.pinned_mean_gb:,.2f} GB of KV for it on average"
    )
    if room is not None and row.pinned_mean_gb * GIGA > room * _ROOM:
        fitting = [r.ttl_s for r in ttls if r.pinned_mean_gb * GIGA <= room * _ROOM]
        remedy = f"set decoder_kv_blocks_ttl to {max(fitting):g} s" if fitting else "it would need more decode nodes"
        return "not worth it", f"Not worth it with this TTL: {facts}, more than half of its memory; {remedy}."
    if a.tally.links[Link.GUESSED]:
        return level, f"Perhaps {level}: {facts} (conversations are guessed, as the access log does not tell them)."
    return level, f"{level.capitalize()}: {facts}."


def _why_no_follow_ups(measured: MeasuredTally) -> str:
    total, off = measured.outcomes.total(), measured.outcomes[Outcome.DISABLED]
    if off:
        return f"read-back was off for {off:,} of {total:,} turns (`disabled`), and no other turn could have used it."
    return f"none of the {total:,} turns could have reused an earlier one."


def _level(saved: float) -> Level:
    return "worth it" if saved >= _WORTH else "marginal" if saved >= _MARGINAL else "not worth it"


def _notes(a: Analysis) -> list[str]:
    s, seconds = a.tally.sums, a.tally.seconds
    told = {
        f"{s.estimated:,} turns have no token count: a token is taken for 4 bytes.": s.estimated,
        "The log has no `cached_tokens`: P's own prefix cache is taken to hold nothing. What it does hold saves the "
        "same time, so savings are upper bounds in this respect.": s.turns and not s.cached_known,
        "`cached_tokens` is nearly the whole prompt. If a decode node wrote it, it counted the blocks that it pulled "
        "from P: repeat with --ignore-cached.": a.options.use_cached and share(s.all_cached, s.prompt) > _PULLED,
        f"{s.repeats:,} turns have time and tokens of the turn before: if a log is in twice, `sort -u` it.": s.repeats,
        f"{a.forgotten:,} turns were forgotten to save memory before any followed them: follow-up turns are a lower "
        "bound.": a.forgotten,
        f"The log spans {seconds:,.0f} s, less than the TTL: later turns, and what D still holds for them, are not in "
        "it.": s.turns and seconds < a.options.ttl,
        "Outcomes are those of the turn log; all other figures are of the other lines.": s.turns
        and a.measured.outcomes,
    }
    return [note for note, applies in told.items() if applies]
