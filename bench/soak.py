"""Soak: conversations at half load for a long time, through real Envoy, to see that nothing grows.

Two routers on a real Redis, simulated vLLM nodes, the official client. Every few seconds each router's memory (RSS),
open file descriptors, live streams and turns are noted. It fails (exit code 1) if a router's memory has grown by more
than 5% after the warm-up, or if streams, turns or file descriptors are left when the agents have gone, or if an answer
is wrong.

usage: python bench/soak.py [--minutes 30] [--conversations 25] [--json FILE] [--plot FILE]
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(_ROOT / folder) for folder in ("extproc", "bench")]

import aiohttp

from faults.counters import Outcomes, reuse, samples
from faults.deployment import Deployment, deployed
from faults.load import Load

_LOOKS = 300  # in a run
_WARM_UP = 1 / 6  # of the run
_GROWTH = 5.0  # percent
_QUIET = 8.0  # seconds until Envoy has closed what was idle
_MIB = 1 << 20
_THREADS = 4  # descriptors that may come and go: those of Redis and of the prefill leg


@dataclass
class Look:
    """A router at one time.

    Attributes:
        at: seconds since the start.
        rss: bytes.
        fds: open file descriptors.
        streams: exchanges that are being processed.
        turns: turns that are being processed.
    """

    at: float
    rss: int
    fds: int
    streams: int
    turns: int


@dataclass
class Soak:
    """What was seen.

    Attributes:
        looks: by router.
        left: of each router, when the agents had gone.
        problems: promises that did not hold.
        numbers: what else is told.
    """

    looks: list[list[Look]]
    left: list[Look] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    numbers: dict[str, object] = field(default_factory=dict)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: %(default)g)")
    parser.add_argument("--conversations", type=int, default=25, help="at a time (default: %(default)s)")
    parser.add_argument("--think", type=float, default=2.5, help="seconds between turns (default: %(default)g)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory over time there (needs matplotlib)")
    arguments = parser.parse_args()
    if arguments.conversations < 1:
        parser.error("--conversations: at least one")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no process may be left
    try:
        soak = asyncio.run(_soak(arguments.minutes * 60, arguments.conversations, arguments.think))
    except KeyboardInterrupt:
        sys.exit("soak: stopped")
    print("Simulated nodes; real Envoy, routers, Redis.")
    print(json.dumps(soak.numbers, indent=1))
    if arguments.json:
        looks = [[vars(look) for look in one] for one in soak.looks]
        arguments.json.write_text(json.dumps({**soak.numbers, "problems": soak.problems, "looks": looks}, indent=1))
    if arguments.plot:
        _plot(soak, arguments.plot)
    for problem in soak.problems:
        print(f"FAILED: {problem}")
    sys.exit(bool(soak.problems))


async def _soak(seconds: float, conversations: int, think: float) -> Soak:
    async with deployed(lambda *_: None) as deployment, aiohttp.ClientSession() as session:
        load = Load(deployment, conversations, think=think, keep=False)
        outcomes = Outcomes(deployment.admins)
        soak = Soak([[] for _ in deployment.routers])
        before = await _look(deployment, session, 0.0)
        begun = time.monotonic()
        async with load.running():
            while (at := time.monotonic() - begun) < seconds:
                await asyncio.sleep(max(2.0, seconds / _LOOKS))
                await outcomes.look(session)
                for looks, look in zip(soak.looks, await _look(deployment, session, at), strict=True):
                    looks.append(look)
                now = [looks[-1] for looks in soak.looks]
                memory = ", ".join(f"{look.rss / _MIB:.1f} MiB {look.fds} fds {look.streams} streams" for look in now)
                print(f"{at / 60:5.1f} min  {load.count} turns, {load.failed} failed; {memory}", file=sys.stderr)
        await asyncio.sleep(_QUIET)
        await outcomes.look(session)
        soak.left = await _look(deployment, session, time.monotonic() - begun)
    _judge(soak, before, load, outcomes, seconds)
    return soak


async def _look(deployment: Deployment, session: aiohttp.ClientSession, at: float) -> list[Look]:
    found = []
    for router, admin in zip(deployment.routers, deployment.admins, strict=True):
        proc = Path(f"/proc/{router.pid}")
        rss = next(line for line in (proc / "status").read_text().splitlines() if line.startswith("VmRSS:"))
        while not (counted := await samples(session, admin)):  # noqa: ASYNC110 - a busy machine
            await asyncio.sleep(1.0)
        streams, turns = (int(counted[f"kvreturn_live_{name}"]) for name in ("streams", "turns"))
        fds = sum(1 for _ in (proc / "fd").iterdir())
        found.append(Look(at, int(rss.split()[1]) * 1024, fds, streams, turns))
    return found


def _judge(soak: Soak, before: list[Look], load: Load, outcomes: Outcomes, seconds: float) -> None:
    routers = []
    for number, (looks, first, left) in enumerate(zip(soak.looks, before, soak.left, strict=True)):
        warm = [look for look in looks if look.at >= _WARM_UP * seconds]
        third = max(1, len(warm) // 3)
        early, late = (statistics.median(look.rss for look in part) for part in (warm[:third], warm[-third:]))
        growth = 100 * (late - early) / early
        most = max(look.streams for look in looks)
        routers.append(
            {
                "rss_mib": {"start": first.rss / _MIB, "warm": early / _MIB, "end": late / _MIB},
                "growth_percent": growth,
                "fds": {"start": first.fds, "most": max(look.fds for look in looks), "left": left.fds},
                "streams": {"most": most, "left": left.streams},
                "turns_left": left.turns,
            }
        )
        if growth > _GROWTH:
            soak.problems.append(f"router {number}: memory grew by {growth:.1f}% after the warm-up")
        if left.streams or left.turns:
            soak.problems.append(f"router {number}: {left.streams} streams and {left.turns} turns never ended")
        if left.fds > max(look.fds for look in warm[:third]) + _THREADS:
            soak.problems.append(f"router {number}: {left.fds} file descriptors are left")
    if load.wrong:
        soak.problems.append(f"{load.wrong} wrong answers")
    if load.failed:
        soak.problems.append(f"{load.failed} turns failed")
    soak.numbers = {
        "minutes": seconds / 60,
        "turns": load.count,
        "turns_per_second": load.count / seconds,
        "failed": load.failed,
        "wrong": load.wrong,
        "reuse_percent": reuse(outcomes.total),
        "outcomes": outcomes.total,
        "routers": routers,
    }


def _plot(soak: Soak, path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    most = max(look.rss for looks in soak.looks for look in looks) / _MIB
    for number, looks in enumerate(soak.looks):
        axes.plot([look.at / 60 for look in looks], [look.rss / _MIB for look in looks], label=f"router {number}")
    axes.set(xlabel="minutes", ylabel="resident memory, MiB", ylim=(0, 1.2 * most))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
