"""Distributions of turns, tokens and gaps."""

import random
import statistics

import pytest

from kvreturn.bench.spread import Spread


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        *(("7", 7), ("constant:7", 7), ("uniform:2:10", 6), ("lognormal:500", 500), ("lognormal:500:0.5", 500)),
        *(("exponential:3", 3), ("0", 0), ("exponential:0", 0)),
    ],
)
def test_draws_come_to_the_mean(text: str, mean: float) -> None:
    spread, rng = Spread.parse(text), random.Random(1)
    draws = [spread.draw(rng) for _ in range(20_000)]
    assert min(draws) >= 0
    assert statistics.fmean(draws) == pytest.approx(mean, rel=0.03)
    assert spread.mean == mean


def test_lognormal_has_the_median_that_is_given_as_a_share_of_the_mean() -> None:
    spread, rng = Spread.parse("lognormal:1000:0.6"), random.Random(1)
    assert statistics.median(spread.draw(rng) for _ in range(20_000)) == pytest.approx(600, rel=0.03)


@pytest.mark.parametrize(
    "text",
    ["", "x", "zipf:2", "uniform:1", "uniform:5:2", "lognormal:0", "lognormal:5:1", "1:2", "-3", "nan", "inf"],
)
def test_what_is_no_distribution_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"distribution|below|between") as error:
        Spread.parse(text)
    assert repr(text) in str(error.value)
