"""Chaos: conversations go on while processes are killed, restarted and paused under them.

Real Envoy, two routers, a real Redis with replica and sentinel, two prefill and two decode nodes (simulated: no GPU is
needed, and a wrong read of KV is a wrong answer), and agents with the official client. Every answer is compared with
that of a plain node. It takes about three minutes, five at most.

Promised, for each event:
- no wrong answer;
- lost are only streams that were on the killed process, and no new turns but one per thread of Envoy, which is what it
  takes to find that a node refuses;
- reuse afterwards is within 5 points of what it was before (of the turns that have something to gain);
- while Redis stands still, time to first token (p99) grows by no more than computing cold costs, the store's deadline
  (100 ms here) twice, 200 ms for the longer queue before P, and what it varies by here when nothing is wrong.
Exit code 1 if one of that does not hold.

usage: python bench/chaos.py [--event "router killed"] [--conversations 50] [--json FILE] [--log FILE]
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(_ROOT / folder) for folder in ("extproc", "bench")]

from faults import verdict
from faults.deployment import deployed
from faults.events import EVENTS
from faults.load import Load
from faults.run import Act, Phase, Run, Times
from kvreturn.envoy.process import ProcessError

_BOUND = 270.0  # seconds for all events; start and end take a few more
_QUIET = 5.0  # seconds between two lines of progress where they stay


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--event", choices=EVENTS, action="append", help="only this one; may be given again")
    parser.add_argument("--conversations", type=int, default=50, help="at a time (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write what all processes log there")
    arguments = parser.parse_args()
    if arguments.conversations < 1:
        parser.error("--conversations: at least one")
    begun = time.monotonic()
    names = arguments.event or list(EVENTS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no process may be left
    try:
        phases, acts = asyncio.run(_play(names, arguments.conversations, arguments.log))
    except ProcessError as e:
        sys.exit(f"chaos: {e}")
    except KeyboardInterrupt:
        sys.exit("chaos: stopped")
    print(file=sys.stderr)
    print("Nodes and their timing are SIMULATED; Envoy, routers, Redis and sentinel are real.")
    print("Reuse and time to first token: before, during and after each event.\n")
    print(verdict.table(acts))
    turns, wrong = sum(len(p.sent) for p in phases), sum(p.wrong for p in phases)
    print(f"\n{turns} turns in {time.monotonic() - begun:.0f} s, {wrong} wrong answers.")
    if arguments.json:
        arguments.json.write_text(json.dumps(verdict.numbers(phases, acts), indent=1))
    problems = verdict.broken(phases, acts)
    problems += [f"{name}: not come to its end within {_BOUND:g} s of all" for name in names[len(acts) :]]
    for problem in problems:
        print(f"BROKEN  {problem}")
    print("Some promises do not hold." if problems else "All promises hold.")
    sys.exit(bool(problems))


async def _play(events: Sequence[str], conversations: int, log: Path | None) -> tuple[list[Phase], Sequence[Act]]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("w")) if log else None
        print("starting nodes, Redis, routers and Envoy", file=sys.stderr)
        async with deployed(lambda name, line: _keep(file, name, line)) as deployment:
            run = Run(deployment, Load(deployment, conversations), Times(), _Progress())
            with contextlib.suppress(TimeoutError):  # what was seen until then is told
                async with asyncio.timeout(_BOUND):
                    await run.play({name: EVENTS[name] for name in events})
    return run.phases, run.acts


def _keep(file: TextIO | None, name: str, line: str) -> None:
    if file:
        file.write(f"{name}: {line}\n")


class _Progress:
    """One line that changes, or a line now and then where lines stay."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._said = ("", 0.0)

    def __call__(self, name: str, load: Load) -> None:
        now = time.monotonic()
        line = f"{now - self._begun:4.0f} s  {name:<26} {load.count:5} turns, {load.failed} failed, {load.wrong} wrong"
        if sys.stderr.isatty():
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        elif name != self._said[0] or now - self._said[1] > _QUIET:
            self._said = (name, now)
            print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
