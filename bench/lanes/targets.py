"""What is promised, and whether it holds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from lanes import noise
from lanes.candidates import FAST, PORTABLE
from lanes.figures import Estimate, Figures, LoadFigures
from lanes.plan import BODIES, LOADS
from lanes.run import Run

Verdict = Literal["met", "not met", "too noisy", "not measured"]
_PROXY = "proxy"
_LANES = {FAST: "fast lane", PORTABLE: "portable lane"}
_GROWTH = 5.0  # percent of memory


@dataclass(frozen=True)
class Target:
    """A promise.

    Attributes:
        figure: what is promised to be small.
        target: how small.
        value: what was measured.
        verdict: whether that holds.
    """

    figure: str
    target: str
    value: str
    verdict: Verdict


def targets(run: Run, figures: Figures) -> list[Target]:
    """All promises."""
    quiet = noise.words(run.noises) is None
    return [*_limits(figures, quiet=quiet), *_against_proxy(run, figures), *_held(run)]


def _limits(figures: Figures, *, quiet: bool) -> Iterator[Target]:
    for streams in LOADS[:2]:
        at = figures.of_load(FAST, streams)
        where = f"at {streams}x30"
        yield _below(f"fast lane: token delay added {where}, p50", at.added_p50 if at else None, 0.1, "ms", quiet=quiet)
        yield _below(f"fast lane: token delay added {where}, p99", at.added_p99 if at else None, 2.0, "ms", quiet=quiet)
        ratio = at.cpu_ratio if at else None
        yield _kept_up(_below(f"fast lane: CPU for 1,000 tokens {where} over plain Envoy", ratio, 1.3, "x"), at)
        yield _kept_up(_below(f"fast lane: Python CPU for a token {where}", at.python if at else None, 5.0, "us"), at)
    few, many = (figures.of_load(PORTABLE, n) for n in LOADS[:2])
    yield _below(
        "portable lane: token delay added at 20x30, p50", few.added_p50 if few else None, 0.7, "ms", quiet=quiet
    )
    yield _kept_up(
        _below("portable lane: Python CPU for a token at 256x30", many.python if many else None, 100.0, "us"), many
    )
    for lane, label in _LANES.items():
        for body, limit in ((10_000, 2.0), (1_000_000, 8.0)):
            at_body = figures.of_body(lane, body)
            figure = f"{label}: time to first token added, two legs, {BODIES[body]}"
            yield _below(figure, at_body.added if at_body else None, limit, "ms", quiet=quiet)


def _kept_up(target: Target, at: LoadFigures | None) -> Target:
    """In an overload tokens come several at a time, which costs less for each: that tells nothing."""
    if at is None or at.survived:
        return target
    return replace(target, value=f"{target.value}, in an overload", verdict="too noisy")


def _below(figure: str, found: Estimate | None, limit: float, unit: str, *, quiet: bool = True) -> Target:
    """A time that is too long on a noisy machine (`quiet` is False) says nothing; a ratio or CPU time does."""
    target = f"<= {limit:g} {unit}"
    if found is None:
        return Target(figure, target, "-", "not measured")
    verdict: Verdict = "too noisy"
    if found.value + found.unsure <= limit and found.unsure <= limit:  # else nothing can be seen of the limit's size
        verdict = "met"
    elif found.value - found.unsure > limit and quiet:
        verdict = "not met"
    return Target(figure, target, f"{found.value:.3g} ± {found.unsure:.2g} {unit}", verdict)


def _against_proxy(run: Run, figures: Figures) -> Iterator[Target]:
    proxy = run.labels.get(_PROXY)
    if proxy is None:
        return
    for lane, label in _LANES.items():
        for streams in LOADS:
            own, other = figures.of_load(lane, streams), figures.of_load(_PROXY, streams)
            if own is None or other is None:
                continue
            at = f"at {streams}x30"
            if not own.survived and not other.survived:
                continue
            if own.survived < 1 or other.survived < 1:
                value = f"in {own.survived:.0%} of the rounds, the proxy in {other.survived:.0%}"
                verdict: Verdict = "met" if own.survived > other.survived else "not met"
                yield Target(f"{label}: survives {at}", "more often than vLLM's proxy", value, verdict)
                continue
            for name, mine, theirs in (
                ("token delay, p50", own.delay_p50, other.delay_p50),
                ("token delay, p99", own.delay_p99, other.delay_p99),
                ("CPU for 1,000 tokens", own.cpu, other.cpu),
            ):
                yield _better(f"{label}: {name} {at}", mine, theirs)
        for body, words in BODIES.items():
            first, theirs_first = figures.of_body(lane, body), figures.of_body(_PROXY, body)
            if first and theirs_first:
                yield _better(f"{label}: time to first token, {words}", first.p50, theirs_first.p50)


def _better(figure: str, own: Estimate, other: Estimate) -> Target:
    """In rounds of one run, so that noise is the same for both."""
    wins = sum(a < b for a, b in zip(own.rounds, other.rounds, strict=False))
    rounds = min(len(own.rounds), len(other.rounds))
    verdict: Verdict = "met" if wins == rounds else "not met" if not wins else "too noisy"
    value = f"{own.value:.3g} against {other.value:.3g} ms, better in {wins} of {rounds} rounds"
    return Target(figure, "less than vLLM's proxy", value, verdict)


def _held(run: Run) -> Iterator[Target]:
    for held in run.held:
        third = max(1, len(held.rss) // 3)
        early, late = (sum(part) / max(len(part), 1) for part in (held.rss[third : 2 * third], held.rss[-third:]))
        growth = 100 * (late - early) / early if early else 0.0
        lost = held.result.get("failed", 1) or held.result.get("corrupt", 1) or held.result.get("unfinished", 1)
        good = not lost and growth <= _GROWTH
        words = "" if held.sustained else "; tokens came late, there are too few processors"
        value = f"{held.result.get('tokens', 0):,} tokens, {lost} streams lost, memory {growth:+.1f}%{words}"
        figure = f"{_LANES[held.candidate]}: 1,000x30 for {held.result.get('window_seconds', 0):g} s"
        yield Target(figure, "no byte lost or reordered, flat memory", value, "met" if good else "not met")
