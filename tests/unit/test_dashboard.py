"""The dashboard: current, asks for what there is, in PromQL that Prometheus reads, and its panels do not overlap."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gen_dashboard
import pytest
import yaml
from kvreturn_connector.counts import COUNTERS, GAUGES, UNREAD

from support.harness import harness
from support.promql import mistakes

JSON = dict[str, Any]
DASHBOARD: JSON = json.loads(gen_dashboard.PATH.read_text())
FOREIGN = frozenset(
    {
        *(f"vllm:{name}" for name in GAUGES),
        *(f"vllm:{name}_total" for name in (*COUNTERS, UNREAD)),
        "vllm:kv_cache_usage_perc",
        "process_resident_memory_bytes",
    }
)
FIRST_SCREEN = 21  # rows of the grid, about, at 1080p


def panels() -> Iterator[JSON]:
    for panel in DASHBOARD["panels"]:
        yield panel
        yield from panel.get("panels", ())


def targets() -> list[tuple[str, JSON]]:
    return [(panel["title"], target) for panel in panels() for target in panel.get("targets", ())]


def test_it_is_current() -> None:
    assert gen_dashboard.PATH.read_text() == gen_dashboard.text()


async def test_it_asks_for_metrics_and_labels_that_there_are() -> None:
    metrics = harness().world.metrics
    found = {title: mistakes(target["expr"], metrics, FOREIGN) for title, target in targets()}
    assert {title: wrong for title, wrong in found.items() if wrong} == {}


def test_legends_name_labels_that_the_expression_leaves() -> None:
    for title, target in targets():
        left = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"])))) | (
            {"instance"} if " by (" not in target["expr"] else set()
        )
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left, title


def test_panels_do_not_overlap_and_each_says_what_it_shows() -> None:
    def check(some: list[JSON]) -> None:
        taken: set[tuple[int, int]] = set()
        for panel in some:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells

    check(DASHBOARD["panels"])
    for panel in DASHBOARD["panels"]:
        check(panel.get("panels", []))
    assert [p["title"] for p in panels() if p["type"] != "row" and not p.get("description")] == []
    ids = [p["id"] for p in panels()]
    assert len(set(ids)) == len(ids)
    first = [p for p in DASHBOARD["panels"] if p["type"] != "row" and p["gridPos"]["y"] < FIRST_SCREEN]
    titles = " ".join(p["title"] for p in first)
    for answer in ("reused", "did not reuse", "saved", "Router adds"):  # how often, why not, what it saves and costs
        assert answer in titles


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: apt-get install prometheus)")
def test_prometheus_reads_its_queries(tmp_path: Path) -> None:
    rules = [
        {
            "record": f"panel_{number}",
            "expr": target["expr"].replace("$__rate_interval", "5m").replace("$__range", "1h"),
        }
        for number, (_, target) in enumerate(targets())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
