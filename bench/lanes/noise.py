"""Is the machine quiet enough to tell?"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

_SLEEPS, _SLEEP = 60, 0.001
_SPIN = 0.03
LATE_MS = 1.0
"""p90 of how late a sleeper wakes, from which on a machine counts as noisy."""
SHARE = 0.9
"""Share of a core that a busy process gets, below which it does."""


@dataclass(frozen=True)
class Noise:
    """What one look at the machine gave, with nothing of ours running.

    Attributes:
        late_ms: p90 of how late a sleeper wakes.
        share: of a core that a busy process got.
        load: the load average of the last minute.
    """

    late_ms: float
    share: float
    load: float

    @property
    def quiet(self) -> bool:
        """Whether differences of a tenth of a millisecond mean something."""
        return self.late_ms <= LATE_MS and self.share >= SHARE


def look() -> Noise:
    """Take about a tenth of a second to look."""
    late = []
    for _ in range(_SLEEPS):
        begun = time.perf_counter()
        time.sleep(_SLEEP)
        late.append(time.perf_counter() - begun - _SLEEP)
    begun, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < _SPIN:
        pass
    share = (time.process_time() - used) / (time.perf_counter() - begun)
    return Noise(1e3 * sorted(late)[_SLEEPS * 9 // 10], share, os.getloadavg()[0])


async def looked() -> Noise:
    """The same, while the event loop goes on."""
    return await asyncio.to_thread(look)


def words(looks: Sequence[Noise]) -> str | None:
    """A sentence about how noisy it was; None if it was quiet enough."""
    loud = [n for n in looks if not n.quiet]
    if 4 * len(loud) < len(looks):
        return None
    late, share = (sorted(getattr(n, what) for n in looks)[len(looks) // 2] for what in ("late_ms", "share"))
    return (
        f"The machine was noisy in {len(loud)} of {len(looks)} looks (a sleeper woke {late:.1f} ms late in one of ten "
        f"times, a busy process got {share:.0%} of a core; medians): times are too long, ratios hold better."
    )
