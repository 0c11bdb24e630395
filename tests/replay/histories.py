"""Real histories: agents' as they were written down, and answers of real providers as they were streamed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import openai

from replay.rendering import Json
from support.turns import compact

if TYPE_CHECKING:
    from replay.clients import Client

_CALLS = 9  # more than any answer makes at once

Habit = Literal["as it came", "lean", "marks", "reminds", "elides"]
"""What a client does to a history when it sends it again.

- `as it came`: nothing; members that are null are left out, as the official clients do.
- `lean`: no reasoning, arguments of calls parsed and written anew, text in parts.
- `marks`: `cache_control` on the last message, which becomes a list of parts for it.
- `reminds`: a reminder at the end of the last message, which is not there any more in the next request.
- `elides`: all but the last five observations are cut down to a line (SWE-agent's `last_n_observations`).
"""


@dataclass(frozen=True)
class Spoken:
    """One turn of a history.

    Attributes:
        inputs: what the client says: the results of the calls before, or the user's words.
        answer: D's, without a handle; a stream of events if it is no JSON object.
        items: the answer as the API's history has it.
    """

    inputs: Sequence[str]
    answer: bytes
    items: Sequence[Json]

    @property
    def stream(self) -> bool:
        return not self.answer.startswith(b"{")


@dataclass(frozen=True)
class History:
    """A conversation.

    Attributes:
        source: where it is from.
        system: its system prompt.
        tools: names of the functions that are called in it.
        turns: its turns.
    """

    source: str
    system: str
    tools: Sequence[str]
    turns: Sequence[Spoken]


def agent(path: Path, client: "type[Client]", *, thinks: bool) -> History:
    """An agent's history.

    Args:
        path: of the file, with chat messages.
        client: of which API.
        thinks: whether what it says before it acts is its reasoning.
    """
    system, *messages = json.loads(path.read_bytes())["messages"]
    turns: list[Spoken] = []
    inputs: list[str] = []
    tools = {c["function"]["name"]: None for m in messages for c in m.get("tool_calls", [])}
    for message in messages:
        if message["role"] != "assistant":
            inputs.append(message["content"])
            continue
        content, reasoning = message["content"], None
        if thinks:
            reasoning, fence, command = content.partition("```")
            content = fence + command
        calls = [
            {"id": f"call_{len(turns)}_{i}", "type": "function", "function": c["function"]}
            for i, c in enumerate(message.get("tool_calls", []))
        ]
        said = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": calls}
        answer = compact(client.answer(said))
        turns.append(Spoken(inputs, answer, client.received(answer, stream=False)))
        inputs = []
    return History("agents, thinking" if thinks else "agents", system["content"], list(tools), turns)


def recorded(paths: Sequence[Path], client: "type[Client]") -> History:
    """One conversation whose answers are these recordings, in their order; what asks for them was not recorded."""
    turns: list[Spoken] = []
    for path in paths:
        answer = path.read_bytes()
        try:
            items = client.received(answer, stream=True)
        except openai.APIError:  # an error in mid-stream: such a turn leaves nothing, and nobody replays it
            continue
        texts = [f"What was found for {path.stem} in place {i}, in a few words." for i in range(_CALLS)]
        turns.append(Spoken(texts, answer, items))
    return History("recordings", "You are a helpful assistant with some tools.", [], turns)
