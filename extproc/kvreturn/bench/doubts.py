"""What makes the numbers of a run meaningless, or smaller or larger than they would be elsewhere."""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvreturn.bench.counters import Look
from kvreturn.bench.run import Run
from kvreturn.bench.sample import LEGS, LegName
from kvreturn.bench.stats import Comparison, compare
from kvreturn.core.outcome import REUSED, Outcome

_UNTOUCHED = frozenset(
    {Outcome.DISABLED, Outcome.DECODE_ALONE, Outcome.PREFILL_FAILED, Outcome.REJECTED, Outcome.CANCELLED}
)
_FEW_PAIRS = 30
_LOW_REUSE = 0.5
_KEPT = 0.5  # of the prompt
_TCP = 1e9  # bytes per second; what one TCP stream of UCX brings, and no RDMA link as little as
_TELLING = 64e6  # bytes, below which a transfer is mostly its overhead
_SPREAD = 0.2
_LATE = 0.01  # seconds
_BUSY = 0.1
_SAME = 0.03
_LONGER = 0.1
_TOLD = 3

Level = Literal["void", "doubt", "note"]
"""void: the comparison means nothing. doubt: it may mislead. note: what to know when it is read."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """One thing to know before believing the numbers."""

    level: Level
    text: str


_REMEDIES = {
    Outcome.NO_HANDLE_FROM_DECODE: "D streams no handle: set bidirectional_kv_xfer in D's kv_connector_extra_config, "
    "and use kvreturn's connector, whose streams carry it",
    Outcome.EXPIRED: "the gaps are longer than the handles live: raise decoder_kv_blocks_ttl on D and the router's ttl",
    Outcome.NOT_A_CONTINUATION: "prompts do not begin with the turn before: a template that drops reasoning, or a "
    "gateway that edits requests",
    Outcome.UNPROVEN: "P cannot prove that blocks match: run kvreturn's connector on both nodes, with the same secret, "
    "block size and version",
    Outcome.STORE_UNAVAILABLE: "the session store does not answer the router",
    Outcome.NODE_GONE: "P does not reach D's side channel: check VLLM_NIXL_SIDE_CHANNEL_HOST, and that its ports are "
    "open",
    Outcome.BREAKER_OPEN: "reads from D failed too often: see P's log for NIXL's errors",
    Outcome.READ_FAILED: "P failed to read from D: see its log for NIXL's errors",
    Outcome.BELOW_THRESHOLD: "the histories are too short to be worth a read: play longer ones (--first-tokens)",
    Outcome.LOCAL_HIT: "P had everything in its own prefix cache",
    Outcome.DISABLED: "read-back is off for this model: its `proof` is `off`",
    Outcome.SLOWER: "reads took longer than computing: the transport is too slow for these nodes",
    Outcome.PREFILL_FAILED: "no prefill node answered: D did the turns alone",
    Outcome.EVICTED: "P's prefix cache is too small for what goes back to it",
    Outcome.RETURN_FAILED: "what was on its way back to P had not arrived in time: longer gaps, or `return: lazy`",
}


def doubts(run: Run, *, simulated: bool) -> list[Doubt]:
    """All of them, the worst first.

    Args:
        run: what was played.
        simulated: whether the nodes are.
    """
    order: dict[Level, int] = {"void": 0, "doubt": 1, "note": 2}
    looks: dict[LegName, Look] = {leg: run.look(leg) for leg in LEGS}
    comparison = compare(run)
    found = [
        *_amount(run, comparison),
        *_reuse(run, looks["on"]),
        *_off(looks["off"]),
        *_told(run, looks["on"], comparison),
        *_transfer(looks["on"]),
        *_cache(looks["off"]),
        *_noise(run, comparison),
        *_answers(comparison),
        *_others(run, looks),
    ]
    if simulated:
        found.append(Doubt("note", "Nodes and their timing are simulated: the ratio says nothing about your GPUs."))
    return sorted(found, key=lambda d: order[d.level])


def follow_ups(look: Look) -> Counter[str]:
    """Turns that could have reused something, by outcome."""
    return Counter({name: n for name, n in look.turns.items() if name != Outcome.FIRST_TURN})


def reuse_share(look: Look) -> float | None:
    """Share of these that reused something; None if the routers counted none."""
    turns = follow_ups(look)
    return sum(n for name, n in turns.items() if name in REUSED) / turns.total() if turns else None


def _amount(run: Run, comparison: Comparison | None) -> Iterator[Doubt]:
    if run.broken:
        yield Doubt("doubt", f"It ended early: {run.broken}")
    if run.stopped:
        yield Doubt("doubt", "Stopped before the end: what is missing is not in the numbers.")
    for leg in LEGS:
        failures = run.failures(leg)
        if failures:
            total = len(failures) + len(run.samples(leg))
            first = "; ".join(dict.fromkeys(f.why for f in failures[:_TOLD]))
            yield Doubt("doubt", f"{len(failures):,} of {total:,} turns of the leg `{leg}` failed: {first}")
    if run.played and not any(s.output_num_chunks for leg in LEGS for s in run.samples(leg)):
        yield Doubt("note", "Answers came in one piece, so TTFT is the time to the whole answer.")
    if comparison is None:
        yield Doubt("void", "No follow-up turn was answered in both legs.")
    elif len(comparison.pairs) < _FEW_PAIRS:
        yield Doubt(
            "doubt",
            f"Only {len(comparison.pairs)} follow-up turns are compared: with fewer than {_FEW_PAIRS}, chance is "
            "large. Raise --conversations or --rounds.",
        )


def _reuse(run: Run, on: Look) -> Iterator[Doubt]:
    share = reuse_share(on)
    if share is None or not any(s.turn for s in run.samples("on")):
        return
    missed = [(name, n) for name, n in follow_ups(on).most_common() if name not in REUSED]
    reasons = "; ".join(
        f"{n:,} {name}" + (f" ({_REMEDIES[Outcome(name)]})" if name in _REMEDIES else "") for name, n in missed[:_TOLD]
    )
    if share == 0:
        yield Doubt("void", f"Nothing was reused in the leg `on`, so both legs are the same: {reasons}.")
    elif share < _LOW_REUSE:
        yield Doubt("doubt", f"Only {share:.0%} of the follow-up turns of the leg `on` reused anything: {reasons}.")


def _off(off: Look) -> Iterator[Doubt]:
    others = Counter({name: n for name, n in off.turns.items() if name not in _UNTOUCHED})
    if others:
        outcomes = ", ".join(f"{n:,} {name}" for name, n in others.most_common(_TOLD))
        yield Doubt(
            "void",
            f"The leg `off` is not off: {others.total():,} of its {off.turns.total():,} turns were looked up "
            f"({outcomes}). "
            'Set `proof: "off"` for its model, or give --off-url a gateway whose router has it.',
        )


def _told(run: Run, on: Look, comparison: Comparison | None) -> Iterator[Doubt]:
    if on.routers or not run.samples("on"):
        return
    text = "No router was asked (--router-metrics), so nothing tells whether anything was reused"
    same = comparison and abs(comparison.ratio - 1) < _SAME
    yield Doubt("doubt", f"{text}, and both legs took the same time: perhaps nothing was." if same else f"{text}.")


def _transfer(on: Look) -> Iterator[Doubt]:
    if on.failed:
        yield Doubt("doubt", f"{on.failed:,} NIXL transfers failed on P: see its log.")
    if on.rate is not None and on.bytes > _TELLING and on.rate < _TCP:
        yield Doubt(
            "doubt",
            f"P read at {on.rate / 1e9:.2f} GB/s, as over TCP: NIXL may have fallen back to it. Check the transport "
            "(UCX_TLS and UCX_NET_DEVICES, `fi_info -p efa` on EFA); over RDMA the reads take a fraction of that.",
        )


def _cache(off: Look) -> Iterator[Doubt]:
    if off.caching is None:
        yield Doubt("note", "No prefill node was asked (--prefill-metrics): what its own prefix cache had is unknown.")
    elif not off.caching:
        yield Doubt(
            "note",
            "P has no prefix cache, so without read-back it computes every prompt whole: the ratio is an upper bound "
            "for nodes that have one.",
        )
    elif (off.local or 0.0) > _KEPT:
        yield Doubt(
            "doubt",
            f"P's own prefix cache had {off.local:.0%} of the prompts without read-back. Nobody else was on the nodes; "
            "where other traffic pushes conversations out, the saving is larger. Raise the load (--clients, "
            "--conversations) until it no longer fits, or make P's cache as small as it would be.",
        )


def _noise(run: Run, comparison: Comparison | None) -> Iterator[Doubt]:
    late = max((p.lag for p in run.played), default=0.0)
    typical = comparison.on_ms / 1e3 if comparison else 0.0
    if late > max(_LATE, _BUSY * typical):
        yield Doubt(
            "doubt",
            f"This machine was busy: in 1% of the time the benchmark itself was {late * 1e3:,.0f} ms late or more, "
            "which is in the times. Run it elsewhere, or with less load.",
        )
    ratios = comparison.by_round if comparison else []
    if ratios and max(ratios) - min(ratios) > _SPREAD * statistics.median(ratios):
        yield Doubt(
            "doubt",
            f"The rounds differ: off/on is {min(ratios):.2f} in one and {max(ratios):.2f} in another. Other load, or "
            "warming up: play more rounds with more conversations.",
        )


def _answers(comparison: Comparison | None) -> Iterator[Doubt]:
    if comparison is None:
        return
    if comparison.equal < 1:
        yield Doubt(
            "note",
            f"{comparison.equal:.0%} of the answers are the same in both legs. On GPUs, batches of another shape "
            "change answers at temperature 0 as well.",
        )
    lengths = [sum(getattr(p, leg).output_num_tokens for p in comparison.pairs) for leg in LEGS]
    if abs(lengths[0] - lengths[1]) > _LONGER * max(lengths):
        yield Doubt(
            "doubt",
            f"The legs' answers differ in length ({lengths[0]:,} and {lengths[1]:,} tokens): so do the prompts.",
        )


def _others(run: Run, looks: dict[LegName, Look]) -> Iterator[Doubt]:
    for leg in LEGS:
        counted, sent = looks[leg].turns.total(), len(run.samples(leg)) + len(run.failures(leg))
        if counted > sent and not run.stopped:
            yield Doubt(
                "doubt",
                f"The routers counted {counted:,} turns in the leg `{leg}`, and {sent:,} are ours: others use them "
                "too.",
            )
        elif looks[leg].routers and counted < sent and not run.stopped:
            yield Doubt(
                "doubt",
                f"The routers counted {counted:,} turns in the leg `{leg}` of the {sent:,} that were played: give the "
                "metrics of all of them, one --router-metrics each.",
            )
