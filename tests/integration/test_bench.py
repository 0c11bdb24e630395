"""`kvreturn bench`, as users run it."""

import asyncio
import itertools
import json
import signal
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner

from kvreturn.cli.main import main
from support.bench import FIELDS_OF_VLLM, chat
from support.demo import Ran
from support.envoy import unused_address
from support.nodes import FakePrefill, Seen

SHORT = ("--rounds", 1, "--conversations", 1, "--clients", 1, "--turns", 3, "--gap", 0, "--output-tokens", 8)


async def start(*arguments: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvreturn.cli.main", "bench", *map(str, arguments)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> Ran:
    out, err = await process.communicate()
    assert process.returncode is not None
    # On a slow machine it says now and then how far it is.
    said = [line for line in err.decode().splitlines(keepends=True) if not line.startswith("round ")]
    return Ran(process.returncode, out.decode(), "".join(said))


async def bench(*arguments: object) -> Ran:
    return await ended(await start(*arguments))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, _: object) -> None:
        self.seen.append(tag)
        self.open += [tag] if tag not in {"meta", "!doctype"} else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# P is so slow that a turn takes seconds: what neither of the two knows of is small then, on a busy machine too.
@pytest.mark.slow
async def test_what_analyze_expects_of_the_same_traffic_is_what_bench_measures(tmp_path: Path) -> None:
    log, html, stats = (tmp_path / name for name in ("turns.jsonl", "report.html", "stats.json"))
    slow = ("--sim-prefill-rate", 1_000, "--first-tokens", 1_000, "--turn-tokens", 600)
    files = ("--turn-log", log, "--html", html, "--stats-json-output", stats)
    ran = await bench("--sim", "--json", *SHORT, *slow, *files)
    assert (ran.code, ran.err) == (0, "")
    got = json.loads(ran.out)
    assert ran.out == json.dumps(got) + "\n"

    analyzed = CliRunner().invoke(main, ["analyze", "--json", "--prefill-rate", "1000", str(log)])
    expected = json.loads(analyzed.stdout)
    assert expected["follow_up_turns"] == got["comparison"]["pairs"] == 2
    measured = got["comparison"]["ttft_saving_mean_ms"]
    assert expected["ttft_saving_mean_ms"] == pytest.approx(measured, rel=0.15)

    assert got["meaningful"]
    assert got["comparison"]["ttft_ratio"] > 2
    assert got["comparison"]["equal_answers_share"] == 1.0
    assert (got["legs"]["off"]["outcomes"], got["legs"]["on"]["outcomes"]) == (
        *({"disabled": 3}, {"hit": 2, "first_turn": 1}),
    )
    for leg, read in (("off", 0.0), ("on", expected["reuse_share"])):
        prefill = got["legs"][leg]["prefill"]
        assert prefill["prefix_caching"] is False
        assert prefill["read_back_share"] == pytest.approx(read, abs=0.02)
    assert any("simulated" in w["text"] for w in got["warnings"])

    rows = json.loads(stats.read_text())
    assert [row["leg"] for row in rows] == ["off"] * 3 + ["on"] * 3
    assert all(set(FIELDS_OF_VLLM) <= set(row) for row in rows)
    assert [row["input_num_turns"] for row in rows[:3]] == [1, 3, 5]
    page = _Tags()
    page.feed(html.read_text())
    assert page.open == ["html"] or not page.open
    assert {"svg", "table"} <= set(page.seen)
    assert not {"script", "link", "img"} & set(page.seen)


async def test_ctrl_c_gives_the_report_of_what_there_is() -> None:
    async def answers(seen: Seen) -> web.Response:
        return web.json_response(chat("x", prompt=len(seen.body) // 5))

    async with FakePrefill(answers) as node:
        where = ("--url", f"http://{node.address}", "--model", "m", "--off-model", "n", "--no-stream")
        process = await start(*where, "--conversations", 1_000, "--gap", 0)
        async with asyncio.timeout(60):
            while len(node.seen) < 20:
                node.arrived.clear()
                await node.arrived.wait()
        process.send_signal(signal.SIGINT)
        ran = await ended(process)
    assert (ran.code, ran.err) == (130, "")
    assert ran.out.startswith("Nothing to compare: No follow-up turn was answered in both legs")
    assert "Stopped before the end" in ran.out
    assert "ttft_ms" in ran.out


async def test_counters_that_go_away_meanwhile_take_no_results_with_them() -> None:
    scrapes = itertools.count(1)

    async def answers(seen: Seen) -> web.Response:
        if seen.path != "/metrics":
            return web.json_response(chat("x", prompt=len(seen.body) // 5))
        if next(scrapes) > 3:  # once for each leg before all, and before the first leg
            return web.Response(status=503)
        return web.Response(text='kvreturn_turns_total{outcome="disabled",model="n"} 0.0\n')

    async with FakePrefill(answers) as node:
        where = ("--url", f"http://{node.address}", "--router-metrics", f"http://{node.address}")
        ran = await bench(*where, "--model", "m", "--off-model", "n", "--no-stream", *SHORT)
    assert (ran.code, ran.err) == (1, "")
    assert f"It ended early: --router-metrics http://{node.address}/metrics has no kvreturn_" in ran.out
    assert "ttft_ms                3 " in ran.out


def test_a_closed_port_is_told_in_a_sentence() -> None:
    ran = CliRunner().invoke(main, ["bench", "--url", f"http://{unused_address()}", "--model", "m", "--off-model", "n"])
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert ran.stderr.startswith("Error: the first requests failed: ClientConnectorError")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give --url and --model of a deployment, or --sim"),
        (["--url", "http://x", "--model", "m"], "both legs would be the same: give --off-model"),
        (["--url", "http://x", "--model", "m", "--off-url", "http://x/v1/"], "both legs would be the same"),
        (["--url", "x:80", "--model", "m"], "'x:80' is no URL"),
        (["--sim", "--model", "m"], "--model is for a running deployment"),
        (["--sim", "--turns", "zipf:2"], "'zipf:2' is no distribution"),
        (["--sim", "--clients", "0"], "'--clients': 0 is not in the range"),
        (["--sim", "--header", "x"], "give NAME: VALUE"),
        (["--sim", "--html", "/nowhere/x.html"], "in an existing folder"),
        (["--sim", "--plot", "x.gif"], "give a name ending in .png, .svg, .pdf"),
        (["--sim", "--file", "/nowhere"], "does not exist"),
        (["--sim", "--file", __file__], "not JSON"),
        (["--sim", "--file", __file__, "--turns", "3"], "--turns is for conversations that are made up"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: list[str], told: str) -> None:
    ran = CliRunner().invoke(main, ["bench", *arguments])
    assert ran.exit_code == 2
    assert told in " ".join(ran.stderr.split())
