"""Panels of a Grafana dashboard, and the PromQL in them."""

from collections.abc import Sequence
from typing import Any

JSON = dict[str, Any]
J = 'job=~"$job"'
REUSED = 'outcome=~"hit|partial_hit|local_hit|returned"'
NOT_REUSED = 'outcome!~"hit|partial_hit|local_hit|returned"'
FOLLOW_UP = 'outcome!~"first_turn|below_threshold|decode_alone|disabled|rejected|cancelled"'
GREEN, YELLOW, RED, GREY = "green", "yellow", "red", "text"


def rate(name: str, matchers: str = "", by: str = "") -> str:
    """The sum of a counter's rates."""
    chosen = f"{J},{matchers}" if matchers else J
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{chosen}}}[$__rate_interval]))"


def total(name: str, matchers: str = "", by: str = "") -> str:
    """By how much a counter has grown in the time that is shown."""
    chosen = f"{J},{matchers}" if matchers else J
    return f"sum{f' by ({by})' if by else ''} (increase({name}{{{chosen}}}[$__range]))"


def quantile(q: float, name: str, matchers: str = "", by: str = "") -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', matchers, f'{by}, le' if by else 'le')})"


def gauge(name: str, how: str = "sum", by: str = "") -> str:
    """A gauge over all routers."""
    return f"{how}{f' by ({by})' if by else ''} ({name}{{{J}}})"


def node(name: str, how: str = "sum", by: str = "instance") -> str:
    """Of vLLM's nodes, which are other jobs."""
    return f"{how} by ({by}) (rate({name}[$__rate_interval]))"


def stat(title: str, expr: str, unit: str, steps: Sequence[tuple[str, float | None]], doc: str, **more: Any) -> JSON:  # noqa: ANN401
    """One figure; `steps` are colours and the values from which on they hold."""
    return {
        "type": "stat",
        "title": title,
        "description": doc,
        "targets": [_target(expr, "")],
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "noValue": "no data",
                "thresholds": {"mode": "absolute", "steps": [{"color": c, "value": v} for c, v in steps]},
                **more,
            },
            "overrides": [],
        },
        "options": {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}},
    }


def lines(title: str, targets: Sequence[tuple[str, str]], unit: str, doc: str, *, stack: bool = False) -> JSON:
    """Lines over time, or areas on top of each other; `targets` are expressions and legends."""
    custom = {
        "fillOpacity": 60 if stack else 8,
        "lineWidth": 1 if stack else 2,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stack else "none"},
    }
    return {
        "type": "timeseries",
        "title": title,
        "description": doc,
        "targets": [_target(expr, legend) for expr, legend in targets],
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "table", "placement": "right", "calcs": ["mean", "lastNotNull"]}},
    }


def bars(title: str, expr: str, legend: str, unit: str, doc: str) -> JSON:
    """One bar for each label value, over the time that is shown."""
    target = _target(expr, legend) | {"instant": True, "range": False}
    return {
        "type": "bargauge",
        "title": title,
        "description": doc,
        "targets": [target],
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "color": {"mode": "palette-classic"}}, "overrides": []},
        "options": {"orientation": "horizontal", "displayMode": "basic", "reduceOptions": {"calcs": ["lastNotNull"]}},
    }


def _target(expr: str, legend: str) -> JSON:
    return {"expr": expr, "legendFormat": legend}
