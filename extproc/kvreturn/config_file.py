"""Loading the settings from YAML, with errors that name the line."""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from kvreturn.config import SECRET_ENV, ConfigError, Model, Settings
from kvreturn.settings.store import STORE_KEY_ENV, STORE_URL_ENV

# Ten times as fast where PyYAML was built with libyaml: in a reload, all streams wait for it.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The settings that a variable of the environment replaces: they hold secrets.
_FROM_ENV = {SECRET_ENV: ("secret",), STORE_URL_ENV: ("store", "url"), STORE_KEY_ENV: ("store", "encryption_key")}


def load_settings(
    path: Path, environ: Mapping[str, str] = os.environ, over: Mapping[str, object] = MappingProxyType({})
) -> Settings:
    """Read settings from a YAML file.

    Args:
        path: of the file.
        environ: the environment.
        over: top-level settings that stand above those of the file.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or has a wrong or unknown member.
    """
    try:
        text = path.read_text()
        loader = _Loader(text)
        node = loader.get_single_node()
        data = loader.construct_document(node) if node else None
        twice = _duplicate(node)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    # ValueError: no UTF-8, or a number or date that Python has none of. RecursionError: also what refers to itself.
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path}{_place(e)}: not YAML: {_reason(e)}") from e
    if twice:
        raise ConfigError(f"{path}:{twice.start_mark.line + 1}: {twice.value}: given twice")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the file must hold one mapping; see the README for the smallest one")
    for variable, (*sections, name) in _FROM_ENV.items():
        if environ.get(variable):
            section = data
            for step in sections:
                section = section.setdefault(step, {})
            if isinstance(section, dict):  # else the model says what is wrong
                section[name] = environ[variable]
    data.update(over)
    try:
        return Settings.model_validate(data)
    except ValidationError as e:
        lines = [f"{path}:{_line_of(node, err)}: {_explain(err)}" for err in e.errors()]
        raise ConfigError("\n".join(lines)) from None


def _place(error: Exception) -> str:
    """`:LINE` where the parser gave up, empty if it does not tell."""
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark else ""


def _reason(error: Exception) -> str:
    """What is wrong, on one line."""
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return " ".join(str(reason).split())


def _duplicate(node: yaml.Node | None) -> yaml.ScalarNode | None:
    """The second key of two that are the same; YAML would take the last one without a word."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                return key
            seen.add(str(key.value))
            if found := _duplicate(value):
                return found
    elif isinstance(node, yaml.SequenceNode):
        return next((found for item in node.value if (found := _duplicate(item))), None)
    return None


def _line_of(node: yaml.Node | None, err: Any) -> int:  # noqa: ANN401 - as for `_explain`
    """The line of what is wrong. Where settings do not fit together, their names are the beginning of the message."""
    if err["loc"]:
        return _line(node, err["loc"])
    names = re.findall(r"[\w.]+", _message(err).partition(":")[0])
    return max(_line(node, tuple(name.split("."))) for name in names)


def _line(node: yaml.Node | None, loc: tuple[int | str, ...]) -> int:
    """The line of the member that `loc` names, or of the nearest one around it."""
    line = 1
    for step in loc:
        found = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == step:
                    line, found = key.start_mark.line + 1, value
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = node.value[step]
            line = found.start_mark.line + 1
        if found is None:
            break
        node = found
    return line


def _explain(err: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails, whose members vary
    loc = err["loc"]
    where = ".".join(str(part) for part in loc)
    if err["type"] != "extra_forbidden":
        return f"{where}: {_message(err)}" if where else _message(err)
    close = difflib.get_close_matches(str(loc[-1]), _known(loc[:-1]), n=1)
    return f"{where}: unknown setting" + (f"; did you mean `{close[0]}`?" if close else "")


def _message(err: Any) -> str:  # noqa: ANN401 - as above
    return str(err["msg"]).removeprefix("Value error, ")


def _known(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Settings
    if loc[:1] == ("models",):  # its keys are free
        return _names(Model)
    for step in loc:
        annotation = model.model_fields[str(step)].annotation
        # Of several types that a member may have, one is a section; nothing else forbids members.
        model = next(t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, BaseModel))
    return _names(model)


def _names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
