import pytest

from kvreturn.upstream.pool import Pool

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


class Clock:
    """Time stands still until it is told to go on."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> Pool:
    return Pool([A, B, C], clock)


def test_an_empty_pool_has_no_node(clock: Clock) -> None:
    assert Pool([], clock).choose() is None
    assert Pool([], clock).choose(prefer=A, avoid=B) is None


def test_the_node_with_the_least_outstanding_tokens_is_chosen(pool: Pool) -> None:
    pool.started(A, 100)
    pool.started(B, 10)
    assert pool.choose() == C
    pool.started(C, 50)
    assert pool.choose() == B
    pool.finished(A, 100)
    assert pool.choose() == A


def test_requests_that_are_chosen_one_by_one_are_spread(pool: Pool) -> None:
    chosen = []
    for _ in range(6):
        node = pool.choose()
        assert node
        pool.started(node, 10)
        chosen.append(node)
    assert sorted(chosen) == [A, A, B, B, C, C]


def test_the_preferred_node_is_chosen_whatever_its_load(pool: Pool) -> None:
    pool.started(B, 1_000_000)
    assert pool.choose(prefer=B) == B


def test_a_preferred_node_that_is_not_in_the_pool_changes_nothing(pool: Pool) -> None:
    pool.started(A, 1)
    assert pool.choose(prefer="10.9.9.9:1") == B


def test_a_node_to_avoid_is_chosen_only_when_it_is_the_last(pool: Pool, clock: Clock) -> None:
    for node, load in ((B, 1000), (C, 1001)):
        pool.started(node, load)
    assert pool.choose(avoid=A) == B
    assert pool.choose(prefer=A, avoid=A) == B
    pool.unreachable(B)
    assert pool.choose(avoid=A) == C
    pool.unreachable(C)
    assert pool.choose(avoid=A) == B
    assert Pool([A], clock).choose(avoid=A) == A


def test_a_node_that_failed_lately_is_chosen_only_when_all_did(pool: Pool) -> None:
    pool.unreachable(A)
    pool.started(B, 1000)
    assert pool.choose(prefer=A) == C
    pool.unreachable(B)
    pool.unreachable(C)
    assert pool.choose(prefer=A) == A
    pool.started(C, 1)
    assert pool.choose() == A


def test_a_node_is_out_longer_each_time_in_a_row(pool: Pool, clock: Clock) -> None:
    pool.started(C, 1)
    for seconds in (1.0, 2.0, 5.0, 10.0, 30.0, 30.0, 30.0):
        pool.unreachable(A)
        clock.now += seconds - 0.01
        assert pool.choose(prefer=A) == B
        clock.now += 0.01
        assert pool.choose(prefer=A) == A
    pool.reachable(A)
    pool.unreachable(A)
    clock.now += 1.0
    assert pool.choose(prefer=A) == A


def test_requests_that_fail_together_count_as_one_failure(pool: Pool, clock: Clock) -> None:
    # 20 requests under way when a node restarts must not keep it out for half a minute.
    for _ in range(20):
        pool.unreachable(A)
    clock.now += 1.0
    assert pool.choose(prefer=A) == A


def test_a_node_that_answers_is_in_again_at_once(pool: Pool) -> None:
    pool.unreachable(A)
    pool.unreachable(A)
    pool.reachable(A)
    assert pool.choose(prefer=A) == A


def test_what_is_told_of_other_addresses_is_ignored(pool: Pool) -> None:
    for tell in (pool.unreachable, pool.reachable):
        tell("10.9.9.9:1")
    pool.started("10.9.9.9:1", 5)
    pool.finished("10.9.9.9:1", 5)
    assert pool.choose() == A


def test_which_nodes_are_in_the_pool(pool: Pool, clock: Clock) -> None:
    pool.unreachable(A)
    assert A in pool
    assert "10.9.9.9:1" not in pool
    assert 5 not in pool
    # Envoy tells IP addresses. Of nodes known by name, nobody can say that an address is not one of them.
    assert "10.9.9.9:1" in Pool(["vllm-0.example.org:8000", A], clock)


def test_idle_nodes_take_turns(pool: Pool) -> None:
    assert [pool.choose() for _ in range(6)] == [A, B, C, A, B, C]


def test_behind_a_name_the_address_that_envoy_told_is_preferred(clock: Clock) -> None:
    pool = Pool(["vllm.example.org:8000"], clock)
    assert pool.choose(prefer="10.9.9.9:8000") == "10.9.9.9:8000"
    assert pool.choose(prefer="10.9.9.9:8000", avoid="10.9.9.9:8000") == "vllm.example.org:8000"


def test_an_address_named_twice_is_one_node(clock: Clock) -> None:
    pool = Pool([A, A, B], clock)
    pool.started(A, 1)
    assert pool.choose() == B


def test_a_node_that_is_only_a_hint_must_not_be_much_busier_than_the_idlest(pool: Pool, clock: Clock) -> None:
    for node, load in ((A, 110), (B, 20), (C, 10)):
        pool.started(node, load)
    assert pool.choose(prefer=A, slack=100) == A
    assert pool.choose(prefer=A, slack=99) == C
    assert pool.choose(prefer=A) == A
    pool.unreachable(C)
    assert pool.choose(prefer=A, slack=90) == A  # one that cannot be reached is no alternative
    clock.now += 1
    assert pool.choose(prefer=A, slack=90) == C
    assert pool.choose(prefer="10.0.0.9:8000", slack=0) == C


def test_nodes_that_stay_keep_what_is_known_of_them(pool: Pool) -> None:
    pool.started(A, 100)
    pool.unreachable(B)
    pool.update([A, B, "10.0.0.4:8000"])
    assert C not in pool
    assert pool.load(A) == 100
    assert [pool.choose(), pool.choose()] == ["10.0.0.4:8000"] * 2
    pool.update([B])
    pool.update([A, B])  # it left and came back before its request was over
    pool.finished(A, 100)
    assert pool.load(A) == 0


def test_engines_behind_one_address_each_have_a_load_of_their_own(clock: Clock) -> None:
    pool = Pool([A, B], clock, ranks=2)
    assert [pool.choose() for _ in range(4)] == [f"{A}#0", f"{A}#1", f"{B}#0", f"{B}#1"]
    pool.started(f"{A}#0", 10)
    assert (pool.load(f"{A}#0"), pool.load(f"{A}#1")) == (10, 0)
    assert pool.choose(prefer=f"{A}#0") == f"{A}#0"
    assert pool.choose(prefer=f"{A}#0", slack=9) == f"{A}#1"
    assert pool.choose(prefer=A) == f"{A}#1"  # any engine behind it
    assert pool.choose(avoid=f"{A}#1") == f"{B}#0"  # what is wrong with one server is wrong with all its engines
    pool.unreachable(f"{B}#1")
    assert [pool.choose(), pool.choose(prefer=f"{B}#0")] == [f"{A}#1", f"{A}#1"]
    assert [name in pool for name in (A, f"{A}#1", f"{A}#2")] == [True, True, False]
    assert [pool.seat(A, rank) for rank in (0, 1, 2, None)] == [f"{A}#0", f"{A}#1", A, A]
    assert Pool([A], clock).seat(A, 1) == A  # a rank with an address of its own
    pool.ranks = 1
    pool.update([A])
    assert (pool.choose(), pool.load(A)) == (A, 0)


def test_a_node_that_is_drained_or_out_stays_so_when_its_ranks_change(clock: Clock) -> None:
    pool = Pool([A, B], clock)
    pool.drain(A)
    pool.unreachable(B)
    pool.ranks = 2
    pool.update([A, B])
    assert pool.states() == {A: "draining", B: "out"}
    assert pool.seats(A) == [f"{A}#0", f"{A}#1"]
