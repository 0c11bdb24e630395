"""`kvreturn analyze`, as users run it."""

import json
import random
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvreturn.cli.heartbeat import Heartbeat
from kvreturn.cli.main import main
from support.logs import named

GOOD = [named("a", 0, 5_000), named("a", 10, 6_000), named("b", 1_000, 400)]
TURN_LOG = ["outcome=first_turn api=chat prompt=9 read=- local=0", "outcome=hit api=chat prompt=9 read=8 local=0"]


def run(*arguments: object, rows: list[Any] | None = None) -> Result:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows or [])
    return CliRunner().invoke(main, ["analyze", *map(str, arguments)], input=text)


def test_the_verdict_comes_first_and_every_figure_refers_to_what_it_rests_on() -> None:
    ran = run(rows=[*GOOD, "hello"])
    assert (ran.exit_code, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("Worth it: 83% of the prompt tokens")
    assert any(" ".join(line.split()) == "repeated prompt share 83.3% lower bound [8]" for line in lines)
    assert any(line.startswith("[8] sum of min(previous prompt, this prompt)") for line in lines)
    assert any(line.split()[:3] == ["480", "100.0%", "100.0%"] for line in lines)
    assert "1 bad lines: neither JSON nor a line of a turn log or an access log (-:4)" in lines


def test_without_a_terminal_it_says_now_and_then_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvreturn.cli.analyze.Heartbeat", lambda: Heartbeat(0.0))
    ran = run(rows=GOOD)
    assert ran.stderr.splitlines()[-1] == "all is read: counting"
    assert ran.stdout.startswith("Worth it")


def test_json_is_one_object_and_nothing_else() -> None:
    ran = run("--json", "--ttl", 5, rows=GOOD)
    got = json.loads(ran.stdout)
    assert ran.stdout == json.dumps(got) + "\n"
    assert {k: got[k] for k in ("follow_up_turns", "repeated_prompt_share", "late_turn_share")} == {
        "follow_up_turns": 1,
        "repeated_prompt_share": pytest.approx(5 / 6),
        "late_turn_share": 1.0,
    }


def test_options_reach_the_model() -> None:
    options = ("--prefill-rate", 1_000, "--transfer-rate", 1, "--kv-bytes-per-token", 100_000, "--overhead-ms", 500)
    got = json.loads(run("--json", *options, "--min-tokens", 100, rows=GOOD).stdout)
    assert got["break_even_tokens"] == pytest.approx(0.5 / 0.0009)
    assert got["ttft_saving_mean_ms"] == pytest.approx(5_000 * 0.9 - 500)
    assert json.loads(run("--json", "--min-tokens", 5_001, rows=GOOD).stdout)["reuse_turns"] == 0
    assert json.loads(run("--json", "--decode-kv-gb", 0.1, rows=GOOD).stdout)["level"] == "not worth it"
    assert json.loads(run("--json", "--time-unit", "ms", rows=GOOD).stdout)["gap_p50_s"] == pytest.approx(
        0.01, rel=0.011
    )
    cached = [named("a", 0, 5_000), named("a", 10, 6_000, cached_tokens=5_000)]
    assert [json.loads(run("--json", *o, rows=cached).stdout)["reuse_turns"] for o in ([], ["--ignore-cached"])] == [
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("arguments", "rows", "code", "words"),
    [
        ([], [], 3, "Nothing to tell"),
        ([], ["hello"], 3, "Nothing to tell"),
        (["--strict"], ["hello"], 3, "Nothing to tell"),
        (["--strict"], [*GOOD, "hello"], 4, "1 bad lines"),
        (["--strict"], GOOD, 0, "Worth it"),
        (["/nowhere"], [], 2, "does not exist"),
        (["--ttl", "0"], GOOD, 2, "--ttl"),
        (["--plot", "x.txt"], GOOD, 2, "ending in .png, .svg, .pdf"),
        (["--html", "/nowhere/x.html"], GOOD, 2, "in an existing folder"),
    ],
)
def test_exit_codes_for_scripts(arguments: list[str], rows: list[Any], code: int, words: str) -> None:
    ran = run(*arguments, rows=rows)
    assert (ran.exit_code, words in ran.output) == (code, True)


def test_an_input_that_breaks_off_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "log.gz").write_bytes(b"no gzip")
    ran = run(tmp_path / "log.gz")
    assert (ran.exit_code, "log.gz: broken gzip data" in ran.stderr) == (1, True)


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.html").symlink_to("/dev/full")
    ran = run("--html", tmp_path / "x.html", rows=GOOD)
    assert (ran.exit_code, "cannot write the report: [Errno 28] No space left" in ran.stderr) == (1, True)
    assert ran.stdout == ""


