"""Driving a turn's request side: performs its effects until it decides."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Ask, Await, Effect, Forward, Recall, Refuse, Take
from kvreturn.core.turn import Turn
from kvreturn.server.intake import scrubbed
from kvreturn.server.record import TurnRecord
from kvreturn.server.world import World
from kvreturn.telemetry.tracing import fail

T = TypeVar("T")
# A larger body is worked on in a thread: parsing and digesting take 2.5 ms per megabyte, for which all other streams of
# this process would stand still. Up to there the way to the thread and back would cost the turn more than it spares
# the others, whom most of the work keeps from the interpreter anyway. Once that is done, splicing takes a tenth of it.
_LARGE, _HUGE = 1 << 20, 4 << 20


async def drive(
    turn: Turn, body: bytes, world: World, record: TurnRecord, headers: Mapping[str, str]
) -> Forward | Refuse:
    """Run the request side of a turn.

    Args:
        turn: the turn.
        body: the client's whole body.
        world: performs the effects.
        record: is told of them.
        headers: go with the requests to prefill nodes.
    """
    record.size = len(body)
    begun = world.clock()
    steps = turn.request(body)
    result: Any = None
    asked = itertools.count(1)

    def step() -> tuple[Effect | None, Forward | Refuse | None]:
        try:
            return steps.send(result), None
        except StopIteration as stop:
            return None, stop.value

    try:
        while True:
            # Where the router proves, it digests the prompt's tokens too.
            parses = result is None or turn.policy.proof == "router"
            effect, decision = await _apart(step, len(body), _LARGE if parses else _HUGE)
            if decision is not None:
                return decision
            if isinstance(effect, Take):
                with record.trace.step("take") as span:
                    result = await world.take(effect.keys)
                    if result.reason is Outcome.STORE_UNAVAILABLE:
                        fail(span, result.reason.value)
            elif isinstance(effect, Recall):
                with record.trace.step("recall"):
                    result = await world.recall(effect.key)
            elif isinstance(effect, Await):
                with record.waiting(), record.trace.step("await_return"):
                    result = await world.returns.wait(effect.ticket)
            else:
                assert isinstance(effect, Ask)
                # vLLM's engine fails on two live requests of one id, so no client's id goes there.
                named = {**headers, "x-request-id": f"{record.request}-p{next(asked)}"}
                left = begun + turn.policy.timeout - world.clock()
                with record.prefill_leg(effect.path) as traced:
                    result = await world.client.ask(effect, {**named, **traced}, left)
                    record.replied(result)
    finally:
        with contextlib.suppress(ValueError):  # the client left while a thread is at work: it ends by itself
            steps.close()


async def scrub(body: bytes, headers: Mapping[str, str]) -> Forward | Refuse:
    """What becomes of a body that is no turn of ours."""
    return await _apart(lambda: scrubbed(body, headers), len(body))


async def _apart(work: Callable[[], T], size: int, limit: int = _LARGE) -> T:
    return await asyncio.to_thread(work) if size > limit else work()
