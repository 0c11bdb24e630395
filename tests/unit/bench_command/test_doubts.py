"""What makes the numbers of a run meaningless is told."""

from dataclasses import replace

import pytest

from kvreturn.bench.counters import Look
from kvreturn.bench.doubts import doubts
from kvreturn.bench.run import Played, Run
from kvreturn.bench.sample import Failure, LegName
from support.bench import look, run, sample

GOOD: dict[LegName, list[float]] = {"off": [500.0] + [400.0] * 40, "on": [500.0] + [100.0] * 40}
HITS = {"first_turn": 1, "hit": 40}
OFF = {"disabled": 41}
CACHED = look(OFF, caching=True, local=100)


def told(played: Run, *, simulated: bool = False) -> list[tuple[str, str]]:
    return [(d.level, d.text) for d in doubts(played, simulated=simulated)]


def with_looks(off: Look = CACHED, on: Look | None = None) -> Run:
    return run([GOOD], {"off": off, "on": on or look(HITS, caching=True, read=600)})


def test_a_good_run_raises_none() -> None:
    assert told(with_looks()) == []


@pytest.mark.parametrize(
    ("played", "level", "text"),
    [
        (with_looks(on=look({"first_turn": 1, "unproven": 39, "expired": 1})), "void", "39 unproven (P cannot prove"),
        (with_looks(on=look({"disabled": 41})), "void", "41 disabled (read-back is off for this model"),
        (with_looks(on=look({"first_turn": 1, "hit": 10, "expired": 30})), "doubt", "Only 25% of the follow-up turns"),
        (
            with_looks(off=look({"hit": 40, "first_turn": 1})),
            "void",
            "not off: 41 of its 41 turns were looked up (40 hit, 1",
        ),
        (with_looks(on=look(HITS, bytes=1e9, seconds=4.0)), "doubt", "P read at 0.25 GB/s, as over TCP"),
        (with_looks(on=look(HITS, failed=3)), "doubt", "3 NIXL transfers failed"),
        (with_looks(off=look(OFF)), "note", "P has no prefix cache"),
        (with_looks(off=look(OFF, caching=True, local=800)), "doubt", "P's own prefix cache had 80% of the prompts"),
        (with_looks(off=look(OFF, caching=None)), "note", "No prefill node was asked"),
        (with_looks(on=replace(look({}), routers=False)), "doubt", "No router was asked"),
        (with_looks(on=look({"first_turn": 1, "hit": 50})), "doubt", "others use them too"),
        (with_looks(on=look({"hit": 20})), "doubt", "give the metrics of all of them"),
        (run([{"off": [9.0, 400.0], "on": [9.0, 100.0]}]), "doubt", "Only 1 follow-up turns are compared"),
        (run([{"off": [9.0], "on": [9.0]}]), "void", "No follow-up turn was answered"),
        (run([GOOD, {**GOOD, "on": [500.0] + [150.0] * 40}]), "doubt", "off/on is 2.67 in one and 4.00 in another"),
    ],
)
def test_what_is_wrong_is_told(played: Run, level: str, text: str) -> None:
    assert any(level == found and text in words for found, words in told(played)), told(played)


def test_reads_within_what_rdma_brings_and_small_ones_are_no_tcp() -> None:
    for bytes_, seconds in ((1e9, 0.1), (1e6, 1.0)):
        assert told(with_looks(on=look(HITS, read=600, bytes=bytes_, seconds=seconds))) == []


def with_change(leg: LegName, **changes: object) -> Run:
    played = with_looks()
    played.played = [replace(p, **changes) if p.leg == leg else p for p in played.played]  # type: ignore[arg-type]
    return played


def test_a_late_process_failures_and_other_answers_are_told() -> None:
    assert any("92 ms late" in text for _, text in told(with_change("on", lag=0.092)))
    failure = Failure("on", 0, 3, "c-0", "HTTP 503: no healthy upstream")
    assert any(
        "1 of 42 turns of the leg `on` failed: HTTP 503" in t for _, t in told(with_change("on", failures=[failure]))
    )
    others = [sample("on", t, 100.0, text="other", tokens=9) for t in range(41)]
    texts = [text for _, text in told(with_change("on", samples=others))]
    assert any("0% of the answers are the same" in text for text in texts)
    assert any("answers differ in length (320 and 360 tokens)" in text for text in texts)


def test_stopped_and_simulated_runs_say_so() -> None:
    played = with_looks()
    played.stopped = True
    assert [level for level, _ in told(played, simulated=True)] == ["doubt", "note"]


def test_the_worst_comes_first() -> None:
    played = Run(played=[Played(leg, 0, [], [], 0.0, look({}), 0.0) for leg in ("off", "on")])
    assert told(played, simulated=True)[0][0] == "void"
