from kvreturn.sim.blocks import BlockHasher, BlockPool
from kvreturn.sim.model import compute, fold, initial_state
from unit.sim.cluster import ids


def hashes(
    tokens: list[int], *, adapter: str = "", salt: str = "", images: dict[int, bytes] | None = None
) -> list[bytes]:
    hasher = BlockHasher(4, adapter=adapter, salt=salt, images=images or {})
    hasher.extend(tokens)
    return hasher.hashes


def test_folding_stored_values_gives_the_computed_state() -> None:
    state, values = compute(initial_state(""), ids(1, 100))
    assert fold(initial_state(""), values) == state
    middle, _ = compute(initial_state(""), ids(1, 60))
    assert compute(middle, ids(1, 100)[60:])[0] == state


def test_any_other_token_value_or_adapter_changes_the_state() -> None:
    tokens = ids(1, 50)
    state, values = compute(initial_state(""), tokens)
    for position in range(50):
        other = [*tokens]
        other[position] ^= 1
        assert compute(initial_state(""), other)[0] != state
        stored = [*values]
        stored[position] ^= 1
        assert fold(initial_state(""), stored) != state
    assert compute(initial_state("adapter"), tokens)[0] != state


def test_hashes_cover_full_blocks_and_all_that_is_before_them() -> None:
    base = hashes(list(range(11)))
    assert len(base) == 2
    assert hashes([*range(8), 99, 99, 99]) == base
    assert hashes([0, 1, 2, 3, 9, 5, 6, 7])[0] == base[0]
    assert hashes([0, 1, 2, 3, 9, 5, 6, 7])[1] != base[1]
    assert hashes([9, 1, 2, 3, 4, 5, 6, 7])[1] != base[1]
    for other in (
        hashes(list(range(8)), adapter="a"),
        hashes(list(range(8)), salt="s"),
        hashes(list(range(8)), images={2: b"image"}),
    ):
        assert not set(other) & set(base)
    assert hashes(list(range(8)), images={5: b"image"})[0] == base[0]
    assert hashes(list(range(8)), images={5: b"image"})[1] != base[1]


def test_growing_a_sequence_gives_the_same_hashes() -> None:
    hasher = BlockHasher(4, adapter="", salt="", images={})
    for end in range(1, 14):
        hasher.extend(ids(1, 13)[:end])
    assert hasher.hashes == hashes(ids(1, 13))


def test_blocks_are_handed_out_in_order_and_none_more_than_there_are() -> None:
    pool = BlockPool(5, 4, prefix_caching=True)
    assert pool.allocate((), 3) == [1, 2, 3]
    assert pool.allocate((), 2) is None
    assert (pool.used, pool.free) == (3, 1)
    pool.release([1, 2, 3])
    assert (pool.used, pool.free) == (0, 4)


def test_the_cached_prefix_is_found_and_a_sequences_last_blocks_are_evicted_first() -> None:
    pool = BlockPool(6, 4, prefix_caching=True)
    known = hashes(list(range(12)))
    blocks = pool.allocate((), 3)
    assert blocks is not None
    pool.cache(blocks, known, 0, 3)
    pool.release(blocks)
    assert pool.lookup(known) == [1, 2, 3]
    assert pool.allocate((), 3) == [4, 5, 3]  # never used first, then the last block of the freed sequence
    assert pool.lookup(known) == [1, 2]


def test_blocks_that_hold_nothing_known_are_reused_first_and_latest_first() -> None:
    pool = BlockPool(6, 4, prefix_caching=True)
    blocks = pool.allocate((), 4)
    assert blocks == [1, 2, 3, 4]
    pool.cache(blocks, hashes(list(range(8))), 0, 2)
    pool.release(blocks)
    assert (pool.cached, pool.free, pool.in_use) == (2, 5, set())
    assert pool.allocate((), 5) == [4, 3, 5, 2, 1]


def test_a_cached_block_in_use_is_shared_and_counted_once() -> None:
    pool = BlockPool(4, 4, prefix_caching=True)
    known = hashes(list(range(8)))
    first = pool.allocate((), 2)
    assert first is not None
    pool.cache(first, known, 0, 2)
    second = pool.allocate(pool.lookup(known), 1)
    assert second == [1, 2, 3]
    pool.release(first)
    assert pool.used == 3
    pool.release(second)
    assert pool.used == 0


def test_cached_free_blocks_do_not_count_twice_as_room() -> None:
    pool = BlockPool(4, 4, prefix_caching=True)
    known = hashes(list(range(8)))
    blocks = pool.allocate((), 2)
    assert blocks is not None
    pool.cache(blocks, known, 0, 2)
    pool.release(blocks)
    assert pool.free == 3
    assert pool.allocate(pool.lookup(known), 2) is None  # 2 of the 3 free ones are the cached ones


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(6, 4, prefix_caching=False)
    known = hashes(list(range(8)))
    blocks = pool.allocate((), 2)
    assert blocks is not None
    pool.cache(blocks, known, 0, 2)
    assert pool.lookup(known) == []


def test_the_prefix_cache_is_dropped_when_no_block_is_in_use() -> None:
    pool = BlockPool(6, 4, prefix_caching=True)
    known = hashes(list(range(8)))
    blocks = pool.allocate((), 2)
    assert blocks is not None
    pool.cache(blocks, known, 0, 2)
    assert not pool.forget()
    pool.release(blocks)
    assert pool.lookup(known) == blocks
    assert pool.forget()
    assert (pool.lookup(known), pool.cached, pool.free) == ([], 0, 5)


def test_freed_blocks_keep_their_content_until_they_are_written_again() -> None:
    pool = BlockPool(4, 4, prefix_caching=False)
    pool.allocate((), 2)
    pool.write([1, 2], 0, range(10, 16))
    pool.release([1, 2])
    assert list(pool.read([1, 2], 6)) == [10, 11, 12, 13, 14, 15]
    raw = pool.dump([2])
    other = BlockPool(4, 4, prefix_caching=False)
    other.restore([3], raw)
    assert list(other.read([3], 2)) == [14, 15]
