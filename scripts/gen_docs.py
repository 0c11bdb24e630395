"""Write what is generated in the documentation: the configuration reference in README.md.

usage: python scripts/gen_docs.py [--check]
"""

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from kvreturn.config import Model, Settings

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- begin: configuration -->", "<!-- end: configuration -->"


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
            lines.append(f"| `{name}` | {_default(field.default)} | {field.description} |")
    return lines


def _default(value: Any) -> str:  # noqa: ANN401 - any setting's value
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, SecretStr) or value in ({}, None):
        return "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def readme() -> str:
    """README.md with its generated part renewed."""
    text = (ROOT / "README.md").read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{configuration()}\n{END}{tail}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    if "--check" in sys.argv:
        sys.exit(0 if path.read_text() == readme() else "README.md is not current: run `make docs`")
    path.write_text(readme())
