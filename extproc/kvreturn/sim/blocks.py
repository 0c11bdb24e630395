"""The KV cache's blocks: physical storage, reference counts, prefix cache, eviction.

A freed block keeps its content until it is handed out again, so who reads it late reads what happens to be there.
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

Hash = bytes


class BlockHasher:
    """Chained hashes of a sequence's full blocks, extended as the sequence grows.

    A hash covers the token ids up to its block's end and what else the KV depends on. It does not cover what the
    block really holds: that is how a wrong read poisons the cache.
    """

    def __init__(self, block_size: int, *, adapter: str, salt: str, images: Mapping[int, bytes]) -> None:
        self._block_size = block_size
        self._images = images
        self._last = hashlib.sha256(json.dumps([adapter, salt]).encode()).digest()
        self.hashes: list[Hash] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the hashes of blocks of `tokens` (the whole sequence) that have become full."""
        size = self._block_size
        for end in range((len(self.hashes) + 1) * size, len(tokens) + 1, size):
            digest = hashlib.sha256(self._last + array("I", tokens[end - size : end]).tobytes())
            for position in range(end - size, end) if self._images else ():
                digest.update(self._images.get(position, b""))
            self._last = digest.digest()
            self.hashes.append(self._last)


class BlockPool:
    """Blocks 1..num_blocks-1 (0 is vLLM's null block)."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._store = array("Q", bytes(8 * num_blocks * block_size))
        self._references = [0] * num_blocks
        self._hash_of: dict[int, Hash] = {}
        self._block_of: dict[Hash, int] = {}
        self._free = OrderedDict.fromkeys(range(1, num_blocks))  # least recently used first

    @property
    def free(self) -> int:
        """Blocks that nobody uses; they may still be cached."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody uses or holds."""
        return self.num_blocks - 1 - len(self._free)

    @property
    def cached(self) -> int:
        """Of the free blocks, those that the prefix cache still knows."""
        return sum(block in self._hash_of for block in self._free)

    @property
    def in_use(self) -> set[int]:
        """Ids of the used blocks."""
        return set(range(1, self.num_blocks)).difference(self._free)

    # --- allocation ---

    def lookup(self, hashes: Sequence[Hash]) -> list[int]:
        """The cached blocks of the longest known prefix of `hashes`."""
        found: list[int] = []
        for block_hash in hashes if self.prefix_caching else ():
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, cached: Sequence[int], new: int) -> list[int] | None:
        """Take the blocks `cached` and `new` others.

        Returns:
            All block ids, or None if there are not enough free ones (nothing is taken then).
        """
        if new > len(self._free) - sum(block in self._free for block in cached):
            return None
        for block in cached:
            self._free.pop(block, None)
            self._references[block] += 1
        fresh = [self._free.popitem(last=False)[0] for _ in range(new)]
        for block in fresh:
            self._references[block] = 1
            known = self._hash_of.pop(block, None)
            if known is not None:
                del self._block_of[known]
        return [*cached, *fresh]

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a sequence.

        As in vLLM, blocks without a hash are the next to be reused; the others are evicted least recently used first,
        a sequence's end before its start.
        """
        unknown = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if block not in self._hash_of:
                    unknown.append(block)
        for block in reversed(unknown):
            self._free.move_to_end(block, last=False)

    def cache(self, blocks: Sequence[int], hashes: Sequence[Hash], start: int, end: int) -> None:
        """Make blocks `start`..`end`-1 of a sequence known under their hashes, whatever they hold."""
        for i in range(start, end) if self.prefix_caching else ():
            if hashes[i] not in self._block_of and blocks[i] not in self._hash_of:
                self._block_of[hashes[i]] = blocks[i]
                self._hash_of[blocks[i]] = hashes[i]

    def forget(self) -> bool:
        """Drop the whole prefix cache; as in vLLM, only while no block is in use.

        Returns:
            Whether that was done.
        """
        if self.used:
            return False
        self._hash_of.clear()
        self._block_of.clear()
        return True

    # --- content ---

    def read(self, blocks: Sequence[int], end: int) -> "array[int]":  # arrays take no parameters before Python 3.12
        """KV values of positions 0..`end`-1 of the sequence that lies in `blocks`."""
        size, out = self.block_size, array("Q")
        for block in blocks[: -(-end // size)]:
            out += self._store[block * size : (block + 1) * size]
        return out[:end]

    def write(self, blocks: Sequence[int], start: int, values: Iterable[int]) -> None:
        """Store the KV values of positions `start`.. of the sequence that lies in `blocks`."""
        size = self.block_size
        for position, value in enumerate(values, start):
            self._store[blocks[position // size] * size + position % size] = value

    def dump(self, blocks: Sequence[int]) -> bytes:
        """Raw content of whole blocks, 8 bytes per position: what a remote node reads.

        Raises:
            IndexError: there is no such block.
        """
        if any(not 0 <= block < self.num_blocks for block in blocks):
            raise IndexError("block id out of range")
        return self.read(blocks, len(blocks) * self.block_size).tobytes()

    def restore(self, blocks: Sequence[int], raw: bytes) -> None:
        """Overwrite whole blocks with what `dump` gave elsewhere."""
        size, values = self.block_size, array("Q", raw)
        for i, block in enumerate(blocks):
            self._store[block * size : (block + 1) * size] = values[i * size : (i + 1) * size]
