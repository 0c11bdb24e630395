"""The demo through real Envoy, on nodes in this process that take no time: what it shows, and that reuse is real."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import kvreturn.cli.demo
import kvreturn.demo.run
from kvreturn.demo.run import play
from kvreturn.demo.script import built_in, from_file
from kvreturn.demo.stack import Stack
from support import corpus
from support.demo import SHORT, nodes, run
from support.gateway import CHAT

BLOCK = 16
THRESHOLD = 64  # fewer tokens are computed, not read


@pytest.fixture
def short(tmp_path: Path) -> Path:
    path = tmp_path / "short.json"
    path.write_text(json.dumps(SHORT))
    return path


def played_on(make: Callable[[], Any]) -> Any:  # noqa: ANN401 - stands for `simulated`
    @contextlib.asynccontextmanager
    async def simulated(*_: object) -> AsyncIterator[Stack]:
        async with make() as there:
            yield there.stack

    return simulated


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns are waited for anyway."""
    monkeypatch.setattr(kvreturn.demo.run, "PAUSE", 0.0)


@pytest.fixture
def _plain_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvreturn.cli.demo, "simulated", played_on(nodes))


@pytest.mark.usefixtures("_plain_nodes")
def test_the_table_fits_a_terminal_and_says_what_is_simulated(short: Path) -> None:
    ran = run("--conversation", str(short))
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Simulated: the nodes and all timing")
    head = next(i for i, line in enumerate(lines) if line.startswith("turn prompt"))
    columns = [line.split() for line in lines[head + 1 : head + 4]]
    assert [(c[0], c[-1]) for c in columns] == [("1", "first_turn"), ("2", "hit"), ("3", "hit")]
    assert {len(c) for c in columns} == {11}
    assert max(map(len, lines[head - 1 : head + 4])) < 80
    assert "In every turn all four answers were the same." in lines


@pytest.mark.parametrize("json_too", [False, True])
def test_answers_that_differ_are_a_failure(
    monkeypatch: pytest.MonkeyPatch,
    short: Path,
    json_too: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    monkeypatch.setattr(kvreturn.cli.demo, "simulated", played_on(lambda: nodes(oracle_template="tools_last")))
    ran = run("--conversation", str(short), *(["--json"] if json_too else []))
    assert ran.code == 1
    assert ran.err == "The answers differ: this must never happen.\n"
    if json_too:
        assert json.loads(ran.out)["identical"] is False
    else:
        assert "ANSWERS DIFFER" in ran.out
        assert "all four answers were the same" not in ran.out


@pytest.mark.parametrize("template", ["plain", "drop_thinking"])
async def test_p_computes_at_most_the_new_suffix_and_one_block(template: str) -> None:
    """New is what follows the longest prefix that D held; `drop_thinking` makes that end before D's own tokens do."""
    script = built_in()
    async with nodes(template) as there, aiohttp.ClientSession() as session:
        turns = [turn async for turn in play(there.stack, script)]
        bodies = [json.loads(r.body) for r in there.d.requests if r.path == CHAT]
        held: list[int] = []
        new, generations = [], []
        for body in [b for b in bodies if b["model"] == "demo-lazy"]:
            prompt, generated = await tokens_of(session, there.stack, body)
            shared = next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), len(held))
            new.append(len(prompt) - shared)
            held = prompt + generated[:-1]
            generations.append(len(generated) - 1)
    assert turns[-1].prompt_tokens > 20_000
    assert all(turn.identical for turn in turns)
    for way, returns in (("lazy", 0), ("eager", THRESHOLD)):
        excess = [turn.ways[way].computed_tokens - suffix for turn, suffix in zip(turns, new, strict=True)]
        assert max(excess) <= BLOCK + returns
    for turn, generation in zip(turns, generations, strict=True):
        off, lazy, eager = (turn.ways[way] for way in ("off", "lazy", "eager"))
        # A P that nobody disturbs kept the prompt's full blocks: what is behind them comes from D, if it is enough.
        behind = turn.prompt_tokens % BLOCK + generation
        assert eager.returned_tokens == (behind if behind >= THRESHOLD else 0)
        assert (eager.read_back_tokens, off.read_back_tokens) == (0, 0)
        assert (off.returned_tokens, lazy.returned_tokens) == (0, 0)
        assert (off.return_ms, lazy.return_ms) == (0, 0) < (eager.return_ms, 1)
    assert sum(new[1:]) < sum(t.prompt_tokens for t in turns[1:]) / 3


@pytest.mark.parametrize("path", corpus.files("data/agents/*.json"))
@pytest.mark.parametrize("tokenizer", [pytest.param("exact", marks=pytest.mark.slow), "blurry"])
async def test_recorded_histories_are_reused_and_answered_alike(path: Path, tokenizer: str) -> None:
    async with nodes(tokenizer=tokenizer) as there:
        turns = [turn async for turn in play(there.stack, from_file(path))]
    assert len(turns) >= 5
    assert all(turn.identical for turn in turns)
    for way in ("lazy", "eager"):
        assert turns[0].ways[way].outcome == "first_turn"
        assert {turn.ways[way].outcome for turn in turns[1:]} <= (
            {"hit"} if tokenizer == "exact" else {"hit", "partial_hit"}
        )


async def tokens_of(session: aiohttp.ClientSession, stack: Stack, body: Any) -> tuple[list[int], list[int]]:  # noqa: ANN401
    """Token ids of a request's prompt and of its answer, as the plain node has them."""
    asked = {k: v for k, v in body.items() if k not in {"kv_transfer_params", "stream_options", "stream"}}
    async with session.post(f"{stack.oracle}/chat/completions", json={**asked, "return_token_ids": True}) as response:
        answer = await response.json()
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
