"""Decisions that do not flutter, and the rare trial that shows when one has become untrue.

Nodes are looked at every two seconds, and a choice shows in what they tell only some turns later: so what has changed
stays for ten seconds. One trial in twenty turns bounds what a verdict that is no longer true costs, and what a true one
costs, to 5 %.
"""

DWELL = 10.0  # seconds
EXPLORE = 20  # turns


class Latch:
    """A yes or no that changes at two different thresholds, and then not again for `DWELL` seconds.

    Attributes:
        on: what it says.
    """

    def __init__(self) -> None:
        self.on = False
        self._changed = float("-inf")

    def update(self, now: float, *, enter: bool, leave: bool) -> bool:
        """Say what the thresholds say now. Returns whether that has changed anything."""
        changes = now - self._changed >= DWELL and (leave if self.on else enter)
        if changes:
            self.on, self._changed = not self.on, now
        return changes


class Explorer:
    """Says yes every `EXPLORE`th time."""

    def __init__(self) -> None:
        self._times = 0

    def due(self) -> bool:
        """Count one. Returns whether it is the one for a trial."""
        self._times = (self._times + 1) % EXPLORE
        return not self._times
