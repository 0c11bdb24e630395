"""A bounded dictionary that makes what it does not have."""

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V], Generic[K, V]):
    """Holds the values that were asked for last, in that order.

    Args:
        most: how many there may be; the one that was not asked for for longest goes first.
        make: makes a value that is not there.
    """

    def __init__(self, most: int, make: Callable[[], V]) -> None:
        super().__init__()
        self._most = most
        self._make = make

    def of(self, key: K) -> V:
        """The value of `key`, a new one if there is none."""
        value = self.pop(key) if key in self else self._make()
        self[key] = value
        if len(self) > self._most:
            del self[next(iter(self))]
        return value
