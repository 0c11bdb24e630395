"""The simulated model's arithmetic: what the KV cache of a position holds, and what follows from it.

The state A folds the KV of all positions so far; the KV of a position depends on the state before it and on its token:

    KV_i = g(A_{i-1}, input_i)      A_i = f(A_{i-1}, KV_i)

Blocks hold the KV values. A cached or loaded block is never recomputed: the state is folded from what it really
holds. f and g are one-to-one in each argument, so one wrong value changes every state after it, and with it the text,
as in a real model.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def initial_state(adapter: str) -> int:
    """State before the first position; a LoRA adapter (empty for the base model) changes every KV value."""
    return int.from_bytes(hashlib.sha256(b"state" + adapter.encode()).digest()[:8], "big")


def image_input(digest: bytes) -> int:
    """What the model sees at an image's position instead of the placeholder token."""
    return int.from_bytes(digest[:8], "big")


def compute(state: int, inputs: Iterable[int]) -> tuple[int, list[int]]:
    """Run the model over `inputs` (token ids, or `image_input`).

    Returns:
        The state after the last input, and the KV value (64 bits) of every position.
    """
    values = []
    for value in inputs:
        kv = ((state ^ value) * _MIX_1) & _MASK
        kv ^= kv >> 31
        state = ((state ^ kv) * _MIX_2) & _MASK
        state ^= state >> 29
        values.append(kv)
    return state, values


def fold(state: int, values: Iterable[int]) -> int:
    """The state after positions whose KV values are read from blocks instead of computed."""
    for kv in values:
        state = ((state ^ kv) * _MIX_2) & _MASK
        state ^= state >> 29
    return state


def draw(state: int, purpose: int) -> int:
    """A 64-bit number that depends on the state, and for each `purpose` on nothing else."""
    z = (state + (purpose + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def pick(state: int, purpose: int, choices: Sequence[T]) -> T:
    """One of `choices`."""
    return choices[draw(state, purpose) % len(choices)]
