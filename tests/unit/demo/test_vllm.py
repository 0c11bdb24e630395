"""The demo on real vLLM, as far as it goes without vLLM: what is counted, what is said, and how it fails."""

import asyncio
import contextlib
import io
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from rich.console import Console

import kvreturn.demo.stack
from kvreturn.demo.counters import Counts, RouterCounts, counts, router_counts, settled
from kvreturn.demo.result import sentences, summary
from kvreturn.demo.run import Played, Turn
from kvreturn.demo.show import Starting
from kvreturn.demo.stack import Stack, by_cache
from kvreturn.demo.vllm_node import EngineMissingError, engine_python
from kvreturn.envoy.process import Child, ProcessError
from support.demo import Ran, run
from support.envoy import unused_address

# From a prefill node of vLLM 0.32.0 that had served 1,000 tokens cold, then 1,065 with 34 blocks of 128 KiB from D.
METRICS = """\
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="8.388608e+06",model_name="tiny"} 1.0
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="tiny"} 1.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="tiny"} 1.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="tiny"} 4.456448e+06
# TYPE vllm:nixl_num_failed_transfers_total counter
vllm:nixl_num_failed_transfers_total{engine="0",model_name="tiny"} 0.0
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 1006.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 0.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 1059.0
"""
# 1, 2, 3: tokens of the prompt; off, lazy, eager: what each took. An eager turn's counts hold its return's.
TURNS = [
    Turn(
        1,
        100,
        {
            "off": Played(Counts(100), 9.0, "disabled"),
            "lazy": Played(Counts(100), 9.0, "first_turn"),
            "eager": Played(Counts(101, 120, 1, 524_288), 9.0, "first_turn", return_ms=70.0),
        },
        identical=True,
    ),
    Turn(
        2,
        300,
        {
            "off": Played(Counts(300), 30.0, "disabled"),
            "lazy": Played(Counts(180, 120, 1, 524_288), 20.0, "hit", 120),
            "eager": Played(Counts(181, 320, 1, 1_310_720), 10.0, "hit", return_ms=90.0),
        },
        identical=True,
    ),
    Turn(
        3,
        500,
        {
            "off": Played(Counts(500), 50.0, "disabled"),
            "lazy": Played(Counts(180, 320, 1, 1_310_720), 40.0, "hit", 320),
            "eager": Played(Counts(199, 524, 1, 2_097_152), 20.0, "hit", 4, return_ms=80.0),
        },
        identical=True,
    ),
]


@contextlib.asynccontextmanager
async def metrics_of(*texts: str) -> AsyncIterator[str]:
    """URL of a server that answers with these texts, one after the other, and then with the last one."""
    left = list(texts)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=left.pop(0) if len(left) > 1 else left[0])

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    host, port = unused_address().split(":")
    await web.TCPSite(runner, host, int(port)).start()
    yield f"http://{host}:{port}/metrics"
    await runner.cleanup()


async def test_counts_of_a_real_node() -> None:
    async with metrics_of(METRICS) as url, aiohttp.ClientSession() as session:
        now = await counts(session, url)
    assert now == Counts(computed=1006, read=1059, transfers=1, transferred_bytes=34 * 131_072, failed=0)
    assert now - Counts(computed=1000) == Counts(6, 1059, 1, 4_456_448)


async def test_a_turn_is_over_when_it_is_counted_and_its_return_has_ended() -> None:
    first = """\
kvreturn_turns_total{api="chat",model="a",outcome="first_turn"} 1.0
kvreturn_turns_total{api="chat",model="b",outcome="hit"} 7.0
kvreturn_return_choices_total{choice="eager",why="fixed"} 1.0
kvreturn_returns_total{result="returned"} 1.0
kvreturn_return_duration_seconds_sum 0.25
kvreturn_read_back_tokens_total 30.0
"""
    chosen = first.replace('choice="eager",why="fixed"} 1.0', 'choice="eager",why="fixed"} 2.0')
    counted = chosen + 'kvreturn_turns_total{api="chat",model="a",outcome="evicted"} 1.0\n'
    ended = counted + 'kvreturn_returns_total{result="timeout"} 1.0\n'
    async with metrics_of(first, chosen, counted, ended) as url, aiohttp.ClientSession() as session:
        before = await router_counts(session, url, "a")
        outcome, after = await settled(session, url, "a", before)
    assert before == RouterCounts({"first_turn": 1.0}, read_back=30, begun=1, ended=1, return_seconds=0.25)
    assert (outcome, after.begun, after.ended) == ("evicted", 2, 2)


def test_only_what_goes_back_at_once_has_a_prefix_cache_unless_all_have() -> None:
    names = {cached: [way.name for way in ways] for cached, ways in by_cache(all_cached=False).items()}
    assert names == {False: ["off", "lazy"], True: ["eager"]}
    assert {cached: len(ways) for cached, ways in by_cache(all_cached=True).items()} == {True: 3}


