"""Logs for `kvreturn analyze`, and what it makes of them."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvreturn.analyze.analysis import Analysis, Options, analyze
from kvreturn.analyze.lines import Line
from kvreturn.analyze.report import make_report


def lines(rows: Iterable[Any]) -> list[Line]:
    """Rows as numbered lines: text as it is, all else as JSON."""
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return [Line("log", number, text.encode()) for number, text in enumerate(texts, 1)]


def result(rows: Iterable[Any], options: Options | None = None) -> dict[str, Any]:
    """What `--json` prints."""
    return make_report(analysis(rows, options)).as_json()


def analysis(rows: Iterable[Any], options: Options | None = None) -> Analysis:
    """The sums behind it."""
    return analyze(lines(rows), options or Options())


def named(conversation: object, ts: float | str, prompt_tokens: int, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A line of the simplest form."""
    return {"conversation_id": conversation, "ts": ts, "prompt_tokens": prompt_tokens, **more}


Message = dict[str, Any]


def logged(ts: float, messages: Sequence[Message], tokens: int, answer: Message | None = None) -> dict[str, Any]:
    """A logged chat request of so many tokens; with an answer, of 50 tokens, if that was logged."""
    usage = {"prompt_tokens": tokens, "completion_tokens": 50}
    row = {"timestamp": ts, "request": {"model": "m", "messages": messages}}
    if answer is None:
        return row | {"usage": {"prompt_tokens": tokens}}
    choice = {"index": 0, "message": answer, "finish_reason": "stop"}
    return row | {"response": {"choices": [choice], "usage": usage}}
