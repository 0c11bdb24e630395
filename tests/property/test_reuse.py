"""Reuse really happens: P computes what is new in a turn, and no more than a block besides."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvreturn.demo.script import Message, Script, built_in, from_file, reply
from kvreturn.settings.types import Proof
from kvreturn.sim.config import ConnectorKind
from property.client import Asked
from property.cluster import Cluster, open_cluster
from property.history import History, Setup
from property.play import Player
from property.verdict import Tally, Told
from property.wording import MODEL
from support.corpus import files
from support.harness import outcomes

_BLOCK = 16
# P's prefix cache is off: what P does not compute, it has read back.
_SETUP = Setup(p_cache=False, max_model_len=65_536, p_room=1.0, d_room=2.0, threshold=64, block_size=_BLOCK)
LEVELS: dict[Proof, ConnectorKind] = {"connector": "kvreturn", "router": "stock"}  # and the connector that P has


@dataclass(frozen=True)
class Figures:
    """One turn.

    Attributes:
        prompt: its tokens.
        held: how many tokens D holds of the turn before.
        shared: how many of those are the prompt's prefix.
        computed: how many tokens P computed.
        read: how many it read back.
        outcome: as the router counted it.
    """

    prompt: int
    held: int
    shared: int
    computed: int
    read: int
    outcome: str


async def play(script: Script, setup: Setup) -> list[Figures]:
    """Play a conversation as the demo does: the client sends back content and tool calls, and no reasoning."""
    figures: list[Figures] = []
    messages: list[Message] = list(script.opening)
    held: Sequence[int] = ()
    async with open_cluster(setup) as cluster:
        player = Player(cluster, History(setup, ()), Tally())
        for number in range(script.length):
            if number:
                messages += reply(messages[-1], script.turns[number - 1])
            body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": True, "return_token_ids": True}
            if script.tools:
                body["tools"] = list(script.tools)
            prompt = await _tokenize(cluster, body)
            before, ended = cluster.p.stats, outcomes(cluster.router.world.metrics)
            told = await player.say(_asked(body))
            after = cluster.p.stats
            (outcome,) = [o for o, n in outcomes(cluster.router.world.metrics).items() if n > ended.get(o, 0)]
            computed, read = after.computed_tokens - before.computed_tokens, after.read_tokens - before.read_tokens
            shared = _shared(prompt, held)
            figures.append(Figures(len(prompt), len(held), shared, computed, read, outcome))
            held = [*prompt, *_generated(told)][:-1]  # the KV of the last token is not computed
            messages.append(_answer(told))
    return figures


async def _tokenize(cluster: Cluster, body: dict[str, Any]) -> list[int]:
    form = {name: body[name] for name in ("model", "messages", "tools") if name in body}
    async with cluster.session.post(cluster.url(cluster.oracle, "/tokenize"), json=form) as answer:
        tokens: list[int] = (await answer.json())["tokens"]
        return tokens


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _asked(body: dict[str, Any]) -> Asked:
    text = json.dumps(body).encode()
    return Asked("/v1/chat/completions", {"authorization": "Bearer one"}, text, text, ())


def _generated(told: Told) -> list[int]:
    return [t for o in told.objects for c in o["choices"] for t in c.get("token_ids") or ()]


def _answer(told: Told) -> Message:
    message = told.answer(0).message
    assert message
    return {name: value for name, value in message.items() if name != "reasoning"} | {"content": message.get("content")}


def check(figures: Sequence[Figures], block: int) -> None:
    """What must hold from the second turn on."""
    for turn in figures[1:]:
        assert turn.computed <= turn.prompt - turn.shared + block, turn
        assert turn.computed + turn.read == turn.prompt
        assert turn.outcome == ("hit" if turn.shared == turn.held else "partial_hit"), turn
    assert figures[0].outcome == "first_turn"


@pytest.mark.parametrize("level", LEVELS)
def test_p_computes_just_the_new_suffix(level: Proof) -> None:
    figures = asyncio.run(play(built_in(), replace(_SETUP, proof=level, p=LEVELS[level])))
    assert len(figures) >= 8
    assert figures[-1].prompt > 20_000
    assert all(turn.shared == turn.held for turn in figures[1:])
    check(figures, _BLOCK)


@pytest.mark.parametrize("level", LEVELS)
def test_with_dropped_thinking_p_computes_just_what_follows_the_divergence(level: Proof) -> None:
    setup = replace(_SETUP, template="drop_thinking", proof=level, p=LEVELS[level])
    figures = asyncio.run(play(built_in(), setup))
    assert figures[-1].prompt > 20_000
    assert all(turn.shared < turn.held for turn in figures[1:])  # the thinking that D generated is not in the prompt
    check(figures, _BLOCK)


@pytest.mark.parametrize(("level", "template"), [("connector", "drop_thinking"), ("router", "plain")])
@pytest.mark.parametrize("path", files("data/agents/*.json"))
def test_the_same_of_recorded_agents(path: Path, level: Proof, template: str) -> None:
    setup = replace(_SETUP, template=template, proof=level, p=LEVELS[level])
    figures = asyncio.run(play(from_file(path), setup))
    assert len(figures) >= 2
    check(figures, _BLOCK)
