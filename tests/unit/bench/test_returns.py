"""`return: auto` in a closed loop, in virtual time: a node for 4 conversations, up to 16 agents. A small bench/returns.py."""

import asyncio
import json
from dataclasses import replace

import pytest

import returns
from closed_loop import plots, tables, virtual
from closed_loop.running import Run, play
from closed_loop.scenarios import SCENARIOS, WAYS, Phase, Scenario

RETURNING = WAYS[1:]
LITTLE = replace(SCENARIOS["A"], prefill_room=24, decode_room=4, phases=(Phase("all", 60.0, 14),), warm_up=40.0)
SMALL = replace(
    SCENARIOS["B"],
    prefill_room=4,
    decode_room=32,
    phases=(Phase("small", 60.0, 16), Phase("eased", 100.0, 2), Phase("small again", 60.0, 16)),
    warm_up=40.0,
)


def runs(scenario: Scenario) -> dict[str, list[Run]]:
    return {way.name: [play(scenario, way, 0)] for way in RETURNING}


def test_auto_serves_as_many_turns_as_the_better_one() -> None:
    little, small = runs(LITTLE), runs(SMALL)
    for found in (little, small):
        for phase, part in enumerate(found["auto"][0].parts):
            assert tables.ratios(found, phase)[0] >= tables.ALLOWED, part
            assert not part.failures
    print(little,small)
