"""vLLM's own multi-turn benchmark, unmodified, through the whole product with simulated nodes.

It is here because it imports vllm, and with it what only the engine's environment has.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvreturn.demo.vllm_node import EngineMissingError, engine_python, make_model
from support.bench import FIELDS_OF_VLLM
from support.gateway import product
from support.orchestrators import script

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
CONVERSATIONS, TURNS = 4, 3


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return engine_python()
    except EngineMissingError as e:
        pytest.skip(str(e))


def histories() -> list[dict[str, Any]]:
    """Conversations whose answers tell the script how long the model's are to be."""
    words = "Which file holds the code of the server, and what does its test check? "
    return [
        {
            "id": f"history-{c}",
            "messages": [
                message
                for t in range(TURNS)
                for message in (
                    {"role": "user", "content": f"{words * 6} Case {c}, question {t}."},
                    {"role": "assistant", "content": "The file is there and the test is in it. " * 3},
                )
            ],
        }
        for c in range(CONVERSATIONS)
    ]


async def run(python: Path, *arguments: object) -> tuple[int, str]:
    """Run something in the engine's environment; its exit code and its lines."""
    process = await asyncio.create_subprocess_exec(
        *map(str, (python, *arguments)),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_it_sees_no_difference_and_is_read_back_from_turn_2_on(python: Path, tmp_path: Path) -> None:
    folder = script("multi_turn")
    code, _ = await run(python, "-c", "import pandas")
    if code:
        pytest.skip("the engine's environment has no pandas, which the benchmark imports: run `make engine`")
    await make_model(python, tmp_path / "model", lambda *_: None)  # its tokenizer counts
    given = tmp_path / "histories.json"
    given.write_text(json.dumps(histories()))

    async def benchmark(name: str, url: str, *more: str) -> tuple[Any, Any]:
        """What it measured of each request, and the conversations with the model's answers."""
        stats, said = tmp_path / f"{name}-stats.json", tmp_path / f"{name}-said.json"
        files = ("--input-file", given, "--stats-json-output", stats, "--output-file", said)
        where = ("--url", url.removesuffix("/v1"), "--model", tmp_path / "model", "--served-model-name", "sim")
        load = ("--num-clients", 2, "--no-early-stop")
        code, out = await run(python, folder / "benchmark_serving_multi_turn.py", *files, *where, *load, *more)
        assert code == 0, out
        # Conversations are written as they end, which is any order.
        return json.loads(stats.read_text()), sorted(json.loads(said.read_text()), key=lambda c: str(c["id"]))

    async with product("kvreturn") as plain, product("kvreturn") as named:
        runs = await asyncio.gather(
            benchmark("plain", plain.front.url),
            benchmark("named", named.front.url, "--send-conversation-id"),
            benchmark("direct", plain.oracle),
        )
        for there in (plain, named):
            outcomes = await there.front.outcomes(CONVERSATIONS * TURNS)
            assert outcomes == {"first_turn": CONVERSATIONS, "hit": CONVERSATIONS * (TURNS - 1)}
            assert there.front.metric("read_back_tokens_total") > 0
            # The id is for the router, and for no node.
            assert not any("conversation_id" in body for body in there.asked(there.d[0], "/v1/chat/completions"))
    for stats, said in runs:
        # At its end it asks `empty()` of a multiprocessing queue, which may be wrong: then the last ones are lost.
        assert CONVERSATIONS * TURNS - 2 <= len(stats) <= CONVERSATIONS * TURNS
        assert all(set(row) == set(FIELDS_OF_VLLM) for row in stats)
        assert said == runs[-1][1]
    assert all(message["content"] for conversation in said for message in conversation["messages"])