def test_the_result_has_what_each_way_saved_against_off() -> None:
    result = summary("sim", TURNS)
    assert result["saved"] == {
        "computed_tokens_ratio": 0.55,  # 360 for 800
        "ttft_ratio_last_turn": 1.25,
        "eager_computed_tokens_ratio": 0.525,  # 380 for 800
        "eager_ttft_ratio_last_turn": 2.5,
    }
    assert result["turns"][2]["eager"] == {
        "computed_tokens": 199,
        "read_back_tokens": 4,
        "returned_tokens": 520,
        "ttft_ms": 20.0,
        "return_ms": 80.0,
        "outcome": "hit",
    }
    lazy, eager = sentences(result).splitlines()
    assert lazy == (
        "Lazy: from turn 2 on, P computed 55% fewer tokens; time to first token fell from 40 to 30 ms (median), in the "
        "last turn by a factor of 1.25. P read 440 tokens from D while the client waited."
    )
    assert "P read 4 tokens while the client waited, and 960 behind it; the slowest return took 90 ms." in eager


def test_the_result_has_nixls_counts_on_real_nodes_only() -> None:
    result = summary("vllm-cpu", TURNS)
    assert result["transfers"] == {
        "off": {"nixl_reads": 0, "nixl_bytes": 0, "nixl_failed": 0},
        "lazy": {"nixl_reads": 2, "nixl_bytes": 1_835_008, "nixl_failed": 0},
        "eager": {"nixl_reads": 3, "nixl_bytes": 3_932_160, "nixl_failed": 0},
    }
    lazy, eager = sentences(result).splitlines()
    assert "first token was 30 ms instead of 40 (median), which says nothing about a GPU. P read 440 tokens" in lazy
    assert "(NIXL: 2 reads, 1.8 MB, 0 failed)" in lazy
    assert "(NIXL: 3 reads, 3.9 MB, 0 failed)" in eager
    assert "transfers" not in summary("sim", TURNS)


def test_what_took_long_to_start_stays_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shown = io.StringIO()
    with Starting(Console(file=shown)) as starting:
        starting("a model")
        now += 2
        starting("three nodes")
        assert starting.__rich__() == "starting three nodes (0 s)"
        now += 40
        assert starting.__rich__() == "starting three nodes (40 s)"
        starting.done()
    assert shown.getvalue() == "Ready after 40 s: three nodes.\n"


# --- where vLLM is ---


def programs(folder: Path, **scripts: str) -> Path:
    """Executables of these names; returns the one called `python`."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder / "python"


def test_vllms_python_is_the_one_given_or_the_environments_or_the_one_of_make_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for name in ("given", "environment", "."):
        folder = tmp_path / name / ".venv-engine/bin"
        folder.mkdir(parents=True)
        found[name] = programs(folder, python="", vllm="")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVRETURN_ENGINE_PYTHON", raising=False)
    assert engine_python() == found["."]
    monkeypatch.setenv("KVRETURN_ENGINE_PYTHON", str(found["environment"]))
    assert engine_python() == found["environment"]
    assert engine_python(found["given"]) == found["given"]


@pytest.mark.parametrize("there", [{}, {"python": ""}], ids=["no python", "no vllm beside it"])
def test_without_vllm_it_says_how_to_get_it(there: dict[str, str], tmp_path: Path) -> None:
    python = programs(tmp_path, **there)
    with pytest.raises(EngineMissingError, match=r"run `make engine`.*--engine-python or KVRETURN_ENGINE_PYTHON"):
        engine_python(python)
    ran = demo(python)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"Error: no vLLM at {python}: run `make engine`")
    assert ran.err.count("\n") == 1


def test_templates_that_the_tiny_model_lacks_are_refused() -> None:
    ran = run("--engine", "vllm-cpu", "--template", "dated")
    assert ran == Ran(1, "", "Error: --template dated is for simulated nodes: leave it out\n")


# --- what dies ---


def demo(python: Path) -> Ran:
    return run("--engine", "vllm-cpu", "--engine-python", str(python))


@pytest.mark.parametrize(
    ("scripts", "said"),
    [
        ({"python": "echo no torch; exit 3"}, "model maker exited with code 3; its last lines:\n  no torch\n"),
        (
            {"vllm": "case $* in *kv_consumer*) echo no room; seq 60; exit 1;; *) exec sleep 60;; esac"},
            "decode node exited with code 1; its last lines:\n  no room\n  1\n",
        ),
    ],
    ids=["model", "node, with a reason 60 lines above its last"],
)
def test_what_does_not_start_is_named_with_its_reason(scripts: dict[str, str], said: str, tmp_path: Path) -> None:
    ran = demo(programs(tmp_path, **{"python": "", "vllm": ""} | scripts))
    assert ran.code == 1
    assert ran.err.startswith(f"Error: {said}")


async def fail_at_once() -> None:
    raise TimeoutError("nobody answers")


async def go_on() -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize("work", [fail_at_once, go_on], ids=["its clients fail before", "nobody notices"])
async def test_a_node_that_dies_ends_the_demo_and_is_named(work: Callable[[], Any]) -> None:
    node = Child("decode node", [sys.executable, "-c", "import time; time.sleep(0.3); exit('why')"], lambda *_: None)
    await node.start()
    stack = Stack({}, "", [node])
    with pytest.raises(ProcessError, match="decode node exited with code 1; its last lines:\n  why"):
        await stack.while_alive(work())


async def test_a_failure_with_all_nodes_alive_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvreturn.demo.stack, "_DYING", 0.1)
    with pytest.raises(TimeoutError, match="nobody answers"):
        await Stack({}, "").while_alive(fail_at_once())
