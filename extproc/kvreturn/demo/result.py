"""The demo's result: as one JSON object, and in words."""

import statistics
from typing import Any

from kvreturn.demo.counters import Counts
from kvreturn.demo.run import Played, Turn
from kvreturn.demo.stack import Engine

_MEMBERS = ("computed_tokens", "read_back_tokens", "returned_tokens", "ttft_ms", "return_ms", "outcome")


def summary(engine: Engine, turns: list[Turn]) -> dict[str, Any]:
    """The result as one JSON object.

    `saved.computed_tokens_ratio` is the share of prompt tokens that P did not have to compute from the second turn on;
    `saved.ttft_ratio_last_turn` is time to first token without read-back over that with it. Both are of the lazy way;
    those of the eager way begin with `eager_`. On real nodes, `transfers` has what NIXL counted on P, by way.
    """
    last = turns[-1].ways
    result: dict[str, Any] = {
        "engine": engine,
        "identical": all(t.identical for t in turns),
        "turns": [
            {"turn": t.turn, "prompt_tokens": t.prompt_tokens}
            | {name: _members(played) for name, played in t.ways.items()}
            for t in turns
        ],
        "saved": _saved(turns, "lazy") | {f"eager_{name}": value for name, value in _saved(turns, "eager").items()},
    }
    if engine != "sim":
        result["transfers"] = {name: _transfers([t.ways[name].counts for t in turns]) for name in last}
    return result


def _members(played: Played) -> dict[str, Any]:
    return {member: getattr(played, member) for member in _MEMBERS}


def _saved(turns: list[Turn], way: str) -> dict[str, float]:
    off, on = (sum(t.ways[name].computed_tokens for t in turns[1:]) for name in ("off", way))
    last = turns[-1].ways
    return {
        "computed_tokens_ratio": round(1 - on / off, 4) if off else 0.0,
        "ttft_ratio_last_turn": round(last["off"].ttft_ms / last[way].ttft_ms, 2) if last[way].ttft_ms else 0.0,
    }


def _transfers(each: list[Counts]) -> dict[str, int]:
    total = sum(each, Counts())
    return {"nixl_reads": total.transfers, "nixl_bytes": total.transferred_bytes, "nixl_failed": total.failed}


def sentences(result: dict[str, Any]) -> str:
    """The summary in words: a sentence or two for each way to reuse."""
    return f"{_lazy(result)}\n{_eager(result)}"


def _lazy(result: dict[str, Any]) -> str:
    read = sum(turn["lazy"]["read_back_tokens"] for turn in result["turns"])
    return (
        f"Lazy: {_against_off(result, 'lazy', '')}. P read {read:,} tokens from D while the client "
        f"waited{_nixl(result, 'lazy')}."
    )


def _eager(result: dict[str, Any]) -> str:
    turns = [turn["eager"] for turn in result["turns"]]
    waited, behind = (sum(turn[name] for turn in turns) for name in ("read_back_tokens", "returned_tokens"))
    slowest = max(turn["return_ms"] for turn in turns)
    return (
        f"Eager: {_against_off(result, 'eager', 'eager_')}. P read {waited:,} tokens while the client waited, and "
        f"{behind:,} behind it{_nixl(result, 'eager')}; the slowest return took {slowest:,.0f} ms."
    )


def _against_off(result: dict[str, Any], way: str, prefix: str) -> str:
    """What a way saved from the second turn on."""
    later, saved = result["turns"][1:], result["saved"]
    off, on = (statistics.median(turn[name]["ttft_ms"] for turn in later) for name in ("off", way))
    computed = f"from turn 2 on, P computed {saved[f'{prefix}computed_tokens_ratio']:.0%} fewer tokens"
    if result["engine"] != "sim":
        return (
            f"{computed}; time to first token was {on:,.0f} ms instead of {off:,.0f} (median), which says nothing "
            "about a GPU"
        )
    if on >= off:
        return f"{computed}; time to first token did not fall, the conversation is too short for its history to matter"
    return (
        f"{computed}; time to first token fell from {off:,.0f} to {on:,.0f} ms (median), in the last turn by a factor "
        f"of {saved[f'{prefix}ttft_ratio_last_turn']:g}"
    )


def _nixl(result: dict[str, Any], way: str) -> str:
    if "transfers" not in result:
        return ""
    of = result["transfers"][way]
    return f" (NIXL: {of['nixl_reads']} reads, {of['nixl_bytes'] / 1e6:,.1f} MB, {of['nixl_failed']} failed)"
