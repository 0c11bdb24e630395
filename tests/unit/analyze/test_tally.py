"""Shares, gaps, savings and pins, worked out by hand or by plain loops over what fits into memory."""

import itertools
import struct
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.analyze.analysis import Options
from kvreturn.analyze.model import Rates
from kvreturn.analyze.observation import Answered, Link, Sizes, Turn, unpack_turn
from kvreturn.analyze.sorting import ExternalSort
from kvreturn.analyze.tally import Distribution
from support.logs import named, result

# 1,000 tokens/s, 1 ms to read a token of 1 MB at 1 GB/s would gain nothing: 100 kB gain 0.9 ms.
RATES = Rates(prefill=1_000, transfer=1e9, bytes_per_token=100_000, overhead=0.01, min_tokens=64)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2_000), st.integers(0, 5_000)),
        max_size=30,
    )
)
def test_shares_are_those_of_the_definition_in_whatever_order_lines_come(rows: list[tuple[int, int, int]]) -> None:
    conversations = defaultdict(list)
    for conversation, ts, prompt in rows:
        conversations[conversation].append((ts, prompt))
    pairs = [
        pair
        for turns in conversations.values()
        for ordered in [sorted(turns, key=lambda turn: turn[0])]
        for pair in itertools.pairwise(ordered)
    ]
    total = sum(this for _, (_, this) in pairs)
    got = result([named(*row) for row in rows])
    assert got["follow_up_turns"] == len(pairs)
    assert got["repeated_prompt_share"] == pytest.approx(
        sum(min(before, this) for (_, before), (_, this) in pairs) / total if total else 0
    )
    late = sum(later - earlier > 480 for (earlier, _), (later, _) in pairs)
    assert got["late_turn_share"] == pytest.approx(late / len(pairs) if pairs else 0)


ROWS = [
    # 100 s apart: repeats 1,000 of 1,500 tokens, or 1,100 with the answer, of which P has 200 itself.
    named("a", 0, 1_000, completion_tokens=100),
    named("a", 100, 1_500, cached_tokens=200),
    # 600 s apart: repeats 1,500 of 2,000, too late.
    named("a", 700, 2_000, cached_tokens=0),
    # Alone.
    named("b", 1_000, 3_000, cached_tokens=0),
]


def test_what_is_read_back_and_saved() -> None:
    got = result(ROWS, Options(rates=RATES))
    assert got["repeated_prompt_share"] == pytest.approx(2_500 / 3_500)
    assert got["repeated_share_with_answers"] == pytest.approx(2_600 / 3_500)
    assert got["repeated_share_of_all"] == pytest.approx(2_500 / 7_500)
    assert got["late_turn_share"] == 0.5
    assert (got["reuse_turns"], got["reuse_share"]) == (1, pytest.approx(900 / 7_500))
    # 900 tokens at 0.9 ms, less 10 ms; of 1 + 1.3 + 2 + 3 s.
    assert got["prefill_saved_share"] == pytest.approx(0.8 / 7.3)
    assert got["ttft_saving_mean_ms"] == pytest.approx(400)
    assert got["break_even_tokens"] == 64
    assert [got[f"prefill_{n}_p50_ms"] for n in ("off", "on")] == pytest.approx([1_300, 500], rel=0.011)
    assert [got[f"prefill_{n}_p90_ms"] for n in ("off", "on")] == pytest.approx([2_000, 2_000], rel=0.011)
    assert (got["level"], got["notes"]) == ("marginal", [])


def test_cached_tokens_may_be_left_aside() -> None:
    got = result(ROWS, Options(rates=RATES, use_cached=False))
    assert got["reuse_share"] == pytest.approx(1_100 / 7_500)
    assert got["prefill_saved_share"] == pytest.approx((1.1 * 0.9 - 0.01) / 7.5)


