import asyncio
import time
import tracemalloc

import pytest

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Record, Taken
from kvreturn.store.memory import MemoryStore

A, B, C = b"a" * 17, b"b" * 17, b"c" * 17


class Clock:
    """Time stands still until it is told to go on."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(max_entries=1000, max_bytes=1 << 20, clock=clock)


def handle(text: str = "h", ttl: float = 450.0) -> Record:
    return Record(ttl, text.encode(), None, "d:1", "p:1")


def marker(reason: Outcome = Outcome.NO_HANDLE_FROM_DECODE, ttl: float = 450.0) -> Record:
    return Record(ttl, None, reason)


async def test_a_handle_is_taken_once_and_by_all_of_its_keys(store: MemoryStore, clock: Clock) -> None:
    await store.put([A, B], handle())
    clock.now += 3
    assert await store.take([C, B]) == Taken(handle(), None, 3.0)
    for keys in ([A], [B], [C, A, B]):
        assert await store.take(keys) == Taken(None, Outcome.ALREADY_TAKEN)


async def test_nothing_is_known_of_what_was_never_put(store: MemoryStore) -> None:
    assert await store.take([A, B]) == Taken(None, None, None)
    assert await store.take([]) == Taken()


async def test_the_first_key_wins_and_the_others_stay(store: MemoryStore) -> None:
    await store.put([A], handle("far"))
    await store.put([B], handle("near"))
    assert (await store.take([B, A])).record == handle("near")
    assert (await store.take([B, A])).record == handle("far")
    assert await store.take([B, A]) == Taken(None, Outcome.ALREADY_TAKEN)


async def test_under_one_key_the_newest_goes_first(store: MemoryStore) -> None:
    for text in ("1", "2", "3"):
        await store.put([A], handle(text))
    assert [(await store.take([A])).record for _ in range(4)] == [handle("3"), handle("2"), handle("1"), None]


async def test_fr54_of_20_concurrent_requests_one_gets_the_handle(store: MemoryStore) -> None:
    await store.put([A, B], handle())
    taken = await asyncio.gather(*(store.take([A, B]) for _ in range(20)))
    assert [t.record for t in taken if t.record] == [handle()]
    assert {t.reason for t in taken if not t.record} == {Outcome.ALREADY_TAKEN}


@pytest.mark.parametrize(
    ("age", "there"), [(0.0, True), (449.0, True), (449.999, True), (450.0, False), (451.0, False)]
)
async def test_fr55_a_handle_lives_for_its_ttl(store: MemoryStore, clock: Clock, age: float, there: bool) -> None:  # noqa: FBT001
    await store.put([A], handle(ttl=450.0))
    clock.now += age
    expected = Taken(handle(ttl=450.0), None, age) if there else Taken(None, Outcome.EXPIRED)
    assert await store.take([A]) == expected
    assert store.expired == (not there)
    assert len(store) == 0


async def test_a_ttl_of_nothing_expires_at_once_and_says_so(store: MemoryStore, clock: Clock) -> None:
    # What a D with a `decoder_kv_blocks_ttl` of 5 s comes to: its operator has to see why nothing is ever reused.
    await store.put([A], handle(ttl=0.0))
    clock.now += 30
    assert await store.take([A]) == Taken(None, Outcome.EXPIRED)


async def test_a_short_ttl_behind_a_long_one_is_kept_all_the_same(store: MemoryStore, clock: Clock) -> None:
    await store.put([A], handle("long", ttl=450.0))
    await store.put([B], handle("short", ttl=10.0))
    clock.now += 11
    assert await store.take([B]) == Taken(None, Outcome.EXPIRED)
    assert (await store.take([A])).record == handle("long", ttl=450.0)
    assert store.expired == 1


async def test_a_marker_tells_its_reason_again_and_again(store: MemoryStore, clock: Clock) -> None:
    await store.put([A], marker())
    for _ in range(3):
        assert await store.take([A]) == Taken(marker(), None, clock.now - 1000)
        clock.now += 100
    clock.now += 200
    assert await store.take([A]) == Taken(None, Outcome.NO_HANDLE_FROM_DECODE)
    assert store.expired == 0


async def test_a_newer_marker_stands_before_an_older_handle(store: MemoryStore) -> None:
    # The turn that ended without a handle is the predecessor; an older one is never a fallback (field report 60).
    await store.put([A], handle())
    await store.put([A], marker())
    assert (await store.take([A])).record == marker()


async def test_the_reason_of_the_nearest_is_told(store: MemoryStore, clock: Clock) -> None:
    await store.put([A], handle(ttl=5.0))
    await store.put([B], handle())
    await store.take([B])
    clock.now += 6
    assert await store.take([B, A]) == Taken(None, Outcome.ALREADY_TAKEN)
    assert await store.take([A, B]) == Taken(None, Outcome.EXPIRED)


async def test_a_reason_is_forgotten_in_the_end(store: MemoryStore, clock: Clock) -> None:
    await store.put([A], handle(ttl=100.0))
    await store.take([A])
    clock.now += 99
    assert await store.take([A]) == Taken(None, Outcome.ALREADY_TAKEN)
    clock.now += 1
    assert await store.take([A]) == Taken()
    await store.put([A], handle(ttl=100.0))
    clock.now += 100
    assert await store.take([A]) == Taken(None, Outcome.EXPIRED)
    clock.now += 100
    assert await store.take([A]) == Taken()


# --- bounds ---


async def test_the_oldest_go_first_when_there_are_too_many(clock: Clock) -> None:
    store = MemoryStore(max_entries=3, max_bytes=1 << 20, clock=clock)
    for i in range(5):
        await store.put([bytes([i]) * 17], handle(str(i)))
    assert (len(store), store.handles, store.evicted) == (3, 3, 2)
    assert [(await store.take([bytes([i]) * 17])).record for i in range(5)] == [
        None,
        None,
        handle("2"),
        handle("3"),
        handle("4"),
    ]


async def test_the_oldest_go_first_when_they_are_too_large(clock: Clock) -> None:
    store = MemoryStore(max_entries=1000, max_bytes=100_000, clock=clock)
    for i in range(5):
        await store.put([bytes([i]) * 17], handle(str(i) * 30_000))
        assert store.bytes <= 100_000
    assert (len(store), store.evicted) == (3, 2)
    assert (await store.take([bytes([1]) * 17])).record is None
    assert (await store.take([bytes([2]) * 17])).record == handle("2" * 30_000)


async def test_what_is_larger_than_all_room_is_not_kept_and_pushes_nothing_out(clock: Clock) -> None:
    store = MemoryStore(max_entries=1000, max_bytes=10_000, clock=clock)
    await store.put([A], handle("small"))
    await store.put([B], handle("x" * 10_000))
    assert (len(store), store.evicted) == (1, 1)
    assert await store.take([B]) == Taken()
    assert (await store.take([A])).record == handle("small")


async def test_bytes_are_those_of_the_handles_and_go_with_them(store: MemoryStore, clock: Clock) -> None:
    assert store.bytes == 0
    await store.put([A], handle("x" * 1000))
    await store.put([B], handle("y" * 2000, ttl=10.0))
    await store.put([C], marker())
    both = store.bytes
    assert 3000 < both < 6000
    await store.take([A])
    assert both - store.bytes > 1000
    clock.now += 500
    await store.put([A], marker())
    await store.take([A, B, C])
    clock.now += 1000
    await store.take([A])
    assert (store.bytes, len(store), store.handles) == (0, 0, 0)


async def test_the_bytes_counted_are_about_those_that_are_used(clock: Clock) -> None:
    store = MemoryStore(max_entries=10_000, max_bytes=1 << 30, clock=clock)
    keys = [[b"%017d" % (2 * i), b"%017d" % (2 * i + 1)] for i in range(2000)]
    tracemalloc.start()
    try:
        for pair in keys:
            await store.put(
                [bytes(bytearray(k)) for k in pair], Record(450.0, bytes(bytearray(500)), None, "d:1", "p:1")
            )
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 * store.bytes < used < 1.6 * store.bytes


async def test_one_key_holds_a_few_and_what_is_pushed_out_is_counted(store: MemoryStore) -> None:
    for i in range(12):
        await store.put([A], handle(str(i)))
    assert (len(store), store.evicted) == (8, 4)
    assert [(await store.take([A])).record for _ in range(9)] == [*(handle(str(i)) for i in range(11, 3, -1)), None]


async def test_a_trace_is_pushed_out_before_a_handle(store: MemoryStore) -> None:
    await store.put([A], handle("first"))
    await store.put([A], handle("taken"))
    await store.take([A])
    for i in range(7):
        await store.put([A], handle(str(i)))
    assert (len(store), store.evicted) == (8, 0)
    taken = [(await store.take([A])).record for _ in range(8)]
    assert taken[-1] == handle("first")


async def test_an_entry_pushed_out_of_one_key_is_gone_from_the_other(store: MemoryStore) -> None:
    await store.put([A, B], handle("first"))
    for i in range(8):
        await store.put([A], handle(str(i)))
    assert await store.take([B]) == Taken()


async def test_traces_are_bounded_too(clock: Clock) -> None:
    store = MemoryStore(max_entries=10, max_bytes=1 << 20, clock=clock)
    for i in range(100):
        key = b"%017d" % i
        await store.put([key], handle())
        await store.take([key])
    await store.put([A], handle())
    assert len(store._index) <= 21
    assert await store.take([b"%017d" % 99]) == Taken(None, Outcome.ALREADY_TAKEN)
    assert await store.take([b"%017d" % 0]) == Taken()


async def churn(store: MemoryStore, clock: Clock, first: int, last: int) -> None:
    for i in range(first, last):
        await store.put([b"t%016d" % i, b"p%016d" % i], handle("x" * 100) if i % 3 else marker())
        if i % 2:
            await store.take([b"t%016d" % (i - 5), b"p%016d" % (i - 5)])
        clock.now += 1.0


async def test_memory_stays_flat_over_100_000_turns(clock: Clock) -> None:
    store = MemoryStore(max_entries=100_000, max_bytes=1 << 30, clock=clock)
    await churn(store, clock, 0, 90_000)
    sizes = (len(store._index), len(store._live), len(store._gone))
    tracemalloc.start()
    try:
        await churn(store, clock, 90_000, 92_000)  # all that lives was put since
        before, _ = tracemalloc.get_traced_memory()
        await churn(store, clock, 92_000, 100_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(sizes) < 2 * 2 * 450 + 10
    assert max(len(store._index), len(store._live), len(store._gone)) < 2 * 2 * 450 + 10
    assert after - before < 50_000


@pytest.mark.parametrize("bucketed", [False, True])
async def test_taking_costs_the_same_however_much_is_stored(clock: Clock, bucketed: bool) -> None:  # noqa: FBT001
    async def seconds(entries: int) -> float:
        store = MemoryStore(max_entries=1_000_000, max_bytes=1 << 30, clock=clock)
        for i in range(entries):
            await store.put([b"%017d" % i, A if bucketed else b"x%016d" % i], handle())
        begun = time.process_time()
        for i in range(entries - 1, entries - 1001, -1):
            await store.take([b"%017d" % i])
        return time.process_time() - begun

    few, many = min([await seconds(1000) for _ in range(3)]), min([await seconds(40_000) for _ in range(2)])
    assert many < 10 * max(few, 0.001)
