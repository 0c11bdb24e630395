"""Where the time to first token goes, step by step."""

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvreturn.envoy.process import Sink
from lanes.candidates import FAST, Candidate, router_settings, start_lane
from lanes.ground import ground
from lanes.plan import BODIES
from lanes.tools import Load, run_client

_STEPS = Path(__file__).resolve().parent / "steps.py"
_ORDER = ("body", "read, fingerprint", "take", "choose", "P leg", "rewrite", "answer")


@dataclass(frozen=True)
class Bar:
    """A step; medians in milliseconds.

    Attributes:
        step: its name.
        begin: since the router had the headers of Envoy's call.
        length: of it.
    """

    step: str
    begin: float
    length: float


@dataclass(frozen=True)
class Waterfall:
    """The request path of one body size; medians in milliseconds.

    Attributes:
        body: bytes.
        bars: of the router.
        router: from then to the end of the last bar.
        ttft: that the client saw with this router.
        floor: that it saw with the plain Envoy.
    """

    body: int
    bars: list[Bar]
    router: float
    ttft: float
    floor: float

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"envoy_and_calls": self.ttft - self.floor - self.router}


async def waterfalls(
    floor: Candidate, nodes: tuple[str, str], requests: int, concurrency: int, sink: Sink
) -> list[Waterfall]:
    """Send requests of each size through a router that notes its steps.

    Args:
        floor: the plain Envoy.
        nodes: P's address and D's.
        requests: of each size.
        concurrency: Envoy's worker threads.
        sink: takes all logs.

    Raises:
        ProcessError: router or Envoy did not start.
        ToolError: the client failed.
    """
    found = []
    async with ground(concurrency, sink) as on:
        out = on.folder / "steps.jsonl"
        port, _ = await start_lane(on, router_settings(*nodes, FAST), [sys.executable, str(_STEPS), str(out)])
        for size in BODIES:
            load = Load(1, 0, requests=requests, body=size)
            await run_client(port, load, [])  # the first ones open connections
            seen = len(out.read_text().splitlines())
            ttft = (await run_client(port, load, []))["ttft_us"]["p50"] / 1e3
            below = (await run_client(floor.port, load, []))["ttft_us"]["p50"] / 1e3
            exchanges = [json.loads(line) for line in out.read_text().splitlines()[seen:]]
            found.append(_waterfall(size, exchanges, ttft, below))
    return found


def _waterfall(size: int, exchanges: list[list[tuple[str, float, float]]], ttft: float, floor: float) -> Waterfall:
    begins: dict[str, list[float]] = {step: [] for step in _ORDER}
    lengths: dict[str, list[float]] = {step: [] for step in _ORDER}
    for noted in exchanges:
        starts = [begin for step, begin, _ in noted if step == "in all"]
        if not starts:
            continue  # no turn
        # The first of several; what is before them is the end of the turn before.
        steps = {step: (begin, end) for step, begin, end in reversed(noted) if begin >= starts[0]}
        whole = starts[0]
        start = max((begin for step, begin, _ in noted if step == "call" and begin < whole), default=whole)
        steps["body"], steps["read, fingerprint"] = (start, whole), (whole, steps["read"][1])
        for step in _ORDER:
            if step in steps:
                begins[step].append(1e3 * (steps[step][0] - start))
                lengths[step].append(1e3 * (steps[step][1] - steps[step][0]))
    bars = [Bar(s, statistics.median(begins[s]), statistics.median(lengths[s])) for s in _ORDER if begins[s]]
    return Waterfall(size, bars, max(bar.begin + bar.length for bar in bars), ttft, floor)
