"""Figures of a run: medians over rounds of what each candidate has more than the plain Envoy in the same round."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lanes.candidates import FLOOR
from lanes.plan import BODIES
from lanes.run import Run, Sample


@dataclass(frozen=True)
class Estimate:
    """A figure.

    Attributes:
        value: median over rounds.
        rounds: of each round.
        unsure: by how much it may be another one: half of what two runs of the plain Envoy in one round differ by, or
            a quarter of what the rounds differ by, if that is more.
    """

    value: float
    rounds: list[float]
    unsure: float


@dataclass(frozen=True)
class LoadFigures:
    """A candidate under one load.

    Attributes:
        candidate: its name.
        load: its name.
        streams: of the load.
        survived: share of the rounds in which every token came, in order, as fast as it was sent.
        came: share of the tokens due that came in the window.
        delay_p50: ms from the node to the client.
        delay_p99: ms.
        added_p50: ms over the plain Envoy.
        added_p99: ms over the plain Envoy.
        gap_p99: ms between two tokens of a stream.
        cpu: ms of everything between client and node for 1,000 tokens, less what it uses at rest.
        cpu_ratio: of that over the plain Envoy's.
        python: us of Python processes for one token, less what they use at rest.
        memory: KiB for each stream, over what it had when it was idle.
    """

    candidate: str
    load: str
    streams: int
    survived: float
    came: float
    delay_p50: Estimate
    delay_p99: Estimate
    added_p50: Estimate
    added_p99: Estimate
    gap_p99: Estimate
    cpu: Estimate
    cpu_ratio: Estimate
    python: Estimate
    memory: Estimate


@dataclass(frozen=True)
class FirstFigures:
    """A candidate's time to first token for one size of body.

    Attributes:
        candidate: its name.
        body: bytes.
        p50: ms.
        p99: ms.
        added: ms of the median over the plain Envoy's.
        ratio: of the medians.
    """

    candidate: str
    body: int
    p50: Estimate
    p99: Estimate
    added: Estimate
    ratio: Estimate


@dataclass(frozen=True)
class Figures:
    """All of them.

    Attributes:
        first: by candidate and body.
        loads: by candidate and load.
        sustained: tokens per second of the highest rung that each candidate stood on; empty if there was no ladder.
    """

    first: list[FirstFigures]
    loads: list[LoadFigures]
    sustained: dict[str, int]

    def of_load(self, candidate: str, streams: int) -> LoadFigures | None:
        """A candidate's figures under a load, if it has any."""
        return next((f for f in self.loads if (f.candidate, f.streams) == (candidate, streams)), None)

    def of_body(self, candidate: str, body: int) -> FirstFigures | None:
        """A candidate's first tokens, if it has any."""
        return next((f for f in self.first if (f.candidate, f.body) == (candidate, body)), None)

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def figures(run: Run) -> Figures:
    """Work them out."""
    loads = [_load(run, c, n) for c in run.labels for n in run.plan.rounds]
    first = [_first(run, c, b) for c in run.labels for b in BODIES]
    return Figures([f for f in first if f], [f for f in loads if f], _sustained(run))


def _sustained(run: Run) -> dict[str, int]:
    best: dict[str, int] = dict.fromkeys(run.labels, 0) if run.climbed else {}
    for s in run.climbed:
        if s.sustained:
            best[s.candidate] = max(best[s.candidate], s.load.streams * s.load.rate)
    return best


Measure = Callable[[Sample], float]


class _Rounds:
    """The samples of one candidate and those of the plain Envoy, by round."""

    def __init__(self, samples: Sequence[Sample], candidate: str) -> None:
        self.own = [s for s in samples if s.candidate == candidate]
        self._floor: dict[int, list[Sample]] = {}
        for s in samples:
            if s.candidate == FLOOR:
                self._floor.setdefault(s.round, []).append(s)

    def absolute(self, measure: Measure) -> Estimate:
        """Of the candidate alone."""
        return self._estimate(measure, lambda value, _: value)

    def added(self, measure: Measure) -> Estimate:
        """Over the plain Envoy."""
        return self._estimate(measure, lambda value, floor: value - floor)

    def ratio(self, measure: Measure) -> Estimate:
        """Of the plain Envoy's."""
        found = self._estimate(measure, lambda value, floor: value / floor if floor else 0.0)
        return Estimate(found.value, found.rounds, _unsteady(found.rounds))

    def _estimate(self, measure: Measure, relate: Callable[[float, float], float]) -> Estimate:
        rounds, differences = [], []
        for sample in self.own:
            floor = [measure(s) for s in self._floor[sample.round]]
            differences.append(max(floor) - min(floor))
            rounds.append(relate(measure(sample), statistics.mean(floor)))
        return Estimate(statistics.median(rounds), rounds, max(statistics.median(differences) / 2, _unsteady(rounds)))


def _unsteady(rounds: Sequence[float]) -> float:
    return (max(rounds) - min(rounds)) / 4


def _load(run: Run, candidate: str, streams: int) -> LoadFigures | None:
    all_samples = [s for s in run.loads if s.load.streams == streams and s.result.get("lag_us")]
    rounds = _Rounds(all_samples, candidate)
    if not rounds.own:
        return None
    due = rounds.own[0].load

    def cpu_ms(sample: Sample) -> float:
        return 1e6 * _cpu(sample, run)

    def python_us(sample: Sample) -> float:
        return 1e6 * _cpu(sample, run, "python")

    def memory(sample: Sample) -> float:
        rss = sum(p["rss"] for p in sample.result["processes"].values())
        return float((rss - sum(run.idle[sample.candidate].values())) / 1024 / streams)

    return LoadFigures(
        candidate=candidate,
        load=due.name,
        streams=streams,
        survived=statistics.mean(s.sustained for s in rounds.own),
        came=statistics.median(
            s.result["window_tokens"] / (streams * due.rate * s.result["window_seconds"]) for s in rounds.own
        ),
        delay_p50=rounds.absolute(_micro("lag_us", "p50")),
        delay_p99=rounds.absolute(_micro("lag_us", "p99")),
        added_p50=rounds.added(_micro("lag_us", "p50")),
        added_p99=rounds.added(_micro("lag_us", "p99")),
        gap_p99=rounds.absolute(_micro("gap_us", "p99")),
        cpu=rounds.absolute(cpu_ms),
        cpu_ratio=rounds.ratio(cpu_ms),
        python=rounds.absolute(python_us),
        memory=rounds.absolute(memory),
    )


def _first(run: Run, candidate: str, body: int) -> FirstFigures | None:
    rounds = _Rounds([s for s in run.first if s.load.body == body and s.result.get("ttft_us")], candidate)
    if not rounds.own:
        return None
    p50 = _micro("ttft_us", "p50")
    return FirstFigures(
        candidate,
        body,
        rounds.absolute(p50),
        rounds.absolute(_micro("ttft_us", "p99")),
        rounds.added(p50),
        rounds.ratio(p50),
    )


def _micro(series: str, quantile: str) -> Measure:
    """A quantile in ms."""
    return lambda sample: float(sample.result[series][quantile]) / 1e3


def _cpu(sample: Sample, run: Run, kind: str | None = None) -> float:
    """Seconds of CPU time for each token, less what the processes use at rest."""
    kinds, rest = run.kinds[sample.candidate], run.rest.get(sample.candidate, {})
    seconds = sample.result["window_seconds"]
    used = sum(
        p["cpu_s"] - seconds * rest.get(pid, 0.0)
        for pid, p in sample.result["processes"].items()
        if kind in {None, kinds[pid]}
    )
    return float(max(used, 0.0) / max(sample.result["window_tokens"], 1))