def test_without_matplotlib_it_says_what_to_install_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvreturn.analyze.plots", raising=False)
    monkeypatch.delattr("kvreturn.analyze.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = run("--plot", "x.png", rows=GOOD)
    assert (ran.exit_code, "pip install '.[demo]'" in ran.stderr) == (1, True)
    assert run(rows=GOOD).exit_code == 0


class Page(HTMLParser):
    """Collects text, and everything that a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {k}={v}" for k, v in attrs if k in {"src", "href"}]
        self.loads += [f"{tag} {k}={v}" for k, v in attrs if k.endswith("xlink:href") and not (v or "").startswith("#")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("rows", [[*GOOD, "<b>"], TURN_LOG], ids=["turns", "turn log"])
def test_the_html_report_is_one_file_that_loads_nothing_and_follows_the_browsers_colours(
    tmp_path: Path, rows: list[Any]
) -> None:
    path = tmp_path / "<x>.html"
    ran = run("--html", path, rows=rows)
    assert ran.exit_code == 0
    text = path.read_text()
    page = Page(text)
    assert page.loads == []
    assert ran.stdout.splitlines()[0] in page.words
    svg = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    assert ET.fromstring(svg).tag.endswith("svg")
    assert svg.count("currentColor") > 5
    assert "#000000" not in svg
    assert "prefers-color-scheme: dark" in text


def test_with_nothing_to_plot_the_page_has_no_plot_and_no_picture_is_written(tmp_path: Path) -> None:
    ran = run("--html", tmp_path / "x.html", "--plot", tmp_path / "x.png", rows=GOOD[2:])
    assert ran.exit_code == 0
    assert "nothing to plot" in ran.stderr
    assert "<svg" not in (tmp_path / "x.html").read_text()
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plots_in_each_format(tmp_path: Path, ending: str, magic: bytes) -> None:
    path = tmp_path / f"x.{ending}"
    assert run("--plot", path, rows=GOOD).exit_code == 0
    assert path.read_bytes().startswith(magic)


# A process of its own starts the command: what the starting one holds by then counts as the started one's memory.
_MEASURED = """
import json, resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"cpu": used.ru_utime + used.ru_stime, "kb": used.ru_maxrss}))
"""


@pytest.mark.slow
def test_a_million_lines_take_less_than_30_s_of_cpu_and_300_mb(tmp_path: Path) -> None:
    draw = random.Random(1)
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        for n in range(1_000_000):
            file.write(json.dumps(named(n % 100_000, draw.uniform(0, 86_400), draw.randrange(100, 50_000))) + "\n")
    begun = time.monotonic()
    command = [sys.executable, "-m", "kvreturn.cli.main", "analyze", "--json", str(path)]
    ran = subprocess.run([sys.executable, "-c", _MEASURED, *command], check=True, capture_output=True)
    told, used = ran.stdout.splitlines()[:-1], json.loads(ran.stdout.splitlines()[-1])
    assert json.loads(b"".join(told))["turns"] == 1_000_000
    assert used["cpu"] < 30, f"{time.monotonic() - begun:.0f} s on the clock"
    assert used["kb"] < 300_000
