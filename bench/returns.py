"""`return: lazy`, `eager` and `auto` under pressure: agents in a closed loop, through the router, to P and D.

The router is the real one, from ext_proc messages to prefill legs. Simulated are the nodes (kvreturn.sim: blocks,
prefix caches, pins, timing), Envoy (a few lines that speak its protocol), the agents, and time: it jumps from event to
event.

usage: python bench/returns.py [--scenario A] [--seeds 3] [--json FILE] [--plot FOLDER] [--write docs/return.md]
"""

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(_ROOT / folder) for folder in ("extproc", "tests", "bench")]

from closed_loop import tables
from closed_loop.running import Run, play
from closed_loop.scenarios import SCALE, SCENARIOS, WAYS

_BEGIN, _END = "<!-- bench/returns.py: begin -->", "<!-- bench/returns.py: end -->"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only this one; may be given again")
    parser.add_argument("--seeds", type=int, default=3, help="how many runs of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write a picture of auto's choices over time there")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this page, between its marks")
    arguments = parser.parse_args()
    names = arguments.scenario or list(SCENARIOS)
    runs = _play(names, arguments.seeds)
    text = "\n".join(_page(name, runs[name]) for name in names)
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps({name: tables.numbers(runs[name]) for name in names}, indent=1))
    if arguments.plot:
        from closed_loop import plots  # noqa: PLC0415 - matplotlib takes a second

        for name in names:
            plots.choices(SCENARIOS[name], runs[name]["auto"][0], arguments.plot / f"returns-{name.lower()}.png")
    if arguments.write:
        page = arguments.write.read_text()
        before, after = page[: page.index(_BEGIN) + len(_BEGIN)], page[page.index(_END) :]
        arguments.write.write_text(f"{before}\n\n{text}\n{after}")


def _play(names: list[str], seeds: int) -> dict[str, dict[str, list[Run]]]:
    """All runs, as many at a time as there are processors."""
    begun = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = {
            (name, way.name, seed): pool.submit(play, SCENARIOS[name], way, seed)
            for name in names
            for way in WAYS
            for seed in range(seeds)
        }
        for i, ((name, way, seed), job) in enumerate(jobs.items(), 1):
            job.result()
            print(f"{time.monotonic() - begun:5.0f} s  {i}/{len(jobs)}  {name} {way} {seed}", file=sys.stderr)
    return {
        name: {way.name: [jobs[name, way.name, seed].result() for seed in range(seeds)] for way in WAYS}
        for name in names
    }


def _page(name: str, runs: dict[str, list[Run]]) -> str:
    """A scenario's section, in Markdown."""
    scenario, seeds = SCENARIOS[name], len(runs["auto"])
    lines = [f"### {name}. {scenario.title}", ""]
    for i, phase in enumerate(scenario.phases):
        found = tables.ratios(runs, i)
        what = (
            f"*{phase.name}*, {phase.agents} agents, {phase.seconds:g} s; medians of {seeds} runs. Tokens are per turn;"
        )
        bound = f"median {statistics.median(found):.2f}, least {min(found):.2f}; {tables.ALLOWED:g} is required."
        lines += [f"{what} one stands for {SCALE}.", "", *tables.of_ways(runs, i), ""]
        lines += [f"Turns/s of auto over those of the better of lazy and eager: {bound}", ""]
    return "\n".join([*lines, *tables.of_choices(runs), ""])


if __name__ == "__main__":
    main()
