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
    assert (first["on"]["outcome"], first["on"]["read_back_tokens"]) == ("first_turn", 0)
    held, blocks = first["prompt_tokens"] + script.max_tokens - 1, 0  # D computed no KV for its last token
    for turn in later:
        print(turn)
        on = turn["on"]
        assert turn["off"]["computed_tokens"] == turn["prompt_tokens"]
        assert (on["outcome"], on["read_back_tokens"]) == ("hit", held)
        assert on["computed_tokens"] == turn["prompt_tokens"] - held
        blocks += -(-held // BLOCK)
        held = turn["prompt_tokens"] + script.max_tokens - 1
    print(result["transfers"], result["saved"])
    on = {"nixl_reads": len(later), "nixl_bytes": blocks * BLOCK_BYTES, "nixl_failed": 0}
    assert result["transfers"] == {"off": {"nixl_reads": 0, "nixl_bytes": 0, "nixl_failed": 0}, "on": on}
