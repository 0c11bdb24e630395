"""Numbers about samples, worked out by hand."""

import pytest

from kvreturn.bench.stats import COLUMNS, compare, describe, tables
from kvreturn.bench.summary import summarize
from support.bench import run, sample


def test_a_row_is_what_pandas_describes() -> None:
    # What describe() of a Series of 4, 1, 3, 2 says with these percentiles.
    row = describe([4, 1, 3, 2])
    assert tuple(row) == COLUMNS
    assert row == pytest.approx(
        {"count": 4, "mean": 2.5, "std": 1.2909944, "min": 1, "25%": 1.75, "50%": 2.5}
        | {"75%": 3.25, "90%": 3.7, "99%": 3.97, "max": 4}
    )
    assert describe([5])["std"] == 0
    assert tables([]) == {}


def test_follow_up_turns_have_a_row_of_their_own() -> None:
    rows = tables([sample("on", 0, 900.0), sample("on", 1, 100.0), sample("on", 2, 200.0)])
    assert (rows["ttft_ms"]["max"], rows["follow_up_ttft_ms"]["max"], rows["follow_up_ttft_ms"]["count"]) == (
        900,
        200,
        2,
    )


def test_legs_are_compared_turn_by_turn_without_the_first_ones() -> None:
    # `off` has no third turn in the second round, so that of `on` has no pair.
    compared = compare(
        run([{"off": [500, 300, 400, 500], "on": [500, 100, 100, 250]}, {"off": [500, 200], "on": [500, 100, 50]}])
    )
    assert compared
    assert len(compared.pairs) == 4
    assert (compared.off_ms, compared.on_ms) == (350, 100)
    assert compared.ratio == 3.5
    assert compared.by_round == [4.0, 2.0]
    assert compared.saved_ms == (200 + 300 + 250 + 100) / 4
    assert compared.equal == 1.0


@pytest.mark.parametrize(
    ("on", "told"),
    [
        (100.0, "4.00 times shorter: 100 ms instead of 400"),
        (390.0, "about the same: 390 ms instead of 400"),
        (800.0, "2.00 times longer: 800 ms instead of 400"),
    ],
)
def test_the_verdict_says_what_came_out(on: float, told: str) -> None:
    verdict = summarize(run([{"off": [1, 400], "on": [1, on]}]), {}, simulated=False).verdict
    assert told in verdict
    assert f"{abs(400 - on):.0f} ms {'saved' if on < 400 else 'lost'} per turn" in verdict


def test_without_a_follow_up_turn_in_both_legs_there_is_nothing_to_compare() -> None:
    only_first = run([{"off": [400, 500], "on": [400]}])
    assert compare(only_first) is None
    summary = summarize(only_first, {}, simulated=False)
    assert summary.void
    assert summary.verdict.startswith("Nothing to compare: No follow-up turn")
    assert summary.as_json()["comparison"] is None
