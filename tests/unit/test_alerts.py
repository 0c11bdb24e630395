"""Alerts: they ask for what there is, each has a test of its own and a word on what to do, and promtool runs them."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard_panels import FOLLOW_UP, REUSED

from kvreturn.core import outcome
from support.harness import harness
from support.promql import mistakes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/prometheus"
(GROUP,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
RULES: list[dict[str, Any]] = GROUP["rules"]


async def test_alerts_ask_for_metrics_and_labels_that_there_are() -> None:
    metrics = harness().world.metrics
    assert {r["alert"]: mistakes(r["expr"], metrics) for r in RULES} == {r["alert"]: [] for r in RULES}


def test_alerts_dashboard_and_admin_view_mean_the_same_by_follow_up_and_reuse() -> None:
    assert set(FOLLOW_UP.removeprefix('outcome!~"').strip('"').split("|")) == {o.value for o in outcome.FRESH}
    assert set(REUSED.removeprefix('outcome=~"').strip('"').split("|")) == {o.value for o in outcome.REUSED}
    text = (FOLDER / "alerts.yml").read_text()
    assert {m for m in re.findall(r'outcome[=!]~"[^"]*"', text) if "|" in m} == {
        FOLLOW_UP,
        REUSED,
        'outcome!~"rejected|cancelled"',
    }


@pytest.mark.parametrize(
    ("expr", "found"),
    [
        ("rate(kvreturn_turns[5m])", ["no metric kvreturn_turns"]),
        ('kvreturn_turns_total{colour="red"}', ["kvreturn_turns_total has no label colour"]),
        ('kvreturn_turns_total{outcome=~"hit|miss"}', ["outcome is never miss"]),
        ("sum by (tenant) (kvreturn_turns_total)", ["nothing has a label tenant"]),
        ("kvreturn_store_duration_seconds", ["no metric kvreturn_store_duration_seconds"]),
        ("1 > 0", ["asks for no metric"]),
    ],
)
async def test_what_there_is_not_is_found(expr: str, found: list[str]) -> None:
    assert mistakes(expr, harness().world.metrics) == found


def test_each_alert_says_what_to_do_and_is_tested() -> None:
    text = (ROOT / "docs/alerts.md").read_text()
    tested = (FOLDER / "alerts_test.yml").read_text()
    for rule in RULES:
        name = rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
        assert rule["labels"]["severity"] in {"warning", "critical"}
        section = re.search(rf"^## {name}\n\n(.+?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section, name
        assert len(section[1]) > 50, name
        fires = rf"alertname: {name}\n        exp_alerts:\n          - exp_labels"
        assert re.search(fires, tested), name
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == [r["alert"] for r in RULES]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: apt-get install prometheus)")
def test_promtool_has_each_alert_fire_when_it_should_and_only_then() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
