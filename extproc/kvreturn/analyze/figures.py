"""The figures of a report. Each says what it is and what it rests on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvreturn.analyze.analysis import Analysis
from kvreturn.analyze.observation import Link
from kvreturn.core.outcome import Outcome

Kind = Literal["counted", "lower bound", "upper bound", "estimate", "guess", "measured"]
GIGA = 1e9
_MS = 1e3


@dataclass(frozen=True, slots=True)
class Figure:
    """One number.

    Attributes:
        name: in `--json`.
        label: for people.
        value: None where it does not exist.
        form: how people see it: a format specification, and a unit behind it.
        kind: what it is.
        basis: what it rests on.
    """

    name: str
    label: str
    value: float | None
    form: tuple[str, str]
    kind: Kind
    basis: str

    @property
    def text(self) -> str:
        """Value and unit for people."""
        return "-" if self.value is None else f"{self.value:{self.form[0]}}{self.form[1]}"


_COUNT, _SHARE = (",", ""), (".1%", "")
_SECONDS, _MILLIS, _GB = (",.1f", " s"), (",.0f", " ms"), (",.2f", " GB")


def share(part: float, whole: float) -> float:
    """A share; 0 of nothing."""
    return part / whole if whole else 0.0


def make_figures(a: Analysis) -> Sequence[Figure]:
    """All that can be told. Without lines that have a time, the turn log answers what it can."""
    intake = a.intake
    lines = [
        Figure("lines", "lines", intake.lines, _COUNT, "counted", "all lines but blank ones"),
        Figure("bad_lines", "bad lines", intake.bad.total(), _COUNT, "counted", "left out of everything else"),
        Figure(
            "other_lines",
            "other lines",
            intake.other,
            _COUNT,
            "counted",
            "no turns: other requests, failed ones, what else kvreturn logs",
        ),
    ]
    if a.tally.sums.turns or not a.measured.outcomes:
        return [*lines, *_traffic(a), *_gaps(a), *_savings(a), *_costs(a)]
    return [*lines, *_measured(a)]


def _measured(a: Analysis) -> list[Figure]:
    m = a.measured
    prompt, again, expired = m.follow_up_prompt, m.read + m.ahead + m.local, m.outcomes[Outcome.EXPIRED]
    counts = "prompt, read and local of follow-up turns, as P counted them"
    ahead = "what eager returns had read from D before the turn came, as far as P still had as much"
    found = "what P read back or had in its own cache; what nobody found is not in it"
    return [
        Figure("turns", "turns", m.outcomes.total(), _COUNT, "counted", "lines of the turn log"),
        Figure("follow_up_turns", "follow-up turns", m.follow_ups, _COUNT, "counted", "by their outcome"),
        Figure("repeated_prompt_share", "repeated prompt share", share(again, prompt), _SHARE, "lower bound", found),
        Figure("late_turn_share", "late turns", share(expired, m.follow_ups), _SHARE, "measured", "outcome `expired`"),
        Figure("read_back_share", "read back", share(m.read, prompt), _SHARE, "measured", counts),
        Figure("ahead_share", "read back eagerly", share(m.ahead, prompt), _SHARE, "measured", ahead),
        Figure("local_share", "in P's own cache", share(m.local, prompt), _SHARE, "measured", counts),
    ]


def _traffic(a: Analysis) -> list[Figure]:
    s, lower, link = a.tally.sums, _kind(a, "lower bound"), _kind(a, "counted")
    tokens: Kind = "estimate" if s.estimated else "counted"
    pairs = "sum of min(previous prompt, this prompt) over sum of this prompt, follow-up turns; histories only grow"
    answers = f"as before, with the previous answer, known in {s.answers_known:,} turns; answers come back unchanged"
    repeated, follow_ups, with_answers = s.repeated, s.follow_up_prompt, s.repeated_with_answers
    return [
        Figure("turns", "turns", s.turns, _COUNT, "counted", "lines that could be used, less those of the turn log"),
        Figure("conversations", "conversations", s.conversations, _COUNT, link, _linking(a)),
        Figure("follow_up_turns", "follow-up turns", s.follow_ups, _COUNT, link, "turns with a turn before them"),
        Figure("prompt_tokens", "prompt tokens", s.prompt, _COUNT, tokens, "all turns"),
        Figure("repeated_prompt_share", "repeated prompt share", share(repeated, follow_ups), _SHARE, lower, pairs),
        Figure(
            *("repeated_share_with_answers", "repeated, with answers", share(with_answers, follow_ups), _SHARE),
            _kind(a, "estimate"),
            answers,
        ),
        Figure(
            *("repeated_share_of_all", "repeated, of all turns", share(repeated, s.prompt), _SHARE),
            lower,
            "repeated tokens over the prompts of all turns, first ones included",
        ),
    ]


def _gaps(a: Analysis) -> list[Figure]:
    t, s = a.tally, a.tally.sums
    gap = "from one turn's time to the next one's: if that is when it began, the answer's time is in the gap"
    bins = f"{gap}; percentiles to 1%"
    late = share(s.late, s.follow_ups)
    percentiles = [(p, t.gaps.percentile(p / 100)) for p in (50, 90, 99)]
    return [
        Figure("late_turn_share", f"later than {t.ttl:g} s", late, _SHARE, _kind(a, "upper bound"), gap),
        *(Figure(f"gap_p{p}_s", f"gap, p{p}", v, _SECONDS, _kind(a, "upper bound"), bins) for p, v in percentiles),
    ]


def _savings(a: Analysis) -> list[Figure]:
    t, s, r, kind = a.tally, a.tally.sums, a.options.rates, _kind(a, "estimate")
    model = (
        f"P computes {r.prefill:,.0f} tokens/s and reads {r.transfer / GIGA:g} GB/s at {r.bytes_per_token:,} bytes "
        f"a token, {r.overhead * _MS:g} ms per read, nothing queues: a loaded P saves more"
    )
    reads = (
        f"repeated (with answers), within the TTL, not in P's own cache as far as the log tells, {r.min_tokens} or more"
    )
    mean = share(s.saved, s.follow_ups) * _MS
    prefill = [
        (p, name, d.percentile(p / 100)) for p in (50, 90) for name, d in (("off", t.prefill_off), ("on", t.prefill_on))
    ]
    return [
        Figure("reuse_turns", "turns that read back", s.reused_turns, _COUNT, kind, reads),
        Figure("reuse_share", "prompt tokens read back", share(s.reused, s.prompt), _SHARE, kind, f"of all; {reads}"),
        Figure("prefill_saved_share", "prefill time saved", share(s.saved, s.computed), _SHARE, kind, model),
        Figure("ttft_saving_mean_ms", "TTFT saved, mean", mean, _MILLIS, kind, f"per follow-up turn; {model}"),
        *(
            Figure(
                *(f"prefill_{name}_p{p}_ms", f"prefill, {name}, p{p}", None if v is None else v * _MS, _MILLIS),
                kind,
                f"per follow-up turn; {model}",
            )
            for p, name, v in prefill
        ),
        Figure("break_even_tokens", "break-even", r.break_even, (",.0f", " tokens"), "estimate", f"repeated; {model}"),
    ]


def _costs(a: Analysis) -> list[Figure]:
    t, kind = a.tally, _kind(a, "estimate")
    size = a.options.rates.bytes_per_token / GIGA
    mean = share(t.waits.within(t.waits.edges.index(t.ttl))[2], t.seconds) * size
    pins = (
        f"each turn's prompt, and answer if known, from its time until the next turn or for {t.ttl:g} s; all D together"
    )
    return [
        Figure("pinned_mean_gb", "KV held on D, mean", mean, _GB, kind, pins),
        Figure("pinned_peak_gb", "KV held on D, peak", t.peak_pinned * size, _GB, kind, pins),
    ]


def _kind(a: Analysis, kind: Kind) -> Kind:
    """What a figure is, unless conversations are guessed."""
    return "guess" if a.tally.links[Link.GUESSED] else kind


def _linking(a: Analysis) -> str:
    told = {
        Link.NAMED: "by conversation id",
        Link.FOUND: "by equal messages or hashes, as the router finds them",
        Link.GUESSED: "guessed: same client, longer body",
    }
    links = a.tally.links
    return "; ".join(f"{links[link]:,} turns {text}" for link, text in told.items() if links[link]) or "no turns"
