"""Log lines: text for people, or JSON Lines for machines.

A record may come with `extra={"fields": {...}}`: flat, and the same that its text says. As JSON they are members of the
line, next to `ts` (ISO 8601, UTC), `level`, `logger`; what has no fields has its text as `message`.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

Format = Literal["console", "json"]
FORMATS: tuple[Format, ...] = ("console", "json")
_CONSOLE = "%(asctime)s %(levelname)s {who}%(name)s %(message)s"


class JSONFormatter(logging.Formatter):
    """One JSON object for each record, on one line. Fields that are not known are left out.

    Args:
        worker: which one writes, None if there is one process.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._more = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        fields = getattr(record, "fields", None)
        line = head(record.created, record.levelname.lower(), record.name) | self._more
        if fields is None:
            line["message"] = record.getMessage()
        else:
            line |= {name: value for name, value in fields.items() if value is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return dump(line)


def head(seconds: float, level: str, logger: str) -> dict[str, object]:
    """What each line begins with.

    Args:
        seconds: since the epoch.
        level: in lower case.
        logger: name of it.
    """
    ts = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return {"ts": ts, "level": level, "logger": logger}


def dump(line: dict[str, object]) -> str:
    """A line as text: ASCII, so that no terminal and no collector can take a part of it for something else."""
    return json.dumps(line, separators=(",", ":"), default=str)


def configure(form: Format, level: str, worker: int | None = None) -> None:
    """Set up logging of this process.

    Args:
        form: of the lines.
        level: `debug`, `info`, `warning` or `error`.
        worker: which one this is, None if there is one process.
    """
    handler = logging.StreamHandler(sys.stderr)
    who = "" if worker is None else f"worker {worker} "
    handler.setFormatter(JSONFormatter(worker) if form == "json" else logging.Formatter(_CONSOLE.format(who=who)))
    logging.basicConfig(level=level.upper(), handlers=[handler])
