"""Members of log lines under the names that loggers give them."""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from kvreturn.analyze.observation import MAX_TOKENS, LineError

Unit = Literal["auto", "s", "ms", "us", "ns"]
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
# The smallest number that is taken for this unit: the years 5138 in s and 1973 in finer ones lie apart.
_FROM: tuple[tuple[Unit, float], ...] = (("ns", 1e17), ("us", 1e14), ("ms", 1e11))

TIME = ("ts", "timestamp", "time", "@timestamp", "start_time", "startTime", "created_at", "created", "arrival_time")
CONVERSATION = ("conversation_id", "session_id", "thread_id", "gen_ai.conversation.id", "session", "conversation")
PROMPT = ("prompt_tokens", "input_tokens", "input_length", "gen_ai.usage.input_tokens", "num_prompt_tokens")
COMPLETION = ("completion_tokens", "output_tokens", "output_length", "gen_ai.usage.output_tokens")
CACHED = ("cached_tokens", "gen_ai.usage.cache_read.input_tokens", "num_cached_tokens")


def first(obj: Mapping[str, Any], names: Iterable[str]) -> Any:  # noqa: ANN401 - JSON
    """The first member that is there and not null."""
    for name in names:
        value = obj.get(name)
        if value is not None:
            return value
    return None


def read_time(obj: Mapping[str, Any], unit: Unit) -> float:
    """Seconds since the epoch that the log uses.

    Args:
        obj: a line.
        unit: of numbers; `auto` tells by their size.

    Raises:
        LineError: there is no time that can be read.
    """
    value = first(obj, TIME)
    if value is None:
        raise LineError("no time (`ts`)")
    return to_seconds(value, unit)


def to_seconds(value: Any, unit: Unit) -> float:  # noqa: ANN401 - JSON
    """As `read_time`, of a value: a number, or ISO 8601 text, which is UTC unless it says otherwise."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
            seconds = moment.timestamp() if moment.tzinfo else moment.replace(tzinfo=UTC).timestamp()
        except (ValueError, OverflowError):
            seconds = _scaled(_number(value), unit)
    else:
        seconds = _scaled(_number(value), unit)
    if not 0 <= seconds < math.inf:
        raise LineError("the time (`ts`) cannot be read")
    return seconds + 0.0  # no negative zero, whose bytes sort last


def _number(value: Any) -> float:  # noqa: ANN401 - JSON
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _scaled(value: float, unit: Unit) -> float:
    if unit == "auto":
        unit = next((u for u, least in _FROM if value >= least), "s")
    return value * _SECONDS[unit]


def read_count(obj: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """A number of tokens, None if the line has none.

    Raises:
        LineError: what stands there is no such number.
    """
    names = tuple(names)
    value = first(obj, names)
    if value is None:
        return None
    number = _number(value)
    if not (0 <= number < MAX_TOKENS and number == int(number)):
        raise LineError(f"`{names[0]}` is not a number of tokens")
    return int(number)
