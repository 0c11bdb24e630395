"""Conversations that no id names."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvreturn.analyze.observation import Answered, Link, Observation, Sizes
from kvreturn.analyze.sessions import Linker, pack, unpack
from support import corpus
from support.logs import Message, analysis, logged, result

ASK: Message = {"role": "user", "content": "ask"}
TOLD: Message = {"role": "assistant", "content": "told"}
MORE: Message = {"role": "user", "content": "more"}
OTHER: Message = {"role": "user", "content": "other"}


@pytest.mark.parametrize(
    "observation",
    [
        Observation(1.5, Sizes(7, 6, 5, 4, estimated=True), None, [b"d" * 16, b"e" * 16], b"a" * 16, None),
        Observation(0.0, Sizes(0, 0), None, [], None, b"c" * 16),
    ],
)
def test_an_observation_survives_the_way_through_a_file(observation: Observation) -> None:
    assert unpack(pack(observation, 3)) == (observation, 3)


def test_packed_observations_sort_by_time() -> None:
    times = [0.0, 1e-9, 0.5, 1.0, 255.0, 256.0, 1.7e9]
    packed = [pack(Observation(ts, Sizes(1, 1)), place) for place, ts in enumerate(reversed(times))]
    assert [unpack(record)[0].ts for record in sorted(packed)] == times


@pytest.mark.parametrize("pattern", corpus.files("data/agents/*.json"))
def test_the_turns_of_a_real_agent_are_found_to_be_one_conversation(pattern: Path) -> None:
    messages = json.loads(pattern.read_text())["messages"]
    ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    rows = [logged(10.0 * n, messages[:i], 100 * i, messages[i]) for n, i in enumerate(ends, 1)]
    got = result(rows)
    assert (got["turns"], got["conversations"], got["follow_up_turns"]) == (len(ends), 1, len(ends) - 1)
    before, after = ends[:-1], ends[1:]
    assert got["repeated_prompt_share"] == pytest.approx(sum(before) / sum(after))
    # The previous answer's 50 tokens come back too.
    assert got["repeated_share_with_answers"] == pytest.approx(sum(100 * i + 50 for i in before) / (100 * sum(after)))


def answered(rows: list[dict[str, Any]]) -> list[int]:
    """`repeated` and `repeated_with_answers`, in tokens."""
    sums = analysis(rows).tally.sums
    return [sums.follow_ups, sums.repeated, sums.repeated_with_answers]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([ASK, TOLD, MORE], [1, 100, 150]),  # the answer came back
        ([ASK, {**TOLD, "content": "changed"}, MORE], [1, 100, 100]),  # another one did
        ([ASK, MORE], [1, 100, 100]),  # none did
        ([ASK], [1, 100, 100]),  # asked again
        ([OTHER, TOLD, MORE], [0, 0, 0]),  # another conversation
        ([{"role": "system", "content": "new"}, ASK, TOLD, MORE], [0, 0, 0]),  # another prompt from its start
    ],
)
def test_a_turn_follows_the_one_whose_messages_it_repeats(second: list[Message], expected: list[int]) -> None:
    assert answered([logged(1, [ASK], 100, TOLD), logged(2, second, 200, TOLD)]) == expected


def test_of_two_branches_the_first_follows_and_the_second_begins_a_conversation() -> None:
    got = result([logged(1, [ASK], 100), logged(2, [ASK, TOLD, MORE], 200), logged(3, [ASK, TOLD, OTHER], 200)])
    assert (got["conversations"], got["follow_up_turns"]) == (2, 1)


def test_another_model_is_another_conversation() -> None:
    first, second = logged(1, [ASK], 100), logged(2, [ASK, TOLD, MORE], 200)
    second["request"]["model"] = "another"
    assert result([first, second])["follow_up_turns"] == 0


def test_the_nearest_of_several_turns_before_is_followed() -> None:
    rows = [logged(1, [ASK], 100), logged(2, [ASK, TOLD, MORE], 200), logged(9, [ASK, TOLD, MORE, TOLD, OTHER], 300)]
    assert answered(rows) == [2, 100 + 200, 100 + 200]


def test_completions_are_found_by_whole_pieces_of_256_bytes() -> None:
    rows = [
        {"ts": n, "prompt": "x" * size, "usage": {"prompt_tokens": size // 4}} for n, size in enumerate([600, 1_000])
    ]
    assert answered(rows) == [1, 128, 128]  # two pieces of 64 tokens


def test_a_trace_is_found_by_whole_blocks_and_not_by_the_first_one_alone() -> None:
    def row(ts: int, length: int, *ids: int) -> dict[str, Any]:
        return {"timestamp": ts, "input_length": length, "output_length": 10, "hash_ids": ids}

    rows = [row(0, 600, 0, 1), row(1_000, 1_100, 0, 2, 3), row(2_000, 1_700, 0, 2, 4, 5), row(3_000, 1_400, 0, 6, 7)]
    got = analysis(rows).tally
    assert (got.sums.follow_ups, got.sums.repeated, got.sums.repeated_with_answers) == (1, 1_024, 1_034)
    assert got.seconds == 3  # milliseconds in the trace


def test_clients_are_followed_by_growing_bodies_and_everything_is_called_a_guess() -> None:
    def row(second: int, size: int, agent: str) -> str:
        return (
            f'[2026-01-01T12:00:{second:02}.000Z] "POST /v1/chat/completions HTTP/1.1" 200 - {size} 9 9 9 "10.0.0.1" '
            f'"{agent}" "-" "-" "-"'
        )

    # Two conversations of `a`, in turns, and one of `b`.
    rows = [row(1, 4_000, "a"), row(2, 400, "a"), row(3, 4_400, "a"), row(4, 800, "a"), row(5, 9_000, "b")]
    got = result(rows)
    assert (got["turns"], got["conversations"], got["follow_up_turns"]) == (5, 3, 2)
    assert got["repeated_prompt_share"] == pytest.approx((100 + 1_000) / (200 + 1_100))
    assert got["about"]["repeated_prompt_share"]["kind"] == "guess"
    assert got["verdict"].startswith("Perhaps ")


def test_memory_is_bounded_by_forgetting_the_oldest_turns_and_that_is_counted() -> None:
    digests = [bytes([n]) * 16 for n in range(1, 6)]
    packed = [pack(Observation(float(n), Sizes(1, 1), None, [d]), n) for n, d in enumerate(digests)]
    again = pack(Observation(9.0, Sizes(2, 2), None, [digests[0], b"n" * 16]), 9)
    recent = pack(Observation(9.0, Sizes(2, 2), None, [digests[4], b"m" * 16]), 10)
    linker = Linker(max_turns=2)
    turns = list(linker.link([*packed, again, recent]))
    assert linker.forgotten == 4
    assert len({t.session for t in turns}) == 6  # only the last one follows
    assert turns[-1].session == turns[4].session
    assert {(t.link, t.answered) for t in turns} == {(Link.FOUND, Answered.UNKNOWN)}
    assert len(linker._by_key) == len(linker._open) == 2