def test_each_ttl_covers_turns_and_tokens_and_holds_memory() -> None:
    got = {row["ttl_s"]: row for row in result(ROWS, Options(rates=RATES))["ttls"]}
    assert list(got) == [30, 60, 120, 240, 480, 900, 1_800, 3_600]
    assert [got[t]["covered_turn_share"] for t in (60, 120, 480, 900)] == [0, 0.5, 0.5, 1]
    assert [got[t]["covered_token_share"] for t in (60, 480, 900)] == [0, pytest.approx(1_000 / 2_500), 1]
    # Token seconds over 1,000 s at 100 kB a token. D holds 1,100 tokens of `a` for 100 s, then 1,500 for 600 s, then
    # 2,000 up to the end of the log, which is when `b` comes.
    expected = {60: 60 * (1_100 + 1_500 + 2_000), 480: 110_000 + 480 * 1_500 + 300 * 2_000}
    expected[900] = 110_000 + 600 * 1_500 + 300 * 2_000
    for ttl, token_seconds in expected.items():
        assert got[ttl]["pinned_mean_gb"] == pytest.approx(token_seconds / 1_000 * 1e5 / 1e9)


def test_the_most_that_d_holds_at_a_time() -> None:
    rows = [named("a", 0, 1_000), named("b", 100, 2_000), named("a", 200, 1_000), named("c", 1_000, 4_000)]
    got = result(rows, Options(ttl=480, rates=RATES))
    assert got["pinned_peak_gb"] == pytest.approx(4_000 * 1e5 / 1e9)  # `c`: the others' are gone
    assert result(rows[:3], Options(rates=RATES))["pinned_peak_gb"] == pytest.approx(
        4_000 * 1e5 / 1e9
    )  # while a's change


@pytest.mark.parametrize(
    ("rates", "tokens"),
    [
        (RATES, 64),
        (Rates(1_000, 1e9, 100_000, 0.9, 64), 1_000),  # 0.9 s a read, 0.9 ms a token
        (Rates(1_000, 1e9, 1_000_000, 0.01, 64), None),  # a link as slow as the computation
    ],
)
def test_break_even(rates: Rates, tokens: float | None) -> None:
    assert rates.break_even == (None if tokens is None else pytest.approx(tokens))
    if tokens is not None and tokens > rates.min_tokens:
        assert rates.saving(int(tokens)) == pytest.approx(0)


def test_below_the_threshold_nothing_is_read() -> None:
    assert [RATES.saving(63), RATES.saving(64)] == [0, pytest.approx(64 * 0.0009 - 0.01)]


@pytest.mark.parametrize(
    ("rows", "options", "level", "words"),
    [
        ([], Options(), "nothing to tell", "no line of the input"),
        ([named(n, n, 100) for n in range(5)], Options(), "not worth it", "none of the 5 turns follows"),
        ([named("a", 0, 5_000), named("a", 10, 6_000)], Options(), "worth it", "83% of the prompt tokens"),
        (
            [named("a", 0, 5_000), named("a", 999, 6_000)],
            Options(),
            "not worth it",
            "0% of these turns come within 480 s",
        ),
        (
            [named("a", 0, 5_000), named("a", 10, 6_000)],
            Options(rates=Rates(transfer=1e9)),
            "not worth it",
            "P computes a token sooner",
        ),
        # D holds 5,000 tokens of 131,072 bytes all the time: 0.66 GB.
        (
            [named("a", 0, 5_000), named("a", 10, 6_000)],
            Options(decode_bytes=1.2e9),
            "not worth it",
            "it would need more decode nodes",
        ),
        ([named("a", 0, 5_000), named("a", 10, 6_000)], Options(decode_bytes=1.4e9), "worth it", "0.66 GB"),
        (
            [named("a", 0, 5_000), named("a", 10, 6_000), named("b", 1_000, 9)],
            # Half of it holds 801 tokens. At 120 s: 5,000 for 10 s and 6,000 for 120 s, of 1,000 s: 770.
            Options(decode_bytes=0.21e9),
            "not worth it",
            "set decoder_kv_blocks_ttl to 120 s",
        ),
    ],
)
def test_the_verdict(rows: list[dict[str, Any]], options: Options, level: str, words: str) -> None:
    got = result(rows, options)
    assert got["level"] == level
    assert words in got["verdict"]


def test_kvreturns_own_log_answers_by_what_it_measured() -> None:
    def row(outcome: str, prompt: str, read: str, local: str) -> str:
        return f"outcome={outcome} api=chat model=m status=200 prompt={prompt} read={read} local={local} prefill_ms=1.0"

    got = result(
        [
            row("first_turn", "1000", "-", "100"),
            row("hit", "2000", "900", "100"),
            row("expired", "2000", "-", "500"),
            row("hit", "1000", "500", "0"),
            row("prefill_failed", "-", "-", "-"),
            row("cancelled", "-", "-", "-"),
        ]
    )
    assert (got["turns"], got["follow_up_turns"]) == (6, 4)
    assert got["repeated_prompt_share"] == pytest.approx((900 + 100 + 500 + 500) / 5_000)
    assert got["read_back_share"] == pytest.approx(1_400 / 5_000)
    assert got["late_turn_share"] == 0.25
    assert got["outcomes"] == {"hit": 2, "first_turn": 1, "expired": 1, "prefill_failed": 1, "cancelled": 1}
    assert got["verdict"] == "Worth it: P read back 28% of the prompt tokens of follow-up turns (measured)."


