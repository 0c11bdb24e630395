"""Recorded conversations: Mooncake's trace of a production chat service, and histories of agents."""

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scale.workload import Habits, Recorded, Turn

_CHUNK = 512  # tokens for which one of the trace's hashes stands
_STREAM = 80.0  # tokens per second: how long answers took is not in the trace
_CHARACTERS = 4.0  # of JSON per token, about


@dataclass(frozen=True, slots=True)
class Request:
    """One of Mooncake's.

    Attributes:
        when: seconds since the start of the trace.
        prompt: tokens.
        output: tokens of the answer.
        before: place in the trace of the request that it goes on from, None if there is none.
    """

    when: float
    prompt: int
    output: int
    before: int | None


def mooncake(path: Path) -> list[Request]:
    """Read the trace: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    A request goes on from the latest one whose full chunks, two or more, are its own first chunks; of several that go
    on from one, only the first does so. What came before that hour is not in the trace, so some "first" requests are
    none.
    """
    requests: list[Request] = []
    seen: dict[tuple[int, ...], int] = {}
    with gzip.open(path, "rt") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            chunks = tuple(row["hash_ids"])
            before = next((seen.pop(chunks[:n]) for n in range(len(chunks), 1, -1) if chunks[:n] in seen), None)
            prompt = row["input_length"]
            if before is not None and prompt <= requests[before].prompt + requests[before].output:
                before = None  # asked again, or the answer was edited
            requests.append(Request(row["timestamp"] / 1e3, prompt, row["output_length"], before))
            full = chunks[: prompt // _CHUNK]
            if len(full) > 1:
                seen[full] = number
    return requests


def gap(before: Request, after: Request) -> float:
    """Seconds between an answer and the request that goes on from it."""
    return max(after.when - before.when - before.output / _STREAM, 0.0)


def recorded(requests: Sequence[Request]) -> Recorded:
    """The trace as a workload."""
    conversations: dict[int, tuple[float, list[Turn]]] = {}
    first: dict[int, int] = {}
    for number, request in enumerate(requests):
        before = None if request.before is None else requests[request.before]
        if before is None or request.before is None:
            first[number] = number
            conversations[number] = request.when, [Turn(request.prompt, request.output, 0.0, "stop")]
        else:
            first[number] = first[request.before]
            new = request.prompt - before.prompt - before.output
            conversations[first[number]][1].append(Turn(new, request.output, gap(before, request), "stop"))
    return Recorded(list(conversations.values()))


@dataclass(frozen=True, slots=True)
class Observed:
    """Draws from what was seen, in place of a `Spread`."""

    values: tuple[float, ...]

    def draw(self, rng: random.Random) -> float:
        """One of the values."""
        return rng.choice(self.values)


@dataclass(frozen=True, slots=True)
class Steps:
    """What agents' histories show, in tokens.

    Attributes:
        system: of the system prompt.
        calls: of answers that were followed by a result.
        results: of these results.
        turns: answers of each history.
    """

    system: tuple[float, ...]
    calls: tuple[float, ...]
    results: tuple[float, ...]
    turns: tuple[int, ...]


def histories(folder: Path) -> Steps:
    """Read a folder of `{"messages": [...]}` files, chat messages of one agent each."""
    system, calls, results, turns = [], [], [], []
    for path in sorted(folder.glob("*.json")):
        messages = json.loads(path.read_text())["messages"]
        sizes = [max(len(json.dumps(message)) / _CHARACTERS, 1.0) for message in messages]
        roles = [message["role"] for message in messages]
        answers = [i for i, role in enumerate(roles) if role == "assistant"]
        system += [size for size, role in zip(sizes, roles, strict=True) if role == "system"]
        calls += [sizes[i] for i in answers if i + 1 < len(messages)]
        results += [sizes[i + 1] for i in answers if i + 1 < len(messages)]
        turns.append(len(answers))
    return Steps(tuple(system), tuple(calls), tuple(results), tuple(turns))


def as_observed(habits: Habits, steps: Steps) -> Habits:
    """The same habits with the sizes of steps as they were seen."""
    return replace(habits, tool=Observed(steps.results), call=Observed(steps.calls))
