"""Reading `--node-config FILE`: a node's command line, its `--kv-transfer-config`, or Kubernetes manifests."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_TRANSFER = "kv-transfer-config"
# Short forms of vLLM's options that matter here.
_SHORT = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size"}


class NodeFileError(Exception):
    """A file in which no node's flags can be found; the message says why."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one node is started.

    Attributes:
        source: path of the file, and which of several it is.
        transfer: the `--kv-transfer-config`; empty if it has none.
        options: the other options, names without leading dashes and with dashes; an empty value for a switch.
        environ: variables that are set for it; a value that comes from elsewhere (a Kubernetes secret) is empty.
    """

    source: str
    transfer: Mapping[str, Any]
    options: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


def read_launches(path: Path) -> list[Launch]:
    """All nodes that a file starts.

    Raises:
        NodeFileError: it cannot be read, or there is no node in it.
    """
    try:
        text = path.read_text()
    except OSError as e:
        raise NodeFileError(f"cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise NodeFileError("is no text") from None
    try:
        documents = _documents(text)
        launches = [launch for document in documents for launch in _of_document(str(path), document)]
    except RecursionError:
        raise NodeFileError("is nested too deeply, or in itself") from None
    if not documents:
        launches = [_of_words(str(path), _words(text), {})]
    if not launches:
        raise NodeFileError("holds neither a vLLM command line nor a --kv-transfer-config")
    if len(launches) > 1:
        return [Launch(f"{x.source}#{i}", x.transfer, x.options, x.environ) for i, x in enumerate(launches, 1)]
    return launches


def _documents(text: str) -> list[Any]:
    """The mappings or lists in JSON or YAML; none if it is a command line, which YAML takes for one long text."""
    try:
        return [d for d in yaml.safe_load_all(text) if isinstance(d, Mapping | list)]
    except yaml.YAMLError:
        return []


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as e:
        raise NodeFileError(f"is no command line: {e}") from None


def _of_document(source: str, document: Any) -> Iterator[Launch]:  # noqa: ANN401 - YAML
    if isinstance(document, list) and all(isinstance(word, str) for word in document):
        yield _of_words(source, document, {})
    elif isinstance(document, Mapping) and ("kv_connector" in document or "kv_role" in document):
        yield Launch(source, document)
    else:
        for mapping in _mappings(document):
            words = [*_strings(mapping.get("command")), *_strings(mapping.get("args"))]
            if any("vllm" in word or _TRANSFER in word.replace("_", "-") for word in words):
                yield _of_words(source, words, _environment(mapping.get("env", mapping.get("environment"))))


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401 - YAML
    if isinstance(value, Mapping):
        yield value
        for inner in value.values():
            yield from _mappings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _mappings(inner)


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]  # Compose takes a text; a shell splits it, see `_of_words`
    return [str(word) for word in value] if isinstance(value, list) else []


def _environment(value: object) -> dict[str, str]:
    """Kubernetes' list of names and values, Compose's mapping or list of assignments."""
    if isinstance(value, Mapping):
        return {str(k): "" if v is None else str(v) for k, v in value.items()}
    found = {}
    for item in value if isinstance(value, list) else []:
        if isinstance(item, Mapping) and "name" in item:
            found[str(item["name"])] = str(item.get("value", ""))
        elif isinstance(item, str):
            name, _, text = item.partition("=")
            found[name] = text
    return found


def _of_words(source: str, words: Sequence[str], environ: Mapping[str, str]) -> Launch:
    options, variables, dotted = dict[str, str](), dict(environ), dict[str, Any]()
    rest = list(_flat(words))
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if not options and (match := _ASSIGNMENT.fullmatch(word)):
                variables[match[1]] = match[2]
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        name, *path = name.split(".")
        name = _SHORT.get(name, name.replace("_", "-"))
        if path and name == _TRANSFER:
            _put(dotted, path, value)
        else:
            options[name] = value
    text = options.pop(_TRANSFER, "{}")
    try:
        transfer = json.loads(text)
    except ValueError as e:
        raise NodeFileError(f"--{_TRANSFER} is no JSON: {e}") from None
    if not isinstance(transfer, Mapping):
        raise NodeFileError(f"--{_TRANSFER} is no JSON object")
    if not any("vllm" in word for word in words) and not transfer and not dotted:
        raise NodeFileError("holds neither a vLLM command line nor a --kv-transfer-config")
    return Launch(source, {**transfer, **dotted}, options, variables)


def _flat(words: Sequence[str]) -> Iterator[str]:
    """The words of `sh -c "..."` as words of their own."""
    for word in words:
        if re.search(r"\s", word) and "vllm" in word and not word.lstrip().startswith("{"):
            yield from _words(word)
        else:
            yield word


def _put(into: dict[str, Any], path: Sequence[str], text: str) -> None:
    """VLLM's dotted form: `--kv-transfer-config.kv_connector_extra_config.bidirectional_kv_xfer true`."""
    *above, last = path
    for step in above:
        into = into.setdefault(step, {})
    try:
        into[last] = json.loads(text)
    except ValueError:
        into[last] = text
