"""What every client is to do: the same tasks with the same tool, and how it reports.

usage of each client: CLIENT.py API RUN...    where RUN is `whole=BASE_URL` or `stream=BASE_URL`

It prints a JSON list with one transcript for each run. `conversation.mjs` is the same for Node.
"""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL = "sim"
SYSTEM = "Be an agent that reads code."
TASKS = [
    f"{ask} " * 8
    for ask in (
        "Find out what the module does, and say it in one sentence.",
        "Now look at the next one, and compare the two.",
        "Which of them would you rather keep?",
        "Write down what is left to do.",
    )
]
RESULT = "def f(x): return x  # it does nothing, as far as anybody can tell\n" * 4
ROUNDS = 24
"""At most so many requests for one task."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}, "deep": {"type": "boolean"}},
    "required": ["path", "line", "deep"],
    "additionalProperties": False,
}


@dataclass
class Desk:
    """Where one conversation's tool runs.

    Attributes:
        calls: arguments of each call, in order.
        texts: the answer to each task.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def read(self, path: str, line: int, deep: bool) -> str:  # noqa: FBT001 - the model names them
        """Read a file.

        Args:
            path: of the file.
            line: to begin with.
            deep: whether to follow imports.
        """
        self.calls.append({"path": path, "line": line, "deep": deep})
        return RESULT


Talk = Callable[[str, bool, Desk], Awaitable[None]]
"""Holds the conversation at this base URL, streamed or not."""


def main(apis: Mapping[str, Talk]) -> None:
    """Do the runs that the command line names.

    Args:
        apis: by name, what the client can be used with.
    """
    api, *runs = sys.argv[1:]

    async def all_runs() -> list[Desk]:
        desks = []
        for run in runs:
            how, _, url = run.partition("=")
            desks.append(Desk())
            await apis[api](url, how == "stream", desks[-1])
        return desks

    print(json.dumps([dataclasses.asdict(desk) for desk in asyncio.run(all_runs())]))
