"""Fits the distributions of fitted.json to recordings.

usage: python bench/scale/fit.py TRACE AGENTS > bench/scale/fitted.json

TRACE is `conversation_trace.jsonl.gz` of kvcache-ai/Mooncake (FAST'25 release), AGENTS a folder with agents' histories.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parents[2] / "extproc")]

from scale.traces import gap, histories, mooncake

_SOURCES = {
    "first, question, answer, user_gap, goes_on": "Mooncake's conversation trace (12,031 requests of a production chat "
    "service within an hour; kvcache-ai/Mooncake, Apache-2.0, FAST'25). A pause is the time between two requests less "
    "the answer at 80 tokens/s. Conversations are cut at both ends of the hour, so goes_on is too low.",
    "call, tool, calls, shared of agents": "the demonstrations of SWE-agent (MIT), 4 characters of JSON per token",
    "tool_gap": "assumed, as nobody publishes it: half of all tools are done within 3 s, one in 50 takes over a minute",
    "shared of chats": "Mooncake's trace: nearly all requests begin with the same chunk of 512 tokens",
}


def main() -> None:
    """Print the file."""
    requests, steps = mooncake(Path(sys.argv[1])), histories(Path(sys.argv[2]))
    pairs = [(requests[after.before], after) for after in requests if after.before is not None]
    common: dict[str, Any] = {
        "first": _log_normal(r.prompt for r in requests if r.before is None),
        "question": _log_normal(after.prompt - before.prompt - before.output for before, after in pairs),
        "answer": _log_normal(r.output for r in requests),
        "user_gap": _log_normal(gap(*pair) for pair in pairs),
        "tool": _log_normal(steps.results),
        "call": _log_normal(steps.calls),
        "tool_gap": {"median": 3.0, "sigma": 1.5, "most": 900},
        "goes_on": round(len(pairs) / len(requests), 3),
    }
    agent = {"calls": statistics.fmean(steps.turns) - 1, "shared": round(statistics.fmean(steps.system))}
    chat = {"calls": 0.0, "shared": 512}
    print(json.dumps({"sources": _SOURCES, "habits": {"agent": common | agent, "chat": common | chat}}, indent=1))


def _log_normal(values: Iterable[float]) -> dict[str, float]:
    """Median, and the spread that puts a tenth of all above the upper decile; nothing above the last percentile."""
    order = sorted(max(value, 1.0) for value in values)
    median, decile, most = statistics.median(order), order[len(order) * 9 // 10], round(order[len(order) * 99 // 100])
    return {"median": round(median, 1), "sigma": round(math.log(decile / median) / 1.2816, 3), "most": most}


if __name__ == "__main__":
    main()
