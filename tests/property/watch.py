"""Who works for which turn, and where turns and returns are held up."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime

from kvreturn.sim import ManualClock

_RETURN_DEADLINE = 30.0  # seconds; the default of `returns.deadline`, which the router itself takes by real time
REQUEST: ContextVar[str] = ContextVar("request", default="")
"""The router's id of the request that the current task works for: the name of the turn, a dot, a number."""

Where = str
"""A point at which a turn can be held up: `send` (a message of Envoy's), `between` the legs, in node `P` or `D`; for
those of a return, see `history.Back`."""


@dataclass
class Gate:
    """Holds up one turn when it comes to a point for the nth time."""

    where: Where
    nth: int
    passed: int = 0
    reached: bool = False
    _opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def at(self, where: Where) -> None:
        if where == self.where:
            self.passed += 1
            if self.passed == self.nth:
                self.reached = True
                await self._opened.wait()

    def open(self) -> None:
        self._opened.set()


@dataclass
class Watch:
    """Knows which turn a node works for, and what happens at all.

    Attributes:
        turn: name of the turn whose exchange the current task is a part of.
        gates: by turn.
        rendered: date and time of day at which a request's prompt was rendered, by the id of the request.
        events: grows with everything that happens.
        exchanges: how many exchanges have begun.
        returning: names of the returns that wait or run; `r` instead of `t`, and the number of the turn.
        probes: by prefill node, how many requests asked it what it is: each may leave a pin of one block.
        away: prefill nodes that the next request cannot reach.
    """

    turn: ContextVar[str] = field(default_factory=lambda: ContextVar("turn", default=""))
    gates: dict[str, Gate] = field(default_factory=dict)
    rendered: dict[str, datetime] = field(default_factory=dict)
    events: int = 0
    exchanges: int = 0
    returning: set[str] = field(default_factory=set)
    probes: Counter[str] = field(default_factory=Counter)
    away: set[str] = field(default_factory=set)
    _deadlines: dict[str, asyncio.Timeout] = field(default_factory=dict)

    def new_id(self) -> str:
        """In place of the router's random ids."""
        self.events += 1
        return f"{self.turn.get()}.{self.events}"

    async def at(self, where: Where, turn: str) -> None:
        self.events += 1
        gate = self.gates.get(turn)
        if gate:
            await gate.at(where)

    def let_returns_go(self) -> None:
        """Open the gates of all returns."""
        for name in self.returning:
            if name in self.gates:
                self.gates[name].open()

    @contextlib.asynccontextmanager
    async def deadline(self, clock: ManualClock | None = None) -> AsyncIterator[None]:
        """While a return is in here, its time may be over: by `too_late`, or by the clock."""
        name = self.turn.get()
        async with asyncio.timeout(None) as limit:
            self._deadlines[name] = limit
            timer = asyncio.create_task(self._expire(clock, name)) if clock else None
            try:
                yield
            finally:
                if timer:
                    timer.cancel()

    async def _expire(self, clock: ManualClock, name: str) -> None:
        await clock.sleep(_RETURN_DEADLINE)
        self.too_late(name)

    def too_late(self, name: str) -> None:
        """The time of a return is over."""
        self._deadlines[name].reschedule(asyncio.get_running_loop().time())


class NodeClock:
    """The common clock as one node has it: every moment at which work could take time is a gate."""

    def __init__(self, clock: ManualClock, watch: Watch, where: Where) -> None:
        self._clock = clock
        self._watch = watch
        self._where = where

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> datetime:
        self._watch.rendered[REQUEST.get()] = self._clock.wall()
        return self._clock.wall()

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:  # not a timer
            await self._watch.at(self._where, REQUEST.get().partition(".")[0])
        await self._clock.sleep(seconds)
