"""Where read-back pays at scale: a discrete-event model of many P/D pairs, for one-way, lazy, eager and auto.

Nodes take the time of a 32B model on 8 H200 each (rates.py says how the rates were fitted), conversations are drawn
from fitted distributions, or come from recordings. What auto does is decided by the router's own code.

usage: python bench/scale [--sweep cache] [--size 0.1] [--json FILE] [--plot docs/img] [--write docs/scale.md]
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / folder) for folder in ("extproc", "tests", "bench")]

from closed_loop.scenarios import SCENARIOS
from scale import published, simulated, tables, traces
from scale.figures import Figures, as_json
from scale.rates import LONG, SHORT, fitted
from scale.router import WAYS
from scale.serving import Deployment
from scale.sweeps import Point, Sweep, serve, sweeps
from scale.workload import Arrivals, habits

_BEGIN, _END = "<!-- bench/scale: {}: begin -->", "<!-- bench/scale: {}: end -->"
_CHECKED = 120.0  # virtual seconds of each comparison with the simulator


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=[*sweeps(), "recorded", "checks"], action="append", help="only this one")
    parser.add_argument("--size", type=float, default=1.0, help="of the runs; 1 is 102,400 conversations on 64 pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation_trace.jsonl.gz, for the sweep `recorded`")
    parser.add_argument("--agents", type=Path, metavar="FOLDER", help="histories of agents, for the same sweep")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write pictures there")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this page, between their marks")
    arguments = parser.parse_args()
    if arguments.write and not arguments.write.is_file():  # before the runs, which take long
        parser.error(f"--write: there is no page {arguments.write}")
    chosen = sweeps(arguments.size, arguments.seed)
    if arguments.trace or arguments.agents:
        chosen["recorded"] = _recorded(arguments.trace, arguments.agents, arguments.seed)
    chosen = {name: s for name, s in chosen.items() if not arguments.sweep or name in arguments.sweep}
    runs = _serve(chosen)
    sections: dict[str, Sequence[str]] = {name: tables.of_sweep(sweep, runs[name]) for name, sweep in chosen.items()}
    if "regimes" in chosen:
        sections["regimes-short"] = tables.of_regimes(chosen["regimes"], runs["regimes"])
    if not arguments.sweep or "checks" in arguments.sweep:
        sections |= _checks()
    for name, lines in sections.items():
        print(f"\n{name}\n", *lines, sep="\n")
    if arguments.json:
        numbers = {n: {way: [as_json(f) for f in each] for way, each in r.items()} for n, r in runs.items()}
        arguments.json.write_text(json.dumps(numbers, indent=1))
    if arguments.plot:
        from scale import plots  # noqa: PLC0415 - matplotlib takes a second

        arguments.plot.mkdir(parents=True, exist_ok=True)
        for name in chosen.keys() & plots.PANELS.keys():
            panels, logarithmic = plots.PANELS[name]
            path = arguments.plot / f"scale-{name}.png"
            plots.draw(chosen[name], runs[name], panels, path, logarithmic=logarithmic)
    if arguments.write:
        _write(arguments.write, sections)


def _serve(chosen: dict[str, Sweep]) -> dict[str, dict[str, list[Figures]]]:
    """All runs, as many at a time as there are processors, the longest first."""
    begun = time.monotonic()
    jobs = [(name, way, i) for name, sweep in chosen.items() for way in WAYS for i in range(len(sweep.points))]
    jobs.sort(key=lambda job: -chosen[job[0]].points[job[2]].deployment.pairs)
    found: dict[tuple[str, str, int], Figures] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        running = [(job, pool.submit(serve, chosen[job[0]].points[job[2]], job[1])) for job in jobs]
        for done, ((name, way, i), future) in enumerate(running, 1):
            found[name, way.name, i] = future.result()
            label = chosen[name].points[i].label
            print(f"{time.monotonic() - begun:5.0f} s  {done}/{len(jobs)}  {name} {label} {way.name}", file=sys.stderr)
    return {
        name: {way.name: [found[name, way.name, i] for i in range(len(sweep.points))] for way in WAYS}
        for name, sweep in chosen.items()
    }


def _recorded(trace: Path | None, agents: Path | None, seed: int) -> Sweep:
    """Real conversations, for those who have them."""
    points = []
    if trace:
        requests = traces.mooncake(trace)
        hour, seconds = traces.recorded(requests), requests[-1].when
        for pairs in (2, 4):
            on = Deployment(fitted(), pairs, shared=512)
            points.append(Point(f"Mooncake's hour, {pairs} pairs", pairs, on, hour, seconds))
    if agents:
        agent = traces.as_observed(habits("agent"), traces.histories(agents))
        rate, conversations = 0.5, 1_600
        on = Deployment(fitted(), pairs=2, shared=agent.shared)
        workload = Arrivals(agent, 2 * conversations, 2 * rate, seed)
        points.append(Point("agents, steps as recorded", 3, on, workload, conversations / rate))
    return Sweep("Recorded conversations", "recording", tuple(points))


def _checks() -> dict[str, Sequence[str]]:
    """The model and the simulator against the publication, and the one against the other."""
    rates = fitted()
    theirs = [
        simulated.published(point.prefix, rates, read_back=read_back)
        for point in (SHORT, LONG)
        for read_back in (False, True)
    ]
    sections: dict[str, Sequence[str]] = {"published": tables.of_published(published.compare(rates), theirs)}
    for name in "CBA":
        scenario = replace(SCENARIOS[name], phases=SCENARIOS[name].phases[:1])
        sections[f"simulator-{name}"] = tables.of_agreement(simulated.agents(scenario, _CHECKED))
    return sections


def _write(path: Path, sections: dict[str, Sequence[str]]) -> None:
    page = path.read_text()
    for name, lines in sections.items():
        begin, end = _BEGIN.format(name), _END.format(name)
        if begin in page:
            head, tail = page.split(begin)[0], page.split(end)[1]
            page = "\n".join([f"{head}{begin}", "", *lines, "", f"{end}{tail}"])
    path.write_text(page)


if __name__ == "__main__":
    main()
