"""Answers made of choices: chat and completions."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvreturn.core.api.base import Answer

_MANY = 256


def say(parts: list[str], part: str) -> None:
    """Add to a text that is kept in parts. Many are joined: a token that is a text of its own takes 50 bytes more."""
    parts.append(part)
    if len(parts) >= _MANY:
        parts[:] = ["".join(parts)]


@dataclass(slots=True)
class ChoicesAnswer(Answer):
    """The first choice of an answer."""

    def read(self, obj: Mapping[str, Any], *, stream: bool) -> None:
        """See `Answer.read`."""
        # Once per token: so what is not there costs no call.
        if obj.get("error"):
            self.read_error(obj["error"])
        if obj.get("usage"):
            self.usage.read(obj["usage"])
        choices = obj.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            index = read_index(choice, 0)
            reason = choice.get("finish_reason")
            if isinstance(reason, str):
                self.finish_reasons[index] = reason
            if index == 0:
                self.read_choice(choice, stream=stream)

    @abc.abstractmethod
    def read_choice(self, choice: Mapping[str, Any], *, stream: bool) -> None:
        """Take what one body or chunk says of the first choice."""


def read_index(obj: Mapping[str, Any], default: int) -> int:
    """The member `index`, or the default where there is no number."""
    index = obj.get("index")
    return index if type(index) is int else default
