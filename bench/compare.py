"""What stands between client and node, side by side: plain Envoy, our lanes, vLLM's example proxy, vllm-router.

A paced backend and client in C (built by `cc` at first use), real Envoy, real router. Writes a report in JSON and one
in HTML, says which targets are met, and when the machine was too noisy to tell.

usage: python bench/compare.py [--short] [--hold SECONDS] [--only NAME ...] [--proxy PATH] [--vllm-router PATH]
"""

import argparse
import asyncio
import json
import os
import resource
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(_ROOT / folder) for folder in ("extproc", "bench")]

from kvreturn.envoy.process import ProcessError
from lanes import noise
from lanes.candidates import FAST, PORTABLE, PROXY, VLLM_ROUTER, Choice
from lanes.figures import figures
from lanes.page import render
from lanes.plan import FULL, SHORT
from lanes.run import run
from lanes.targets import Target, targets
from lanes.tools import ToolError

_FILES = 65_536
_NAMES = (PORTABLE, FAST, "proxy", "vllm-router")


def main() -> None:
    """Measure, print, write."""
    arguments = _arguments()
    _raise_limit()
    choice = Choice(
        proxy=arguments.proxy,
        proxy_python=arguments.proxy_python,
        vllm_router=arguments.vllm_router,
        concurrency=arguments.concurrency,
        only=arguments.only,
    )
    plan = SHORT if arguments.short else FULL
    lines: list[str] = []
    try:
        found = asyncio.run(
            run(plan, choice, arguments.hold, lambda name, line: lines.append(f"{name}: {line}"), _tell)
        )
    except (ProcessError, ToolError) as e:
        sys.exit(f"error: {e}")
    finally:
        if arguments.logs:
            arguments.logs.write_text("\n".join(lines) + "\n")
    worked_out = figures(found)
    promised = targets(found, worked_out)
    loud = noise.words(found.noises)
    numbers = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "noise": loud,
        "targets": [vars(t) for t in promised],
        "figures": worked_out.numbers(),
        "run": found.numbers(),
    }
    arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")
    _show(promised, loud, [f"{s.label}: {s.why}" for s in found.skipped])
    from lanes import plots  # noqa: PLC0415 - matplotlib takes a second, and only the page needs it

    drawn = {
        "loads": plots.loads_svg(found, worked_out),
        "first": plots.first_svg(found, worked_out),
        "waterfall": plots.waterfall_svg(found.falls),
    }
    arguments.html.write_text(render(found, worked_out, promised, drawn))
    print(f"{found.seconds:.0f} s; wrote {arguments.json} and {arguments.html}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent
    parser.add_argument("--short", action="store_true", help="the same in small, in less than three minutes")
    parser.add_argument(
        "--hold", type=float, default=0.0, metavar="SECONDS", help="then 1,000x30 so long, our lanes only"
    )
    parser.add_argument("--only", nargs="+", default=(), choices=_NAMES, help="besides the plain Envoy")
    parser.add_argument("--proxy", type=Path, default=PROXY, metavar="PATH", help="vLLM's disagg_proxy_multiturn.py")
    parser.add_argument("--proxy-python", default=sys.executable, metavar="PATH", help="runs it; needs fastapi, httpx")
    found = shutil.which("vllm-router") or str(VLLM_ROUTER / "bin/vllm-router")
    parser.add_argument("--vllm-router", type=Path, default=Path(found), metavar="PATH", help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=2, help="Envoy's worker threads (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=here / "report.json", metavar="FILE")
    parser.add_argument("--html", type=Path, default=here / "report.html", metavar="FILE")
    parser.add_argument("--logs", type=Path, metavar="FILE", help="write there what all processes say")
    return parser.parse_args()


def _raise_limit() -> None:
    """Thousands of connections, in each process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _tell(line: str) -> None:
    print(
        f"\r\x1b[K{line}" if sys.stderr.isatty() else line,
        end="" if sys.stderr.isatty() else "\n",
        file=sys.stderr,
        flush=True,
    )


def _show(promised: list[Target], noisy: str | None, skipped: list[str]) -> None:
    _tell("")
    width = max(len(t.figure) for t in promised)
    for t in promised:
        print(f"{t.verdict:<12}  {t.figure:<{width}}  {t.target:<12}  {t.value}")
    for line in (*([noisy] if noisy else []), *(f"skipped: {s}" for s in skipped)):
        print(line)


if __name__ == "__main__":
    main()
