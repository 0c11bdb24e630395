"""What D keeps, for whom, and when it lets go."""

import pytest
from kvreturn_connector.pins import PinTable, ticket


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def table(clock: Clock, budget: int = 10, ttl: float = 480.0) -> PinTable:
    return PinTable(budget, ttl, clock)


def test_a_pin_is_given_once_and_only_for_its_own_ticket(clock: Clock) -> None:
    pins = table(clock)
    assert pins.pin("a", [1, 2], b"A", releasable=True)
    assert pins.claim("a", b"B") == "mac"
    assert pins.claim("b", b"A") == "used"
    assert pins.claim("a", b"A") is None
    assert pins.claim("a", b"A") == "used"
    assert (pins.counts.claims, pins.counts.denied) == (1, 3)


@pytest.mark.parametrize(("passed", "answer"), [(477.9, None), (478.0, "expired"), (600.0, "expired")])
def test_a_pin_near_its_end_is_not_given_any_more(clock: Clock, passed: float, answer: str | None) -> None:
    pins = table(clock)
    pins.pin("a", [1], b"A", releasable=True)
    clock.now += passed
    assert pins.claim("a", b"A") == answer


def test_a_pin_that_was_given_is_kept_for_its_reader_beyond_its_ttl(clock: Clock) -> None:
    pins = table(clock, ttl=10.0)
    pins.pin("a", [1], b"A", releasable=True)
    clock.now += 7.0
    assert pins.claim("a", b"A") is None
    assert pins.take_orders().extend == {"a": 137.0}


def test_over_the_budget_the_oldest_go_first_but_not_what_is_being_read(clock: Clock) -> None:
    pins = table(clock, budget=6)
    for name, blocks in (("a", [1, 2]), ("b", [3, 4]), ("c", [5, 6])):
        assert pins.pin(name, blocks, b"T", releasable=True)
    assert pins.claim("a", b"T") is None
    assert pins.pin("d", [7, 8], b"T", releasable=True)
    assert pins.take_orders().release == {"b"}
    assert (pins.pins, pins.blocks, pins.counts.early_releases) == (3, 6, 1)


def test_what_a_stock_reader_may_read_unasked_is_never_let_go_early(clock: Clock) -> None:
    pins = table(clock, budget=2)
    assert pins.pin("a", [1, 2], b"T", releasable=False)
    assert not pins.pin("b", [3], b"T", releasable=True)
    assert (pins.pins, pins.counts.refused) == (1, 1)


def test_more_than_the_whole_budget_is_refused_and_costs_nobody_a_pin(clock: Clock) -> None:
    pins = table(clock, budget=3)
    pins.pin("a", [1, 2], b"T", releasable=True)
    assert not pins.pin("b", [3, 4, 5, 6], b"T", releasable=True)
    assert (pins.pins, pins.blocks) == (1, 2)


def test_blocks_that_pins_share_count_once_and_stay_until_the_last(clock: Clock) -> None:
    pins = table(clock, budget=4)
    pins.pin("a", [1, 2, 3], b"T", releasable=True)
    assert pins.pin("b", [1, 2, 3, 4], b"T", releasable=True)
    assert (pins.pins, pins.blocks) == (2, 4)
    pins.freed("a")
    assert pins.blocks == 4
    pins.freed("b")
    assert (pins.pins, pins.blocks) == (0, 0)


def test_a_release_needs_the_ticket_and_reaches_the_workers(clock: Clock) -> None:
    pins = table(clock)
    pins.pin("a", [1], b"A", releasable=True)
    assert not pins.release("a", b"B")
    assert pins.release("a", b"A")
    assert pins.take_orders().release == {"a"}
    assert pins.take_orders().release == set()
    pins.freed("a")
    assert pins.claim("a", b"A") == "used"


def test_what_the_workers_freed_meanwhile_needs_no_order(clock: Clock) -> None:
    pins = table(clock)
    pins.pin("a", [1], b"A", releasable=True)
    pins.claim("a", b"A")
    pins.freed("a")
    orders = pins.take_orders()
    assert (orders.release, orders.extend) == (set(), {})


@pytest.mark.parametrize(
    "other",
    [
        ("e2", "r", [1, 2], 20, b"d"),
        ("e", "r2", [1, 2], 20, b"d"),
        ("e", "r", [1, 3], 20, b"d"),
        ("e", "r", [1, 2], 21, b"d"),
        ("e", "r", [1, 2], 20, b"x"),
    ],
)
def test_a_ticket_stands_for_every_part_of_a_handle(other: tuple[str, str, list[int], int, bytes]) -> None:
    mine = ticket("e", "r", [1, 2], 20, b"d")
    assert len(mine) == 16
    assert ticket(*other) != mine
