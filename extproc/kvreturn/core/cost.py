"""Is reading KV back from D faster than computing it again on P? Learned per pair of nodes from prefill legs.

A leg takes the time to compute its new tokens, overhead included, and the time to read the others. Both are kept as
curves over the number of tokens rather than as two constants each: prefill grows faster than its prompt on real GPUs,
and a curve is right about that where it was measured, and silent where it was not. Legs also wait, in queues and for
other requests of the same batch, and only ever become slower by that: so of each size it is the faster half that tells
what the work takes, without its fastest quarter, so that one leg more or less, however odd, changes little.
"""

from collections import deque
from dataclasses import dataclass, field

from kvreturn.core.latch import Explorer, Latch
from kvreturn.core.recent import Recent

_SAMPLES, _ENOUGH = 12, 6  # legs of one size that are kept, and that are needed
_REACH = 4  # times the longest measured length: what is longer is not known
_SLOWER, _FASTER = 1.25, 1.0  # reading over computing: stop reading, read again
_PREFILL_NODES, _PAIRS = 256, 1024  # that are remembered: some 20 kB each at most


class Curve:
    """Seconds over tokens. Lengths between two powers of two are one size."""

    def __init__(self) -> None:
        self._legs: dict[int, deque[tuple[int, float]]] = {}
        self._middles: dict[int, tuple[float, float]] = {}
        self._points: list[tuple[float, float]] = []

    def add(self, tokens: int, seconds: float) -> None:
        """One more measurement."""
        size = tokens.bit_length()
        legs = self._legs.setdefault(size, deque(maxlen=_SAMPLES))
        legs.append((tokens, seconds))
        if len(legs) < _ENOUGH:
            return
        self._middles[size] = _middling(legs)
        points = [self._middles[size] for size in sorted(self._middles)]
        for i in reversed(range(len(points) - 1)):  # more tokens never take less time
            points[i] = (points[i][0], min(points[i][1], points[i + 1][1]))
        self._points = points

    def at(self, tokens: int) -> float | None:
        """Seconds for so many tokens, None if not known."""
        points = self._points
        if not points or tokens > _REACH * points[-1][0]:
            return None
        n0, s0 = 0.0, self._fixed
        for n1, s1 in points:
            if tokens <= n1:
                return s0 + (s1 - s0) * (tokens - n0) / (n1 - n0)
            n0, s0 = n1, s1
        return s0 * tokens / n0

    def growth(self, tokens: int) -> float | None:
        """Seconds by which so many tokens take longer than none, None if not known."""
        seconds = self.at(tokens)
        return None if seconds is None else seconds - self._fixed

    @property
    def _fixed(self) -> float:
        """What no tokens take, going by the two shortest sizes."""
        if len(self._points) == 1:
            return 0.0
        (n0, s0), (n1, s1) = self._points[:2]
        return max(s0 - (s1 - s0) / (n1 - n0) * n0, 0.0)


def _middling(legs: deque[tuple[int, float]]) -> tuple[float, float]:
    """Tokens and seconds of legs of one size that waited little: the mean of those between fastest quarter and half.

    What is fast is told by seconds over the root of tokens: within a size, time may grow with tokens or not at all.
    """
    order = sorted(legs, key=lambda leg: leg[1] / leg[0] ** 0.5)
    quarter = len(order) // 4
    chosen = order[quarter : 2 * quarter + 1]
    return sum(n for n, _ in chosen) / len(chosen), sum(s for _, s in chosen) / len(chosen)


@dataclass(slots=True)
class _Size:
    slow: Latch = field(default_factory=Latch)
    explorer: Explorer = field(default_factory=Explorer)


@dataclass(slots=True)
class _Pair:
    read: Curve = field(default_factory=Curve)
    sizes: dict[int, _Size] = field(default_factory=dict)


class CostModel:
    """What computing and reading take, by node. One per router process."""

    def __init__(self) -> None:
        self._computing: Recent[str, Curve] = Recent(_PREFILL_NODES, Curve)
        self._pairs: Recent[tuple[str, str], _Pair] = Recent(_PAIRS, _Pair)

    def observe(self, prefill: str, decode: str | None, *, computed: int, read: int, seconds: float) -> None:
        """Tell what a prefill leg took. Tell only of legs that P answered, and of which it told what it did.

        Args:
            prefill: address of P.
            decode: address of the D that was read; None if none was.
            computed: tokens of the prompt that P computed: neither read nor in its own prefix cache.
            read: tokens that P read from D.
            seconds: from sending the request to having the answer.
        """
        computing = self._computing.of(prefill)
        computed = max(computed, 1)  # at least the last token of a prompt
        if not read:
            computing.add(computed, seconds)
        elif decode is not None and (without := computing.at(computed)) is not None:
            self._pairs.of((prefill, decode)).read.add(read, max(seconds - without, 0.0))

    def worth_reading(self, prefill: str, decode: str, tokens: int, now: float) -> bool:
        """Whether P should read so many tokens from D. Yes until it is known to be slower, and now and then after.

        Args:
            prefill: address of P.
            decode: address of D.
            tokens: that D holds and P does not.
            now: monotonic seconds.
        """
        pair = self._pairs.of((prefill, decode))
        computing, reading = self._computing.of(prefill).growth(tokens), pair.read.at(tokens)
        if computing is None or reading is None:
            return True
        size = pair.sizes.setdefault(tokens.bit_length(), _Size())
        size.slow.update(now, enter=reading > _SLOWER * computing, leave=reading < _FASTER * computing)
        return not size.slow.on or size.explorer.due()

    def seconds_saved(self, prefill: str, decode: str | None, tokens: int) -> float | None:
        """How much sooner P is done than if it had computed so many tokens: negative if later, None if not known.

        Args:
            prefill: address of P.
            decode: address of the D that it read them from; None if it had them.
            tokens: that it did not compute.
        """
        computing = self._computing.of(prefill).growth(tokens)
        reading = 0.0 if decode is None else self._pairs.of((prefill, decode)).read.at(tokens)
        return None if computing is None or reading is None else computing - reading

    def slow(self) -> dict[tuple[str, str], list[int]]:
        """The pairs of P and D between which reading is slower, and at which lengths: n stands for n to 2 n - 1."""
        found = {
            pair: sorted(1 << (bits - 1) for bits, size in known.sizes.items() if size.slow.on)
            for pair, known in self._pairs.items()
        }
        return {pair: lengths for pair, lengths in found.items() if lengths}
