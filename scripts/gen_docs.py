"""Write what is generated in README.md: the outcomes and the configuration reference.

usage: python scripts/gen_docs.py [--check]
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from kvreturn.config import Model, Settings
from kvreturn.core.outcome import Outcome

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


if __name__ == "__main__":
    path = ROOT / "README.md"
    if "--check" in sys.argv:
        sys.exit(0 if path.read_text() == readme() else "README.md is not current: run `make docs`")
    path.write_text(readme())
