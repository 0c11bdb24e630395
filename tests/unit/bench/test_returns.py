"""bench/returns.py in small: nodes for 4 or 6 conversations, up to 24 agents, a minute of virtual time to a phase."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from closed_loop import plots, tables, virtual
from closed_loop.running import Part, Run, play
from closed_loop.scenarios import SCENARIOS, WAYS, Phase

_, LAZY, EAGER, AUTO = WAYS
LITTLE_D = replace(SCENARIOS["A"], prefill_room=24, decode_room=4, phases=(Phase("all", 40.0, 14),))
LITTLE_P = replace(
    SCENARIOS["B"],
    prefill_room=6,
    phases=(Phase("small", 30.0, 24), Phase("eased", 100.0, 3), Phase("small again", 40.0, 24)),
)


def share(part: Part, why: str) -> float:
    return part.choices[why] / part.choices.total()


def between(run: Run, begin: float, end: float) -> Counter[str]:
    """Choices in a part of a run, in seconds from the start of the first phase."""
    at = dict(run.timeline)
    return at[end] - at[begin]


@pytest.mark.slow
def test_with_little_room_on_d_auto_is_eager_and_serves_as_many_turns() -> None:
    lazy, eager, auto = (play(LITTLE_D, way, 0).parts[0] for way in (LAZY, EAGER, AUTO))
    assert eager.rate > 1.1 * lazy.rate  # else there is nothing to choose
    assert auto.rate >= 0.9 * eager.rate
    assert share(auto, "eager decode_pressure") > 0.5
    assert not auto.failures


@pytest.mark.slow
def test_with_little_room_on_p_auto_turns_lazy_and_back_and_lazy_again(tmp_path: Path) -> None:
    runs = {way.name: [play(LITTLE_P, way, 0)] for way in (LAZY, AUTO)}
    for lazy, auto in zip(runs["lazy"][0].parts, runs["auto"][0].parts, strict=True):
        assert auto.rate >= 0.9 * lazy.rate
        assert not auto.failures
    run = runs["auto"][0]
    assert share(run.parts[0], "lazy evicted") > 0.5
    eased = between(run, 100.0, 130.0)
    assert sum(n for choice, n in eased.items() if choice.startswith("eager")) > 0.6 * eased.total()
    assert run.parts[2].choices["lazy evicted"] > 10
    assert json.dumps(tables.numbers(runs))
    assert tables.of_choices(runs)[2].startswith("| small | ")
    plots.choices(LITTLE_P, run, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_virtual_time_jumps_and_timeouts_are_over_when_it_has() -> None:
    async def wait() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3_600):
                await asyncio.sleep(7_200)
        return asyncio.get_running_loop().time() + await asyncio.to_thread(float, 1)

    assert virtual.run(wait()) == 3_601


def test_virtual_time_does_not_wait_for_what_never_comes() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="everybody waits"):
        virtual.run(wait())
