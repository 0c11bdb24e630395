"""Eager returns that nobody has come for yet, and what is learned of each, once."""

from collections import OrderedDict
from typing import NamedTuple

from kvreturn.core.choice import Chooser, Fate

_SECONDS, _MOST = 600.0, 10_000  # after which nobody comes any more; how many are watched


class Overdue(NamedTuple):
    """A return that nobody has come for in time: its record's ticket, its P, and how its turn ended."""

    ticket: bytes
    node: str
    finish_reason: str | None


class Unseen:
    """The latest of them.

    Args:
        chooser: is told what became of each.
    """

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._returns: OrderedDict[bytes, tuple[str, str | None, float]] = OrderedDict()

    def add(self, ticket: bytes, node: str, finish_reason: str | None, now: float) -> None:
        """A return has arrived.

        Args:
            ticket: of its record.
            node: address of the P that has it.
            finish_reason: of the turn that was returned.
            now: monotonic seconds.
        """
        self._returns[ticket] = node, finish_reason, now

    def came(self, ticket: bytes, fate: Fate, now: float) -> bool:
        """The next turn came, and P had what went back to it, or had it no more. False if it is none of these."""
        seen = self._returns.pop(ticket, None)
        if seen:
            self._chooser.learned(seen[0], seen[1], fate, now)
        return seen is not None

    def give_up(self, now: float) -> list[Overdue]:
        """Forget those that nobody came for by now. Those that are too many to be watched teach nothing.

        Returns:
            The former: nobody will come here.
        """
        overdue = []
        while self._returns:
            ticket, (node, reason, when) = next(iter(self._returns.items()))
            if now - when >= _SECONDS:
                overdue.append(Overdue(ticket, node, reason))
            elif len(self._returns) <= _MOST:
                break
            del self._returns[ticket]
        return overdue
