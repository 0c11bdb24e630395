"""All of it in one run: candidates in alternating order, the plain Envoy at both ends of each round."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvreturn.envoy.process import Sink
from lanes.candidates import Candidate, Choice, Field, Skipped, field_of
from lanes.noise import Noise, looked
from lanes.plan import BODIES, RATE, Plan
from lanes.tools import Load, ToolError, run_client
from lanes.waterfall import Waterfall, waterfalls

_SUSTAINED = 0.98  # share of the tokens due that must come in the window
_DELAY_US = 100_000.0  # p90 of the delay from which on a load is not sustained
_RELAX = 0.3  # seconds after a run
_ANSWER = 20.0  # seconds of one answer in a long run: nobody's answers take minutes
_LOOK = 2.0  # seconds between two looks at memory in a long run


@dataclass(frozen=True)
class Sample:
    """One run of the client.

    Attributes:
        candidate: whose.
        round: of the step; the plain Envoy has two in each.
        load: what the client did.
        result: what it saw, see client.c; an `error` where it failed.
        noise: before it.
    """

    candidate: str
    round: int
    load: Load
    result: Mapping[str, Any]
    noise: Noise

    @property
    def whole(self) -> bool:
        """Whether every byte came, in order, and every stream ended."""
        r = self.result
        return "error" not in r and not (r["failed"] or r["corrupt"] or r["unfinished"])

    @property
    def sustained(self) -> bool:
        """Whether the tokens came as fast as the node sent them."""
        if not self.whole:
            return False
        due = self.load.streams * self.load.rate * self.load.seconds
        delay: float = self.result["lag_us"]["p90"] if self.result["lag_us"] else _DELAY_US
        return bool(self.result["window_tokens"] >= _SUSTAINED * due) and delay < _DELAY_US


@dataclass(frozen=True)
class Held:
    """A lane under 1,000 streams for a long time.

    Attributes:
        candidate: whose.
        result: what the client saw.
        rss: bytes in memory of all its processes, over time.
        sustained: as for `Sample`.
    """

    candidate: str
    result: Mapping[str, Any]
    rss: list[int]
    sustained: bool


@dataclass
class Run:
    """All that was seen.

    Attributes:
        plan: what was to be done.
        kinds: by candidate and pid, what the process is.
        labels: by candidate.
        skipped: what could not run.
        idle: by candidate and pid, bytes in memory before any load, but after the first tokens.
        rest: by candidate and pid, seconds of CPU time in each second in which nothing is asked.
        first: samples of first tokens.
        loads: samples of loads.
        climbed: samples of the ladder.
        falls: the request path by step.
        held: long runs.
        seconds: of all of it.
    """

    plan: Plan
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    idle: dict[str, dict[str, int]] = field(default_factory=dict)
    rest: dict[str, dict[str, float]] = field(default_factory=dict)
    first: list[Sample] = field(default_factory=list)
    loads: list[Sample] = field(default_factory=list)
    climbed: list[Sample] = field(default_factory=list)
    falls: list[Waterfall] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def noises(self) -> list[Noise]:
        """All looks at the machine."""
        return [s.noise for s in (*self.first, *self.loads, *self.climbed)]

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "plan": asdict(self.plan),
            "seconds": self.seconds,
            "candidates": self.labels,
            "skipped": [asdict(s) for s in self.skipped],
            "idle_rss": self.idle,
            "rest_cpu": self.rest,
            "first_token": [asdict(s) for s in self.first],
            "loads": [asdict(s) for s in self.loads],
            "ladder": [asdict(s) for s in self.climbed],
            "waterfall": [w.numbers() for w in self.falls],
            "held": [asdict(h) for h in self.held],
        }


Tell = Callable[[str], None]
"""Takes a line about what is done now."""


async def run(plan: Plan, choice: Choice, hold: float, sink: Sink, tell: Tell) -> Run:
    """Measure.

    Args:
        plan: how much.
        choice: what.
        hold: seconds of 1,000 streams on our lanes at the end; 0 for none.
        sink: takes all logs.
        tell: see `Tell`.

    Raises:
        ProcessError: nodes, Envoy or router did not start.
        ToolError: node or client cannot be built.
    """
    begun, found = time.monotonic(), Run(plan)
    async with field_of(choice, sink, lambda what: tell(f"starting {what}")) as running:
        found.skipped = running.skipped
        for c in running.candidates:
            found.kinds[c.name] = {str(pid): kind for pid, kind in c.pids.items()}
            found.labels[c.name] = c.label
        # A load first, so that each has its buffers and connections before anything is timed.
        for c in running.candidates:
            tell(f"warming up: {c.label}")
            await run_client(c.port, Load(8, 200, seconds=0.2, warm=0.2), [])
        await _first_tokens(plan, running, found.first, tell)
        for c in running.candidates:
            found.idle[c.name] = {str(pid): _rss(pid) for pid in c.pids}
        tell("what they use at rest")
        found.rest = await _rested(running.candidates, plan.rest)
        await _loads(plan, running, found.loads, tell)
        tell("waterfall of the request path")
        found.falls = await waterfalls(running.candidates[0], running.nodes, plan.requests, choice.concurrency, sink)
        await _ladder(plan, running, found.climbed, tell)
        if hold:
            for c in running.ours:
                tell(f"{c.label}: 1000x{RATE} for {hold:g} s")
                found.held.append(await _held(c, hold))
    found.seconds = time.monotonic() - begun
    return found


async def _first_tokens(plan: Plan, running: Field, samples: list[Sample], tell: Tell) -> None:
    for number in range(plan.bodies):
        for size, words in BODIES.items():
            load = Load(1, 0, requests=plan.requests, body=size)
            await _round(running, load, number, samples, _prefixed(tell, f"first token, {words}", number, plan.bodies))


async def _loads(plan: Plan, running: Field, samples: list[Sample], tell: Tell) -> None:
    for number in range(max(plan.rounds.values())):
        for streams, rounds in plan.rounds.items():
            if number < rounds:
                load = plan.load(streams)
                await _round(running, load, number, samples, _prefixed(tell, load.name, number, rounds))


async def _round(running: Field, load: Load, number: int, samples: list[Sample], tell: Tell) -> None:
    floor, *others = running.candidates
    others = others[::-1] if number % 2 else others
    for c in (floor, *others, floor):
        tell(c.label)
        samples.append(await _sample(c, load, number))


async def _ladder(plan: Plan, running: Field, samples: list[Sample], tell: Tell) -> None:
    """Each rung with all that stood on the one before."""
    climbing = list(running.candidates)
    for rung, streams in enumerate(plan.ladder):
        load = plan.rung(streams)
        stood = []
        for c in climbing[::-1] if rung % 2 else climbing:
            tell(f"highest sustained rate, {load.name}: {c.label}")
            # Once more before it counts as too much: a moment of noise must not end the climb.
            for attempt in range(2):
                samples.append(await _sample(c, load, attempt))
                if samples[-1].sustained:
                    stood.append(c)
                    break
        climbing = [c for c in climbing if c in stood]


async def _sample(c: Candidate, load: Load, number: int) -> Sample:
    await asyncio.sleep(_RELAX)
    noise = await looked()
    try:
        result = await run_client(c.port, load, list(c.pids))
    except ToolError as e:
        result = {"error": str(e)}
    return Sample(c.name, number, load, result, noise)


async def _held(c: Candidate, seconds: float) -> Held:
    load = Load(1000, RATE, seconds=seconds, warm=6.0, requests=max(round(seconds / _ANSWER), 1))
    rss: list[int] = []

    async def watch() -> None:
        await asyncio.sleep(load.warm)
        while True:
            rss.append(sum(map(_rss, c.pids)))
            await asyncio.sleep(_LOOK)

    watching = asyncio.create_task(watch())
    try:
        sample = await _sample(c, load, 0)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return Held(c.name, sample.result, rss, sample.sustained)


async def _rested(candidates: list[Candidate], seconds: float) -> dict[str, dict[str, float]]:
    """Health checks, timers and the like: what no token is to blame for."""

    def used() -> dict[str, dict[str, float]]:
        return {c.name: {str(pid): _cpu(pid) for pid in c.pids} for c in candidates}

    before = used()
    await asyncio.sleep(seconds)
    return {name: {pid: (cpu - before[name][pid]) / seconds for pid, cpu in of.items()} for name, of in used().items()}


def _cpu(pid: int) -> float:
    """Seconds of CPU time of all its threads; /proc/PID/stat has it in ticks of 10 ms."""
    return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _rss(pid: int) -> int:
    line = next(t for t in Path(f"/proc/{pid}/status").read_text().splitlines() if t.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _prefixed(tell: Tell, step: str, number: int, of: int) -> Tell:
    """Tells what is measured of a candidate."""
    return lambda label: tell(f"{step}, round {number + 1} of {of}: {label}")
