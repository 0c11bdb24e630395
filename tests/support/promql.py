"""What a PromQL expression asks for, read well enough to check names."""

import re
from collections.abc import Iterator

from kvreturn.core.outcome import Outcome
from kvreturn.telemetry.metrics import Metrics

_SELECTOR = re.compile(r"\b((?:kvreturn_|vllm:|process_)[a-z0-9_:]*)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_TARGET = {"job", "instance", "le", "__rate_interval"}
_VALUES = {"outcome": {o.value for o in Outcome}}


def selectors(expr: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Metrics of an expression, with the labels that they are chosen by and the values."""
    for name, matchers in _SELECTOR.findall(expr):
        yield name, {label: value for label, _, value in _MATCHER.findall(matchers)}


def mistakes(expr: str, metrics: Metrics, foreign: frozenset[str] = frozenset()) -> list[str]:
    """What an expression asks for that there is not.

    Args:
        expr: PromQL.
        metrics: ours.
        foreign: names of others' metrics that it may ask for.
    """
    known: dict[str, set[str]] = {}
    for made in metrics.all.values():
        suffixes = ("_bucket", "_sum", "_count") if made.kind == "histogram" else ("",)
        known |= {made.prometheus + suffix: set(made.labels) for suffix in suffixes}
    found, labels = [], set(_TARGET)
    asked = list(selectors(expr))
    if not asked and "up{" not in expr:
        found.append("asks for no metric")
    for name, chosen in asked:
        if name in foreign:
            continue
        if name not in known:
            found.append(f"no metric {name}")
            continue
        labels |= known[name]
        found += [f"{name} has no label {label}" for label in chosen if label not in known[name] | _TARGET]
        for label, values in _VALUES.items():
            wanted = set(chosen.get(label, "").replace(".*", "").split("|")) - {""}
            found += [f"{label} is never {value}" for value in wanted - values if "$" not in value]
    for group in _GROUPING.findall(expr):
        names = {n.strip() for n in group.split(",")} - {""}
        found += [f"nothing has a label {n}" for n in names - labels] if not foreign & {n for n, _ in asked} else []
    return found
