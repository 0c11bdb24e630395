"""The demo's course: each turn once in every way (without read-back, with it), and once on the plain node."""

import statistics
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai

from kvreturn.demo.counters import Counts, counts, new_outcome, turns_by_outcome
from kvreturn.demo.leg import Leg, Said
from kvreturn.demo.script import Script
from kvreturn.demo.stack import WAYS, Engine, Stack

# Members of the JSON, by way. Without read-back there is nothing to tell of it.
_MEMBERS = ("computed_tokens", "read_back_tokens", "ttft_ms", "outcome")
_MEMBERS_OFF = ("computed_tokens", "ttft_ms")


@dataclass(frozen=True, slots=True)
class Played:
    """One turn, played one way.

    Attributes:
        counts: what P counted in it.
        ttft_ms: milliseconds from sending the request to the first piece of the answer.
        outcome: the router's word for what became of reuse.
    """

    counts: Counts
    ttft_ms: float
    outcome: str

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that P computed."""
        return self.counts.computed

    @property
    def read_back_tokens(self) -> int:
        """Prompt tokens that P read from D."""
        return self.counts.read


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took, by the name of each way to play it, and whether all answers are the oracle's."""

    turn: int
    prompt_tokens: int
    ways: Mapping[str, Played]
    identical: bool


async def play(stack: Stack, script: Script) -> AsyncIterator[Turn]:
    """Play the conversation in all ways in step, and tell each turn when it is done."""
    gateway = openai.AsyncOpenAI(base_url=stack.gateway, api_key="demo", max_retries=0)
    single = openai.AsyncOpenAI(base_url=stack.oracle, api_key="demo", max_retries=0)
    # The salt keeps the ways apart in the nodes' prefix caches, so that none of them gains from another.
    legs = {way: Leg(gateway, way.model, script, {"cache_salt": way.name}) for way in WAYS}
    oracle = Leg(single, WAYS[0].model, script)
    async with gateway, single, aiohttp.ClientSession() as session:
        for number in range(script.length):
            said: list[Said] = []
            ways: dict[str, Played] = {}
            for way, leg in legs.items():
                before = await counts(session, stack.prefill_metrics)
                outcomes = await turns_by_outcome(session, stack.router_metrics, way.model)
                said.append(await leg.turn(number))
                outcome = await new_outcome(session, stack.router_metrics, way.model, outcomes)
                counted = await counts(session, stack.prefill_metrics) - before
                ways[way.name] = Played(counted, round(said[-1].ttft_ms, 1), outcome)
            plain = await oracle.turn(number)
            yield Turn(
                turn=number + 1,
                prompt_tokens=plain.prompt_tokens,
                ways=ways,
                identical=all(s.text == plain.text for s in said),
            )


def summary(engine: Engine, turns: list[Turn]) -> dict[str, Any]:
    """The result as one JSON object.

    `saved.computed_tokens_ratio` is the share of prompt tokens that P did not have to compute from the second turn on;
    `saved.ttft_ratio_last_turn` is time to first token without read-back over that with it. On real nodes, `transfers`
    has what NIXL counted on P, by way.
    """
    later = turns[1:]
    off, on = (sum(t.ways[name].computed_tokens for t in later) for name in ("off", "on"))
    last = turns[-1].ways
    result: dict[str, Any] = {
        "engine": engine,
        "identical": all(t.identical for t in turns),
        "turns": [
            {"turn": t.turn, "prompt_tokens": t.prompt_tokens}
            | {name: _members(name, played) for name, played in t.ways.items()}
            for t in turns
        ],
        "saved": {
            "computed_tokens_ratio": round(1 - on / off, 4) if off else 0.0,
            "ttft_ratio_last_turn": round(last["off"].ttft_ms / last["on"].ttft_ms, 2) if last["on"].ttft_ms else 0.0,
        },
    }
    if engine != "sim":
        result["transfers"] = {name: _transfers([t.ways[name].counts for t in turns]) for name in last}
    return result


def _members(name: str, played: Played) -> dict[str, Any]:
    return {member: getattr(played, member) for member in (_MEMBERS_OFF if name == "off" else _MEMBERS)}


def _transfers(each: list[Counts]) -> dict[str, int]:
    total = sum(each, Counts())
    return {"nixl_reads": total.transfers, "nixl_bytes": total.transferred_bytes, "nixl_failed": total.failed}


def sentences(result: dict[str, Any]) -> str:
    """The summary in words."""
    later = result["turns"][1:]
    off, on = (statistics.median(t[name]["ttft_ms"] for t in later) for name in ("off", "on"))
    saved = result["saved"]
    computed = f"From turn 2 on, the prefill node computed {saved['computed_tokens_ratio']:.0%} fewer tokens"
    if result["engine"] != "sim":
        reads, none = result["transfers"]["on"], result["transfers"]["off"]
        return (
            f"{computed}. NIXL counted {reads['nixl_reads']} reads from D there, {reads['nixl_bytes'] / 1e6:,.1f} MB, "
            f"{reads['nixl_failed']} failed; without read-back {none['nixl_reads']}. Time to first token was "
            f"{off:,.0f} ms without and {on:,.0f} ms with it (median), which says nothing about a GPU."
        )
    if on >= off:
        return "The conversation is too short for its history to matter: time to first token did not fall."
    return (
        f"{computed}; time to first token fell from {off:,.0f} to {on:,.0f} ms (median), in the last turn by a factor "
        f"of {saved['ttft_ratio_last_turn']:g}."
    )
