"""Runs of `kvreturn bench`, made up turn by turn."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvreturn.bench.counters import Look
from kvreturn.bench.run import Played, Run
from kvreturn.bench.sample import LEGS, LegName, Sample

FIELDS_OF_VLLM = (
    *("ttft_ms", "tpot_ms", "latency_ms", "start_time_ms", "input_num_turns", "input_num_tokens"),
    *("output_num_tokens", "output_num_chunks", "output_num_first_chunk_tokens", "approx_cached_percent"),
    *("conversation_id", "client_id"),
)
"""What `--stats-json-output` of vLLM 0.32.0's multi-turn benchmark has of each request."""


def sample(leg: LegName, turn: int, ttft_ms: float, *, round_: int = 0, text: str = "x", tokens: int = 8) -> Sample:
    return Sample(
        ttft_ms=ttft_ms,
        tpot_ms=2.0,
        latency_ms=ttft_ms + 14.0,
        start_time_ms=1_000.0 * turn,
        input_num_turns=2 * turn + 1,
        input_num_tokens=100 * (turn + 1),
        output_num_tokens=tokens,
        output_num_chunks=tokens - 1,
        output_num_first_chunk_tokens=None,
        approx_cached_percent=0.0,
        conversation_id=f"c-{round_}",
        client_id=0,
        leg=leg,
        round=round_,
        turn=turn,
        text=text,
    )


def look(
    outcomes: Mapping[str, int], *, local: int = 0, read: int = 0, caching: bool | None = False, **more: float
) -> Look:
    """Of a router that counted these turns, and of a P that took 1,000 prompt tokens."""
    prompt = {"local_cache_hit": local, "external_kv_transfer": read, "local_compute": 1_000 - local - read}
    counts: dict[str, float] = {"bytes": 0.0, "seconds": 0.0, **more}
    return Look(
        Counter(prompt),
        Counter(outcomes),
        read,
        counts["bytes"],
        counts["seconds"],
        int(counts.get("failed", 0)),
        caching,
        routers=True,
    )


def run(ttfts: Sequence[Mapping[LegName, Sequence[float]]], looks: Mapping[LegName, Look] | None = None) -> Run:
    """A run of one conversation in each round.

    Args:
        ttfts: of the turns of each leg, by round; the first ones are first turns.
        looks: what was counted in each leg; as it should be if left out.
    """
    played = Run()
    for number, legs in enumerate(ttfts):
        for leg in LEGS:
            turns = len(legs[leg])
            usual = {"off": {"disabled": turns}, "on": {"first_turn": 1, "hit": turns - 1}}
            seen = (looks or {}).get(leg) or look(usual[leg], read=0 if leg == "off" else 600)
            samples = [sample(leg, t, ms, round_=number) for t, ms in enumerate(legs[leg])]
            played.played.append(Played(leg, number, samples, [], 10.0, seen, 0.001))
    return played


def chat(text: str, *, prompt: int = 3) -> dict[str, Any]:
    """What a node answers to a chat request that asks for no stream."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": prompt, "completion_tokens": 1}}
