import time
import tracemalloc

import pytest

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Record, Taken
from kvreturn.store.memory import MemoryStore
from support.harness import Clock
from support.stores import A, B, C, handle, marker


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(max_entries=1000, max_bytes=1 << 20, clock=clock)


async def test_a_handle_lives_to_the_last_moment_of_its_ttl(store: MemoryStore, clock: Clock) -> None:
    await store.put([A], handle(ttl=450.0))
    clock.now += 449.999
    assert (await store.take([A])).record == handle(ttl=450.0)
    assert (store.expired, len(store)) == (0, 0)


async def test_a_reason_is_forgotten_in_the_end(store: MemoryStore, clock: Clock) -> None:
    await store.put([A], handle(ttl=100.0))
    await store.take([A])
    clock.now += 99
    assert await store.take([A]) == Taken(None, Outcome.ALREADY_TAKEN)
    clock.now += 1
    assert await store.take([A]) == Taken()


async def test_what_expires_is_counted_if_it_was_a_handle(store: MemoryStore, clock: Clock) -> None:
    await store.put([A], handle("long", ttl=450.0))
    await store.put([B], handle("short", ttl=10.0))
    await store.put([C], marker(ttl=10.0))
    clock.now += 11
    await store.take([B])
    assert store.expired == 1
    clock.now += 450
    await store.take([B])
    assert (store.expired, len(store)) == (2, 0)


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


async def test_no_single_call_pays_for_all_that_is_over(clock: Clock) -> None:
    store = MemoryStore(max_entries=10_000, max_bytes=1 << 30, clock=clock)
    for i in range(1000):
        await store.put([b"%017d" % i], handle())
    clock.now += 451
    lengths = []
    while len(store):
        await store.take([A])
        lengths.append(len(store))
    assert lengths[0] > 900  # one call, some of the work
    assert len(lengths) < 20  # and it does not take forever
    assert (store.bytes, store.expired) == (0, 1000)
    clock.now += 451
    for _ in range(20):
        await store.take([A])
    assert not store._index


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
