"""What a dead collector costs a turn: time to first token with telemetry off, and with a collector that is dead.

Simulated nodes, and for each way a router and an Envoy of its own on loopback. Turns alternate between the ways, so
that whatever else the machine does falls on all alike. `hole` takes connections and never answers; `refused` is a port
where nobody listens. Spans and metrics are exported every half second, far more often than by default.

usage: python bench/exporter.py [--seconds 60] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "extproc"))

import openai

from kvreturn.demo.stack import WAYS, before_nodes, free_addresses, health, start
from kvreturn.envoy.process import Child

_OFTEN = {"OTEL_BSP_SCHEDULE_DELAY": "500", "OTEL_METRIC_EXPORT_INTERVAL": "500"}
_WAY = next(way for way in WAYS if way.name == "lazy")
_QUANTILES = (50, 90, 99)
_RESAMPLES = 500


def quiet(_source: str, _line: str) -> None:
    """Where the processes' logs go."""


@contextlib.asynccontextmanager
async def gateways(environs: Mapping[str, Mapping[str, str]]) -> AsyncIterator[dict[str, str]]:
    """One P and one D, and a gateway for each way with these variables. Gives their base URLs."""
    p, d = free_addresses(2)

    def node(role: str, address: str) -> Child:
        arguments = ["sim", role, "--listen", address, "--prefill-rate", "20000", "--model", _WAY.model]
        return Child(role, [sys.executable, "-m", "kvreturn.cli.main", *arguments], quiet)

    async with contextlib.AsyncExitStack() as stack:
        await start(stack, {node("prefill", p): [health(p)], node("decode", d): [health(d)]})
        urls = {}
        for name, environ in environs.items():
            with patch.dict(os.environ, environ):
                fronts, _ = await before_nodes(stack, quiet, {p: [_WAY]}, d)
            urls[name] = fronts[_WAY.name].gateway
        yield urls


async def turn(sdk: openai.AsyncOpenAI, messages: list[Any]) -> float:
    """One streamed turn; seconds to its first token."""
    begun, first, text = time.perf_counter(), 0.0, ""
    chunks = await sdk.chat.completions.create(model=_WAY.model, messages=messages, max_tokens=8, stream=True)
    async for chunk in chunks:
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first = first or time.perf_counter() - begun
            text += piece
    messages.append({"role": "assistant", "content": text})
    return first


async def measure(seconds: float) -> dict[str, list[float]]:
    """Times to first token, in seconds, by way."""
    with socket.create_server(("127.0.0.1", 0)) as hole:
        (nobody,) = free_addresses(1)
        environs = {
            "off": {},
            "hole": {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{hole.getsockname()[1]}", **_OFTEN},
            "refused": {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{nobody}", **_OFTEN},
        }
        async with gateways(environs) as urls, contextlib.AsyncExitStack() as stack:
            sdks = {
                name: await stack.enter_async_context(openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0))
                for name, url in urls.items()
            }
            times: dict[str, list[float]] = {name: [] for name in sdks}
            end, talk = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                talk += 1
                words = f"Conversation {talk}. " + "The quick brown fox jumps over the lazy dog. " * 20
                talks: dict[str, list[Any]] = {name: [] for name in sdks}
                for number in range(4):
                    for name in random.sample(sorted(sdks), len(sdks)):
                        talks[name].append({"role": "user", "content": f"Turn {number}: {words}"})
                        times[name].append(await turn(sdks[name], talks[name]))
    return times


def difference(a: list[float], b: list[float], percent: int) -> tuple[float, float, float]:
    """By how many seconds a percentile of `b` is above that of `a`, and between which two 95% of resamples lie."""

    def at(values: list[float]) -> float:
        return statistics.quantiles(values, n=100)[percent - 1]

    resampled = sorted(at(random.choices(b, k=len(b))) - at(random.choices(a, k=len(a))) for _ in range(_RESAMPLES))  # noqa: S311
    return at(b) - at(a), resampled[int(0.025 * _RESAMPLES)], resampled[int(0.975 * _RESAMPLES) - 1]


def main() -> None:
    """Measure, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there, in seconds")
    arguments = parser.parse_args()
    times = asyncio.run(measure(arguments.seconds))
    print(f"simulated nodes; {len(times['off'])} turns each, alternating; ms")
    for name, values in times.items():
        shown = statistics.quantiles(values, n=100)
        line = "  ".join(f"p{q} {shown[q - 1] * 1e3:7.2f}" for q in _QUANTILES)
        if name != "off":
            apart = (difference(times["off"], values, q) for q in _QUANTILES)
            line += "   more than off: " + "  ".join(
                f"{d * 1e3:+.2f} [{a * 1e3:+.2f}, {b * 1e3:+.2f}]" for d, a, b in apart
            )
        print(f"{name:>8}  {line}")
    if arguments.json:
        arguments.json.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
