"""What speaks against using a handle now: its node left the pool, or reads from its engine keep failing."""

from collections import deque
from collections.abc import Callable

from kvreturn.core.cost import CostModel
from kvreturn.core.handle import Handle
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Record
from kvreturn.settings.nodes import Breaker
from kvreturn.upstream.engines import Engines, rank_of
from kvreturn.upstream.forms import Forms
from kvreturn.upstream.pool import Pool

_ENGINES = 1024  # engines whose failures are remembered


class NodeJudge:
    """Implements `kvreturn.core.ports.Judge`.

    Args:
        decode: the pool of decode nodes.
        forms: is told what runs on prefill nodes.
        cost: knows what reading and computing take.
        breaker: when failed reads of one engine's handles stop the use of its handles.
        clock: monotonic seconds.

    Attributes:
        engines: which engine lives where.
    """

    def __init__(
        self, decode: Pool, forms: Forms, cost: CostModel, breaker: Breaker, clock: Callable[[], float]
    ) -> None:
        self._decode = decode
        self._forms = forms
        self._cost = cost
        self._clock = clock
        self.engines = Engines(clock)
        self._failed: dict[str, deque[float]] = {}
        self.apply(breaker)

    def apply(self, breaker: Breaker) -> None:
        """These are the bounds from now on. Failures that were seen count on."""
        self._failures = breaker.failures
        self._window = breaker.window
        self._failed = {engine: deque(times, breaker.failures) for engine, times in self._failed.items()}

    def objection(self, record: Record, handle: Handle, age: float | None = None) -> Outcome | None:
        """See `Judge.objection`."""
        node = record.decode_node
        if node and (node not in self._decode or self.engines.gone(node, handle.engine, age)):
            return Outcome.NODE_GONE
        if self._is_open(handle.engine):
            return Outcome.BREAKER_OPEN
        if not self.worth_reading(record.prefill_node, record.decode_node, handle.tokens):
            return Outcome.SLOWER
        return None

    def worth_reading(self, prefill: str | None, decode: str | None, tokens: int) -> bool:
        """Whether P reads so many tokens from D faster than it computes them, as far as that is known."""
        return not (prefill and decode) or self._cost.worth_reading(prefill, decode, tokens, self._clock())

    def read_failed(self, handle: Handle, *, hung: bool = False) -> None:
        """See `Judge.read_failed`. One that hung costs its turn so much time that it counts for all."""
        times = self._failed.pop(handle.engine, None) or deque(maxlen=self._failures)
        times.extend([self._clock()] * (self._failures if hung else 1))
        self._failed[handle.engine] = times  # in the order of their last failure
        while len(self._failed) > _ENGINES:
            self._failed.pop(next(iter(self._failed)))

    def read_succeeded(self, handle: Handle) -> None:
        """See `Judge.read_succeeded`."""
        self._failed.pop(handle.engine, None)

    def prefilled(self, node: str, engine: str, *, proves: bool) -> None:
        """See `Judge.prefilled`."""
        self.engines.saw(node, engine)
        self._forms.saw(node, engine, proves=proves)

    def decoded(self, node: str, engine: str) -> str:
        """See `Judge.decoded`."""
        self.engines.saw(node, engine)
        return self._decode.seat(node, rank_of(engine))

    def open_breakers(self) -> list[str]:
        """Engines whose handles are not used now."""
        return [engine for engine in self._failed if self._is_open(engine)]

    def _is_open(self, engine: str) -> bool:
        times = self._failed.get(engine)
        return bool(
            times
            and len(times) == self._failures
            and times[-1] - times[0] < self._window
            and self._clock() - times[-1] < self._window
        )
