"""What the proof costs: time on D and P per turn, and bytes on the wire.

usage: python bench/connector_cost.py [--tokens 24000] [--block-size 16]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "connector"))

from kvreturn_connector import wire
from kvreturn_connector.handles import Offer, check_handle, prove
from kvreturn_connector.pins import ticket
from kvreturn_connector.settings import Settings

_RUNS = 50


def milliseconds(work: Callable[[], Any]) -> float:
    """Median of some runs."""
    times = []
    for _ in range(_RUNS):
        begun = time.perf_counter()
        work()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What the proof of a read costs.")
    parser.add_argument("--tokens", type=int, default=24_000, help="tokens that D holds")
    parser.add_argument("--block-size", type=int, default=16)
    arguments = parser.parse_args()
    held, size = arguments.tokens, arguments.block_size
    tokens = [i * 7919 % 150_000 for i in range(held)]
    blocks = list(range(1, -(-held // size) + 1))
    seed = wire.chain_seed(b"secret")
    settings = Settings(bidirectional=True)

    def on_d() -> dict[str, Any]:
        digests = wire.block_digests(tokens, size, seed)
        ticket("engine", "request", blocks, held, digests)
        return wire.dump_proof(wire.Proof(size, wire.scope_tag(seed), digests, tuple(tokens[-300:]), 480.0))

    handle = {
        "remote_block_ids": [blocks],
        "remote_engine_id": "engine",
        "remote_request_id": "request",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "remote_num_tokens": held,
    }
    bare = len(json.dumps(handle, separators=(",", ":")))
    handle[wire.MEMBER] = on_d()
    growth = len(json.dumps(handle, separators=(",", ":"))) - bare
    generated = len(json.dumps(handle[wire.MEMBER]["generated"], separators=(",", ":")))
    prompt = [*tokens, *range(200)]

    def on_p() -> Offer:
        return prove(*check_handle(handle, settings), prompt, size, seed, None)

    print(f"{held} tokens, {len(blocks)} blocks of {size}; medians of {_RUNS} runs")
    print(f"D, at the end of a turn: {milliseconds(on_d):.2f} ms")
    print(f"P, proof of a handle:    {milliseconds(on_p):.2f} ms")
    print(f"P or D, prompt digest:   {milliseconds(lambda: wire.prompt_digest(prompt, seed)):.2f} ms")
    print(f"handle: {(growth - generated) / len(blocks):.2f} bytes more per block, and {generated} for 300 token ids")


if __name__ == "__main__":
    main()
