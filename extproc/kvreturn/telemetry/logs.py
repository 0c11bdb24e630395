"""Log lines: text for people, or JSON Lines for machines.

A record may come with `extra={"fields": {...}}`: flat, and the same that its text says. As JSON they are members of the
line, next to `ts` (ISO 8601, UTC), `level`, `logger`; what has no fields has its text as `message`.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

Format = Literal["console", "json"]
FORMATS: tuple[Format, ...] = ("console", "json")
_CONSOLE = "%(asctime)s %(levelname)s %(name)s %(message)s"


class JSONFormatter(logging.Formatter):
    """One JSON object for each record, on one line. Fields that are not known are left out."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        fields = getattr(record, "fields", None)
        line = head(record.created, record.levelname.lower(), record.name)
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


def configure(form: Format, level: str, stream: TextIO = sys.stderr) -> None:
    """Set up logging of this process.

    Args:
        form: of the lines.
        level: `debug`, `info`, `warning` or `error`.
        stream: where they go.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JSONFormatter() if form == "json" else logging.Formatter(_CONSOLE))
    logging.basicConfig(level=level.upper(), handlers=[handler])
