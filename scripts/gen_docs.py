"""Write what is generated: parts of README.md, docs/metrics.md, Envoy's bootstraps, the Prometheus operator's alerts.

usage: python scripts/gen_docs.py [--check]
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from kvreturn.config import Model, Settings
from kvreturn.config_file import load_settings
from kvreturn.core.api import APIS
from kvreturn.core.outcome import Outcome
from kvreturn.envoy.bootstrap import render
from kvreturn.server.world import World
from kvreturn.upstream.node import REASONS, STATES

ROOT = Path(__file__).resolve().parent.parent


def outcomes() -> str:
    """The outcomes as a Markdown table, from the enumeration's source: Python keeps no docstrings of members."""
    source = inspect.getsource(Outcome)
    rows = re.findall(r'^    [A-Z_]+ = "([a-z_]+)"\n    """(.+?)"""', source, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in rows} == {o.value for o in Outcome}, "an outcome without a docstring"
    texts = [(name, " ".join(text.split())) for name, text in rows]
    return "\n".join(["| outcome | what became of reuse |", "|---|---|", *(f"| `{n}` | {t} |" for n, t in texts)])


def configuration() -> str:
    """The settings as Markdown tables, one for the top level and one for each section."""
    lines = _table(Settings)
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            lines += ["", f"`{name}:`", "", *_table(field.annotation)]
    lines += ["", "`models: {NAME: ...}`", "", *_table(Model)]
    return "\n".join(lines)


def _table(model: type[BaseModel]) -> list[str]:
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if field.description:
            lines.append(f"| `{field.alias or name}` | {_default(field.default)} | {field.description} |")
    return lines


def _default(value: Any) -> str:  # noqa: ANN401 - any setting's value
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, SecretStr) or value in ({}, [], None):
        return "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def readme() -> str:
    """README.md with its generated parts renewed."""
    text = (ROOT / "README.md").read_text()
    for name, make in (("outcomes", outcomes), ("configuration", configuration)):
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text


LABELS = {
    "outcome": "the outcomes of README.md",
    "api": ", ".join(f"`{api.name}`" for api in APIS),
    "model": "models of the settings, and the first 32 others that a node has answered to; else `other`",
    "type": "an HTTP status; `incomplete`: the stream was cut; `in_band`: an error inside a response of status 200",
    "why": "one word of a fixed list: for requests why they were refused, for returns the rule of docs/return.md",
    "choice": "`eager`, `lazy`",
    "result": "one word of a fixed list: what became of it",
    "streamed": "`true`, `false`",
    "lane": "`fast`, `portable`",
    "side": "`request`, `response`",
    "operation": "`take`, `put`, `replace`; errors also `ping`",
    "kind": "store: `timeout`, `busy`, `breaker_open`, `auth`, `full`, `refused`, ...; discovery: `failed`, `empty`",
    "pool": "`prefill`, `decode`",
    "state": ", ".join(f"`{state}`" for state in STATES),
    "reason": ", ".join(f"`{reason}`" for reason in REASONS),
    "version": "of kvreturn",
    "proof": "the setting",
    "return": "the setting",
    "store": "`memory`, `redis`",
    "prefill_via": "the setting `prefill.via`",
}
"""What values each label has. A label that is not here must not be: it might have any number of them."""


def world() -> World:
    """A router's world, for what its metrics are."""
    return World.create(Settings.model_validate({"pools": {"prefill": ["p:1"], "decode": ["d:1"]}}))


def metrics() -> str:
    """docs/metrics.md: every metric by both names, from the instruments themselves."""
    made = sorted(world().metrics.all.values(), key=lambda i: i.family)
    used = {label for i in made for label in i.labels}
    assert used <= LABELS.keys(), f"labels without a description: {used - LABELS.keys()}"
    lines = [
        "# Metrics",
        "",
        "Made by `make docs` from the code. `GET /metrics` on the admin port has them for Prometheus; by OTLP they go",
        "under the name in the second column (docs/observability.md). Histograms have `_bucket`, `_sum` and `_count`",
        "behind their Prometheus name. Besides, `process_*` tells of the process: memory, CPU, open files.",
        "",
        "| Prometheus | OpenTelemetry | kind | labels | meaning |",
        "|---|---|---|---|---|",
    ]
    for i in made:
        labels = ", ".join(f"`{label}`" for label in i.labels)
        lines.append(f"| `{i.prometheus}` | `{i.otel}` {{{i.unit.strip('{}')}}} | {i.kind} | {labels} | {i.doc} |")
    lines += ["", "## Labels", "", "| label | values |", "|---|---|"]
    lines += [f"| `{label}` | {LABELS[label]} |" for label in LABELS if label in used]
    lines += [
        "",
        "Records (`kvreturn_sessions*`) are counted by the memory store only: a shared one knows them itself.",
        "What the connector counts is on vLLM's own pages: `connector/README.md`.",
    ]
    return "\n".join(lines) + "\n"


BOOTSTRAPS = {
    "kvreturn": "gateway",
    "portable-lane": "gateway-portable-lane",
    "full-duplex": "gateway-full-duplex",
    "orchestrated": "orchestrated",
}
"""What stands in envoy/, by the file of examples/ that it is made from."""


def _bootstrap(example: str) -> str:
    return render(load_settings(ROOT / f"examples/{example}.yaml", {}))


RULES = """\
# Made by `make docs` from deploy/prometheus/alerts.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvreturn
spec:
"""


def prometheus_rule() -> str:
    """The alerts as the Prometheus operator has them."""
    _, groups, rest = (ROOT / "deploy/prometheus/alerts.yml").read_text().partition("groups:\n")
    return RULES + textwrap.indent(groups + rest, "  ")


GENERATED: dict[str, Callable[[], str]] = {"README.md": readme, "docs/metrics.md": metrics}
GENERATED["deploy/kubernetes/components/observability/rules.yaml"] = prometheus_rule
GENERATED |= {f"envoy/{name}.yaml": partial(_bootstrap, example) for example, name in BOOTSTRAPS.items()}

if __name__ == "__main__":
    if "--check" in sys.argv:
        stale = [name for name, make in GENERATED.items() if (ROOT / name).read_text() != make()]
        sys.exit(f"not current: {', '.join(stale)}: run `make docs`" if stale else 0)
    for name, make in GENERATED.items():
        (ROOT / name).write_text(make())
