"""The demo's course: each turn once without read-back, once with it, once on the plain node."""

import statistics
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import openai

from kvreturn.demo.counters import new_outcome, prompt_tokens_by_source, turns_by_outcome
from kvreturn.demo.leg import Leg
from kvreturn.demo.script import Script
from kvreturn.demo.stack import MODEL, MODEL_OFF, Stack

_COMPUTED, _READ = "local_compute", "external_kv_transfer"


@dataclass(frozen=True, slots=True)
class Off:
    """A turn without read-back."""

    computed_tokens: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class On:
    """A turn with it."""

    computed_tokens: int
    read_back_tokens: int
    ttft_ms: float
    outcome: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took, and whether all three answers are the same."""

    turn: int
    prompt_tokens: int
    off: Off
    on: On
    identical: bool


async def play(stack: Stack, script: Script) -> AsyncIterator[Turn]:
    """Play the conversation on all legs in step, and tell each turn when it is done."""
    gateway = openai.AsyncOpenAI(base_url=stack.gateway, api_key="demo", max_retries=0)
    single = openai.AsyncOpenAI(base_url=stack.oracle, api_key="demo", max_retries=0)
    # The salt keeps the legs apart in the decode node's prefix cache, so that none of them gains from another.
    off = Leg(gateway, MODEL_OFF, script, {"cache_salt": "off"})
    on, oracle = Leg(gateway, MODEL, script), Leg(single, MODEL, script)
    async with gateway, single, aiohttp.ClientSession() as session:
        for number in range(script.length):
            start = await prompt_tokens_by_source(session, stack.prefill_metrics)
            without = await off.turn(number)
            middle = await prompt_tokens_by_source(session, stack.prefill_metrics)
            outcomes = await turns_by_outcome(session, stack.router_metrics, MODEL)
            with_it = await on.turn(number)
            end = await prompt_tokens_by_source(session, stack.prefill_metrics)
            outcome = await new_outcome(session, stack.router_metrics, MODEL, outcomes)
            plain = await oracle.turn(number)
            yield Turn(
                turn=number + 1,
                prompt_tokens=with_it.prompt_tokens,
                off=Off(_grown(start, middle, _COMPUTED), round(without.ttft_ms, 1)),
                on=On(_grown(middle, end, _COMPUTED), _grown(middle, end, _READ), round(with_it.ttft_ms, 1), outcome),
                identical=without.text == with_it.text == plain.text,
            )


def _grown(before: dict[str, float], after: dict[str, float], source: str) -> int:
    return int(after.get(source, 0) - before.get(source, 0))


def summary(engine: str, turns: list[Turn]) -> dict[str, Any]:
    """The result as one JSON object.

    `saved.computed_tokens_ratio` is the share of prompt tokens that P did not have to compute from the second turn on;
    `saved.ttft_ratio_last_turn` is time to first token without read-back over that with it.
    """
    later = turns[1:]
    off, on = (sum(t.off.computed_tokens for t in later), sum(t.on.computed_tokens for t in later))
    last = turns[-1]
    rows = [{k: v for k, v in asdict(t).items() if k != "identical"} for t in turns]
    return {
        "engine": engine,
        "identical": all(t.identical for t in turns),
        "turns": rows,
        "saved": {
            "computed_tokens_ratio": round(1 - on / off, 4) if off else 0.0,
            "ttft_ratio_last_turn": round(last.off.ttft_ms / last.on.ttft_ms, 2) if last.on.ttft_ms else 0.0,
        },
    }


def sentence(result: dict[str, Any]) -> str:
    """The summary in one line."""
    turns = result["turns"]
    later = turns[1:]
    median_off = statistics.median(t["off"]["ttft_ms"] for t in later)
    median_on = statistics.median(t["on"]["ttft_ms"] for t in later)
    saved = result["saved"]
    if median_on >= median_off:
        return "The conversation is too short for its history to matter: time to first token did not fall."
    return (
        f"From turn 2 on, the prefill node computed {saved['computed_tokens_ratio']:.0%} fewer tokens; time to first "
        f"token fell from {median_off:,.0f} to {median_on:,.0f} ms (median), in the last turn by a factor of "
        f"{saved['ttft_ratio_last_turn']:g}."
    )
