"""Agents: each has one conversation after another, and asks again as soon as its tool or its user is done."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from kvreturn.sim.words import WORDS

Message = dict[str, Any]

_TURNS = 16  # after which a conversation is over at the latest
_OPENING, _RESULT, _QUESTION = 120, 100, 30  # words, as many simulated tokens; results vary by half
_TOOL_SECONDS, _USER_SECONDS = 3.0, 12.0  # medians of log-normal pauses
_SPREAD = 0.6  # standard deviation of their logarithm
_GOES_ON = 0.5  # how often a user has another question after an answer


def _tool(name: str, **parameters: str) -> Message:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}


TOOLS = [_tool("read_file", path="string", line="integer"), _tool("search", word="string", deep="boolean")]
_SYSTEM = "You are an agent with tools. " + " ".join(WORDS[:60])


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered request.

    Attributes:
        asked: seconds of the loop's time at which it was sent.
        first: seconds from then to the first byte of the answer; of a failed one, to the failure.
        ended: seconds of the loop's time at which its answer was complete.
        message: the answer; None if the turn failed.
        failure: why, empty if it did not.
        tokens: of its prompt and of its answer.
    """

    asked: float
    first: float
    ended: float
    message: Message | None
    failure: str = ""
    tokens: tuple[int, int] = (0, 0)


Ask = Callable[[int, list[Message]], Awaitable[Turn]]
"""Sends the messages as that agent."""


async def agent(number: int, seed: int, ask: Ask, active: Callable[[int], Awaitable[None]]) -> None:
    """Work for ever.

    Args:
        number: of the agent, from 0.
        seed: of all agents. What an agent says depends on it, its number, and the answers.
        ask: sends a request.
        active: waits until the agent may work.
    """
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - no secret
    await asyncio.sleep(rng.uniform(0.0, _USER_SECONDS))
    while True:
        await active(number)
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _prose(rng, _OPENING)}]
        for _ in range(_TURNS):
            turn = await ask(number, messages)
            if turn.message is None:
                break
            calls = turn.message.get("tool_calls") or []
            if not calls and rng.random() >= _GOES_ON:
                break
            messages = [*messages, turn.message, *_replies(rng, calls)]
            await _pause(rng, _TOOL_SECONDS if calls else _USER_SECONDS)
        await _pause(rng, _USER_SECONDS)


def _replies(rng: random.Random, calls: list[Message]) -> list[Message]:
    if not calls:
        return [{"role": "user", "content": _prose(rng, _QUESTION)}]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": _prose(rng, _RESULT // len(calls))} for call in calls
    ]


def _prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(words // 2, words * 3 // 2)))


async def _pause(rng: random.Random, median: float) -> None:
    await asyncio.sleep(rng.lognormvariate(math.log(median), _SPREAD))
