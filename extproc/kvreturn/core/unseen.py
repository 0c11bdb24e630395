"""Eager returns that nobody has come for yet, and what is learned of each, once."""

from collections import OrderedDict

from kvreturn.core.choice import Chooser, Fate

_SECONDS, _MOST = 600.0, 10_000  # after which nobody comes any more; how many are watched


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

    def came(self, ticket: bytes, fate: Fate, now: float) -> None:
        """The next turn came, and P had what went back to it, or had it no more."""
        seen = self._returns.pop(ticket, None)
        if seen:
            self._chooser.learned(seen[0], seen[1], fate, now)

    def give_up(self, now: float) -> None:
        """What nobody came for by now, nobody will. Those that are too many to be watched teach nothing."""
        while self._returns:
            ticket, (node, reason, when) = next(iter(self._returns.items()))
            if now - when >= _SECONDS:
                self._chooser.learned(node, reason, "unused", now)
            elif len(self._returns) <= _MOST:
                return
            del self._returns[ticket]
