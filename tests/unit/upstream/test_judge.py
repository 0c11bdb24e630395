import pytest

from kvreturn.core.cost import CostModel
from kvreturn.core.handle import Handle, read_handle
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Record
from kvreturn.settings.nodes import Breaker
from kvreturn.upstream.forms import Forms
from kvreturn.upstream.judge import NodeJudge
from kvreturn.upstream.pool import Pool
from support.turns import D1, D2, compact, d_handle


class Clock:
    """Time stands still until it is told to go on."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def judge(clock: Clock) -> NodeJudge:
    return NodeJudge(Pool([D1], clock), Forms(), CostModel(), Breaker(failures=5, window=60.0), clock)


def of(engine: str = "e1") -> Handle:
    return read_handle(compact(d_handle(remote_engine_id=engine)))


def objection(judge: NodeJudge, engine: str = "e1", node: str | None = D1) -> Outcome | None:
    return judge.objection(Record(450.0, of(engine).raw, None, node), of(engine))


def fail(judge: NodeJudge, clock: Clock, *, times: int, every: float = 1.0, engine: str = "e1") -> None:
    for i in range(times):
        clock.now += every if i else 0.0
        judge.read_failed(of(engine))


def test_nothing_speaks_against_a_handle_of_a_node_in_the_pool(judge: NodeJudge) -> None:
    assert objection(judge) is None
    assert objection(judge, node=None) is None


def test_a_handle_of_a_node_that_left_the_pool_is_not_used(judge: NodeJudge) -> None:
    assert objection(judge, node=D2) == Outcome.NODE_GONE


def test_a_node_that_cannot_be_reached_just_now_has_not_left(clock: Clock) -> None:
    pool = Pool([D1], clock)
    pool.unreachable(D1)
    assert objection(NodeJudge(pool, Forms(), CostModel(), Breaker(failures=5, window=60.0), clock)) is None


def test_fr83_after_5_failures_within_60_s_the_6th_request_goes_cold(judge: NodeJudge, clock: Clock) -> None:
    for _ in range(5):
        assert objection(judge) is None
        judge.read_failed(of())
        clock.now += 10
    assert objection(judge) == Outcome.BREAKER_OPEN
    assert judge.open_breakers() == ["e1"]


def test_other_engines_are_not_affected(judge: NodeJudge, clock: Clock) -> None:
    fail(judge, clock, times=5)
    assert objection(judge, "e2") is None


def test_failures_that_are_too_far_apart_do_not_count_together(judge: NodeJudge, clock: Clock) -> None:
    fail(judge, clock, times=20, every=15.0)
    assert objection(judge) is None
    assert judge.open_breakers() == []


@pytest.mark.parametrize("every", [0.0, 1.0, 14.9])
def test_it_stays_open_for_the_whole_window(judge: NodeJudge, clock: Clock, every: float) -> None:
    fail(judge, clock, times=5, every=every)
    clock.now += 59.9
    assert objection(judge) == Outcome.BREAKER_OPEN
    clock.now += 0.1
    assert objection(judge) is None
    # Then it takes as many failures again.
    judge.read_failed(of())
    assert objection(judge) is None
    fail(judge, clock, times=4)
    assert objection(judge) == Outcome.BREAKER_OPEN


def test_a_success_starts_the_count_anew(judge: NodeJudge, clock: Clock) -> None:
    fail(judge, clock, times=4)
    judge.read_succeeded(of())
    fail(judge, clock, times=4)
    assert objection(judge) is None
    judge.read_failed(of())
    assert objection(judge) == Outcome.BREAKER_OPEN
    judge.read_succeeded(of("e2"))
    assert objection(judge) == Outcome.BREAKER_OPEN


def test_one_failure_may_be_enough(clock: Clock) -> None:
    judge = NodeJudge(Pool([D1], clock), Forms(), CostModel(), Breaker(failures=1, window=10.0), clock)
    judge.read_failed(of())
    assert objection(judge) == Outcome.BREAKER_OPEN
    clock.now += 10
    assert objection(judge) is None


def test_engines_that_come_and_go_do_not_pile_up(judge: NodeJudge, clock: Clock) -> None:
    fail(judge, clock, times=4)
    for i in range(1023):
        judge.read_failed(of(f"other-{i}"))
    judge.read_failed(of())
    for i in range(1000):
        judge.read_failed(of(f"another-{i}"))
    assert len(judge._failed) == 1024
    assert objection(judge) == Outcome.BREAKER_OPEN  # those that failed last are remembered


def test_handles_of_an_engine_that_was_replaced_are_dead_at_once(judge: NodeJudge) -> None:
    assert judge.decoded(D1, "e1") == D1
    assert objection(judge) is None
    judge.decoded(D1, "e2")
    assert objection(judge) == Outcome.NODE_GONE
    assert objection(judge, "e2") is None
