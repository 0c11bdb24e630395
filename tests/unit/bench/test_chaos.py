"""A chaos run's judgement: each promise that does not hold is named."""

from collections import Counter
from dataclasses import replace

import pytest

from faults.events import Told
from faults.load import Sent
from faults.run import Act, Phase
from faults.verdict import broken, numbers, table


def answered(begun: float, ttft: float = 50.0, *, wrong: bool = False) -> Sent:
    return Sent(1, 1, begun, begun + 1, ttft, wrong=wrong)


def failed(begun: float) -> Sent:
    return Sent(2, 1, begun, begun + 0.5, error="InternalServerError 500")


def phase(name: str, begun: float, *sent: Sent, hits: int = 100, misses: int = 0) -> Phase:
    outcomes = Counter(hit=hits, not_a_continuation=misses, first_turn=10, slower=5)
    return Phase(name, begun, begun + 10, [answered(begun + 1), answered(begun + 2), *sent], outcomes)


BEFORE, AFTER = phase("before", 0), phase("after", 20)
KILLED = Told("kill -9", cut=15.0, lost=2, refused=1)
PAUSED = Told("SIGSTOP", window=(10.0, 20.0))


@pytest.mark.parametrize(
    ("told", "sent", "after", "said"),
    [
        (KILLED, [failed(14.9), failed(14), failed(15.1)], AFTER, []),
        (KILLED, [failed(14), failed(14), failed(14)], AFTER, ["event: 3 streams were lost, only 2 were on what was"]),
        (KILLED, [failed(16), failed(16)], AFTER, ["event: 2 other turns failed, at most 1 should"]),
        (Told("SIGTERM"), [failed(14)], AFTER, ["event: 1 other turns failed, at most 0 should"]),
        (KILLED, [answered(16, wrong=True)], AFTER, ["event: 1 wrong answers"]),
        (KILLED, [], phase("after", 20, hits=95, misses=5), []),
        (KILLED, [], phase("after", 20, hits=94, misses=6), ["event: reuse is 94% after it, was 100% before"]),
        (KILLED, [], phase("after", 20, hits=0), ["event: reuse is -% after it, was 100% before"]),
        (KILLED, [], phase("after", 20, failed(25)), ["after: 1 turns failed while nothing was wrong"]),
        (PAUSED, [answered(12, 400)], AFTER, []),
        (PAUSED, [answered(12, 500)], AFTER, ["event: time to first token (p99) grew by"]),
    ],
)
def test_what_does_not_hold_is_named(told: Told, sent: list[Sent], after: Phase, said: list[str]) -> None:
    during = phase("event", 10, *sent)
    act = Act("event", told, BEFORE, during, after)
    found = broken([BEFORE, during, after], [act])
    assert len(found) == len(said)
    assert all(one.startswith(start) for one, start in zip(found, said, strict=True)), found


def test_a_cold_turn_in_a_pause_is_not_held_against_the_router() -> None:
    """800 tokens that P has to compute anew take it 100 ms."""
    cold = replace(answered(12, 500), known=800)
    act = Act("event", PAUSED, BEFORE, phase("event", 10, cold), AFTER)
    assert broken([act.during], [act]) == []


def test_the_table_and_the_numbers_tell_of_every_event() -> None:
    during = phase("event", 10, failed(14), hits=50, misses=50)
    act = Act("event", KILLED, BEFORE, during, AFTER)
    assert [line.split()[:10] for line in table([act]).splitlines()[1:]] == [
        ["event", "3", "1", "0", "1", "2", "0", "100", "50", "100"]
    ]
    told = numbers([BEFORE, during, AFTER], [act])
    assert (told["turns"], told["wrong"], told["promises_broken"]) == (7, 0, [])
    assert told["events"][0]["reuse_percent"] == [100, 50, 100]