@pytest.mark.parametrize(
    ("outcomes", "follow_ups", "level", "words"),
    [
        (["disabled"] * 3 + ["hit"], 1, "worth it", "P read back 100%"),
        (["disabled"] * 3, 0, "nothing to tell", "read-back was off for 3 of 3 turns"),
        (["first_turn", "below_threshold", "decode_alone"], 0, "nothing to tell", "none of the 3 turns could have"),
    ],
)
def test_turns_that_could_not_have_been_read_back_are_no_follow_ups(
    outcomes: list[str], follow_ups: int, level: str, words: str
) -> None:
    got = result([f"outcome={o} api=chat prompt=1000 read={1000 * (o == 'hit')} local=0" for o in outcomes])
    assert (got["follow_up_turns"], got["level"], got["turns"]) == (follow_ups, level, len(outcomes))
    assert words in got["verdict"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([named("a", 0, 9), named("a", 1_000, 9)], "no `cached_tokens`"),
        ([named("a", 0, 100, cached_tokens=100), named("a", 999, 100, cached_tokens=100)], "--ignore-cached"),
        ([named("a", 0, 9), named("a", 0, 9), named("a", 999, 9)], "1 turns have time and tokens of the turn before"),
        ([named("a", 0, 9), named("a", 10, 9)], "The log spans 10 s, less than the TTL"),
        ([named("a", 0, 9), "outcome=hit api=chat"], "Outcomes are those of the turn log"),
        ([{"ts": 1, "messages": [{"role": "user", "content": "hi"}]}], "1 turns have no token count"),
    ],
)
def test_what_makes_figures_doubtful_is_said(rows: list[Any], words: str) -> None:
    assert any(words in note for note in result(rows)["notes"])


def test_every_figure_says_what_it_is_and_what_it_rests_on() -> None:
    got = result(ROWS)
    numbers = {k for k, v in got.items() if isinstance(v, int | float)}
    assert numbers <= set(got["about"])
    assert all(a["kind"] and a["basis"] for a in got["about"].values())


# --- the parts ---


@given(st.lists(st.binary(max_size=40)), st.integers(1, 600))
def test_an_external_sort_is_a_sort(records: list[bytes], budget: int) -> None:
    with ExternalSort(budget) as sort:
        for record in records:
            sort.add(record)
        assert list(sort.drain()) == sorted(records)


def test_an_external_sort_of_many_runs_holds_few_files() -> None:
    records = [struct.pack(">I", n * 7919 % 1_000) for n in range(1_000)]
    with ExternalSort(1) as sort:
        for record in records:
            sort.add(record)
        assert len(sort._runs) < 64
        assert list(sort.drain()) == sorted(records)


@given(
    st.builds(
        Turn,
        st.binary(min_size=8, max_size=8),
        st.floats(0, 1e12),
        st.integers(0, 2**63),
        st.builds(
            Sizes,
            *(st.integers(0, 2**31 - 1) for _ in range(2)),
            *(st.none() | st.integers(0, 2**31 - 1) for _ in range(2)),
            st.booleans(),
        ),
        st.sampled_from(Link),
        st.sampled_from(Answered),
    )
)
def test_a_turn_survives_the_way_through_a_file(turn: Turn) -> None:
    assert unpack_turn(turn.pack()) == turn


@given(st.lists(st.floats(1e-3, 1e6), min_size=1), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentiles_are_exact_to_1_percent(values: list[float], share: float) -> None:
    distribution = Distribution()
    for value in values:
        distribution.add(value)
    exact = next(v for n, v in enumerate(sorted(values), 1) if n / len(values) >= share)
    assert distribution.percentile(share) == pytest.approx(exact, rel=0.0101)


def test_of_nothing_there_is_no_percentile() -> None:
    assert Distribution().percentile(0.5) is None
