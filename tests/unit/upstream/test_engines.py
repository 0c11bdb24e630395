import pytest

from kvreturn.upstream.engines import Engines, rank_of
from support.harness import Clock

NODE = "10.0.0.1:8000"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engines(clock: Clock) -> Engines:
    return Engines(clock)


def test_an_engine_that_was_replaced_is_gone(engines: Engines) -> None:
    assert not engines.gone(NODE, "a")
    engines.saw(NODE, "a")
    assert not engines.gone(NODE, "a")
    engines.saw(NODE, "b")
    assert engines.gone(NODE, "a")
    assert not engines.gone(NODE, "b")
    assert not engines.gone("10.0.0.2:8000", "a")
    assert engines.of(NODE) == ["b"]


def test_one_that_only_another_router_saw_is_gone_if_it_answered_before_the_present_one_came(
    engines: Engines, clock: Clock
) -> None:
    engines.saw(NODE, "b")
    clock.now += 10.0
    assert engines.gone(NODE, "a", age=10.5)
    assert not engines.gone(NODE, "c", age=9.5)  # it may have come since
    assert not engines.gone(NODE, "c")


def test_ranks_of_one_process_live_and_die_together(engines: Engines) -> None:
    for engine in ("a_dp0", "a_dp1"):
        engines.saw(f"{NODE}#{rank_of(engine)}", engine)
    assert not engines.gone(f"{NODE}#0", "a_dp0")
    assert engines.of(NODE) == ["a_dp0", "a_dp1"]
    engines.saw(f"{NODE}#1", "b_dp1")
    assert engines.gone(f"{NODE}#0", "a_dp0")
    assert not engines.gone(f"{NODE}#0", "b_dp0", age=0.0)


def test_behind_a_load_balancer_engines_take_turns_and_none_is_judged(engines: Engines) -> None:
    for engine in ("a", "b", "a"):
        engines.saw(NODE, engine)
    assert not engines.gone(NODE, "a")
    assert not engines.gone(NODE, "b")


@pytest.mark.parametrize(("engine", "rank"), [("u-u_dp0", 0), ("u_dp12", 12), ("u", None), ("u_dp", None), ("", None)])
def test_the_rank_that_an_id_tells(engine: str, rank: int | None) -> None:
    assert rank_of(engine) == rank
