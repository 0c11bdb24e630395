"""What takes a node out of its pool, and what brings it back; time moves by hand."""

import logging
from collections.abc import Callable

import pytest

from kvreturn.upstream.node import NodeView, Reason
from kvreturn.upstream.pool import Pool
from support.harness import Clock

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> Pool:
    pool = Pool([A, B], clock, kind="decode", errors=3)
    for node in (A, B):
        pool.checked(node, well=True)
    pool.started(B, 1)  # so that A is chosen while it is well
    return pool


def state(pool: Pool) -> str:
    return pool.states()[A]


def fails(pool: Pool, times: int) -> None:
    for _ in range(times):
        pool.failed(A)


def health(pool: Pool, times: int) -> None:
    for _ in range(times):
        pool.checked(A, well=False)


@pytest.mark.parametrize(
    ("trouble", "counts", "reason"),
    [
        (lambda pool, times: [pool.unreachable(A) for _ in range(times)], (0, 1), "connect"),
        (fails, (2, 3), "errors"),
        (health, (1, 2), "health"),
    ],
)
def test_what_takes_a_node_out(
    pool: Pool,
    caplog: pytest.LogCaptureFixture,
    trouble: Callable[[Pool, int], object],
    counts: tuple[int, int],
    reason: Reason,
) -> None:
    few, enough = counts
    ejected: list[Reason] = []
    pool.ejected = ejected.append
    trouble(pool, few)
    assert (state(pool), pool.choose(), ejected) == ("up", A, [])
    trouble(pool, enough - few)
    assert (state(pool), pool.choose(), ejected) == ("out", B, [reason])
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith(f"decode node {A} is out: it ")


def test_answers_in_between_make_errors_and_misses_count_anew(pool: Pool) -> None:
    for _ in range(5):
        fails(pool, 2)
        pool.reachable(A)
        health(pool, 1)
        pool.checked(A, well=True)
    assert state(pool) == "up"


def test_after_its_time_out_a_check_decides_and_not_live_traffic(
    pool: Pool, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    pool.unreachable(A)
    clock.now += 0.99
    pool.checked(A, well=True)  # one that began before it failed tells nothing
    assert (state(pool), pool.choose()) == ("out", B)
    clock.now += 0.01
    assert (state(pool), pool.choose()) == ("probing", B)
    pool.checked(A, well=False)
    for seconds, before in ((2.0, "out"), (5.0, "out"), (10.0, "out"), (30.0, "out"), (30.0, "out")):
        assert state(pool) == before
        clock.now += seconds
        assert (state(pool), pool.choose()) == ("probing", B)
        pool.checked(A, well=False)
    clock.now += 30.0
    pool.checked(A, well=True)
    assert (state(pool), pool.choose()) == ("up", A)
    assert len(caplog.messages) == 2  # one line when it went, one when it came back
    assert caplog.messages[1] == f"decode node {A} is back"


def test_a_node_that_answers_checks_but_fails_requests_is_out_longer_each_time(pool: Pool, clock: Clock) -> None:
    for seconds in (1.0, 2.0, 5.0):
        fails(pool, 3)
        clock.now += seconds - 0.01
        assert state(pool) == "out"
        clock.now += 0.01
        pool.checked(A, well=True)
        assert state(pool) == "up"
    pool.reachable(A)
    fails(pool, 3)
    clock.now += 1.0
    assert state(pool) == "probing"


def test_checks_that_never_went_well_tell_nothing(clock: Clock) -> None:
    # A router need not be able to reach decode nodes.
    pool = Pool([A, B], clock)
    pool.started(B, 1)
    health(pool, 10)
    assert (state(pool), pool.choose(), pool.known(A)) == ("up", A, False)
    pool.unreachable(A)
    assert (state(pool), pool.choose()) == ("out", B)
    clock.now += 1.0
    assert (state(pool), pool.choose()) == ("up", A)  # the next request is the probe


def test_a_node_that_drains_gets_nothing_new_while_there_is_another(pool: Pool, clock: Clock) -> None:
    changes: list[str] = []
    pool.changed.append(lambda: changes.append(state(pool)))
    assert pool.drain(A)
    assert pool.drain(A)
    assert not pool.drain("10.9.9.9:1")
    assert (state(pool), pool.choose(prefer=A, slack=100), A in pool) == ("draining", B, True)
    pool.unreachable(B)
    assert pool.choose() == A  # one that is out is worse
    clock.now += 1.0
    pool.checked(B, well=True)
    assert pool.choose(prefer=A) == A  # what only this one has
    assert pool.undrain(A)
    assert (state(pool), pool.choose()) == ("up", A)
    assert changes == ["draining", "up"]


def test_an_update_keeps_what_is_known_of_those_that_stay(pool: Pool) -> None:
    changes: list[dict[str, bool]] = []
    pool.changed.append(lambda: changes.append(pool.addresses()))
    new = "10.0.0.3:8000"
    pool.unreachable(A)
    pool.drain(B)
    pool.update([A, B])
    assert changes == [{A: False, B: True}]
    pool.update([A, new], terminating={new})
    assert pool.snapshot() == [NodeView(A, "out", 0, 1, (), (0,)), NodeView(new, "draining", 0, 0, (), (0,))]
    pool.finished(B, 1)  # its requests end after it has left
    pool.update([A, B, new])
    assert pool.addresses() == {A: False, B: False, new: False}
    assert pool.load(B) == 0
    assert len(changes) == 3
