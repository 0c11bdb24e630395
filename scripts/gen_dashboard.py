"""Write deploy/grafana/kvreturn.json: the dashboard, whose first screen says whether it is worth it.

usage: python scripts/gen_dashboard.py [--check]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dashboard_details import LEGS, NODES, PROCESS, RETURNS, STORE
from dashboard_first import FIRST, SECOND
from dashboard_panels import JSON

PATH = Path(__file__).resolve().parent.parent / "deploy/grafana/kvreturn.json"
WIDTH = 24  # columns of Grafana's grid
ROWS: Sequence[tuple[str, Sequence[tuple[int, JSON]], bool]] = [
    ("Is it on, and is it worth it?", [*FIRST, *SECOND], True),
    ("Legs and errors", LEGS, False),
    ("Handles and the session store", STORE, False),
    ("Eager returns", RETURNS, False),
    ("vLLM nodes", NODES, False),
    ("The router's processes", PROCESS, False),
]


def dashboard() -> JSON:
    """The dashboard as Grafana imports it."""
    panels: list[JSON] = []
    y = 0
    for title, row, is_open in ROWS:
        header = {"type": "row", "title": title, "collapsed": not is_open, "gridPos": _grid(0, y, WIDTH, 1)}
        placed, y = _placed(row, y + 1)
        panels += [header | {"panels": [] if is_open else placed}, *(placed if is_open else [])]
    numbers = iter(range(1, 1000))
    for panel in panels:
        for one in (panel, *panel.get("panels", ())):
            one["id"] = next(numbers)
    return {
        "uid": "kvreturn",
        "title": "kvreturn",
        "description": "KV cache that comes back from decode to prefill: is it on, how often, what it saves and costs.",
        "tags": ["vllm", "kvreturn"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "editable": True,
        "templating": {"list": [_datasource(), _variable("job", "label_values(kvreturn_turns_total, job)")]},
        "links": [],
        "panels": panels,
    }


def _placed(row: Sequence[tuple[int, JSON]], y: int) -> tuple[list[JSON], int]:
    """Panels one after the other, and where the next row begins."""
    placed, x, height = [], 0, 0
    for width, panel in row:
        if x + width > WIDTH:
            x, y, height = 0, y + height, 0
        height = 4 if panel["type"] == "stat" else 8
        source = {"type": "prometheus", "uid": "${datasource}"}
        targets = [t | {"refId": chr(ord("A") + i), "datasource": source} for i, t in enumerate(panel["targets"])]
        placed.append({**panel, "targets": targets, "datasource": source, "gridPos": _grid(x, y, width, height)})
        x += width
    return placed, y + height


def _grid(x: int, y: int, w: int, h: int) -> JSON:
    return {"x": x, "y": y, "w": w, "h": h}


def _datasource() -> JSON:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(name: str, query: str) -> JSON:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PATH.read_text() == text() else f"{PATH.name} is not current: run `make docs`")
    PATH.write_text(text())
