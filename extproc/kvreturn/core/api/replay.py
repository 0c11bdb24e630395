"""What becomes of an answer when clients replay it in the next request, and what is left to compare."""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from kvreturn.core.jsontext import JSONTextError, loads


def without_empty(obj: Mapping[str, Any], besides: Collection[str] = ()) -> dict[str, Any]:
    """All of an object but for these members and for null, which means the same as a missing one, as do "" and []."""
    return {k: v for k, v in obj.items() if k not in besides and v not in (None, [], "")}


def kind_of(obj: Any) -> str:  # noqa: ANN401 - JSON
    """The `type` of an item, a block or a part; empty if it has none."""
    kind = obj.get("type") if isinstance(obj, Mapping) else None
    return kind if isinstance(kind, str) else ""


def cleaned(parts: Any, extras: Collection[str]) -> Any:  # noqa: ANN401 - JSON
    """Parts of a content without these members, and without empty ones. What is no list is returned as it is."""
    if not isinstance(parts, list):
        return parts
    return [without_empty(p, extras) if isinstance(p, dict) else p for p in parts]


def joined_text(parts: Any) -> Any:  # noqa: ANN401 - JSON
    """Text as one string, however it was divided into parts. What is not all text is returned as it is."""
    if isinstance(parts, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        return "".join(p["text"] for p in parts)
    return parts


def by_value(arguments: Any) -> Any:  # noqa: ANN401 - JSON
    """A tool call's arguments by what they mean: clients parse them, and write them anew with other spaces."""
    if isinstance(arguments, str):
        with contextlib.suppress(JSONTextError):  # cut off by a length limit: compared as text
            return [loads(arguments.encode(errors="surrogatepass"))]
    return arguments
