"""A run: both legs, one after the other in every round, with the same conversations."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import aiohttp

from kvreturn.bench.conversation import Conversation, Replayed, Synthetic, Words
from kvreturn.bench.counters import CountersError, Look, Meters
from kvreturn.bench.drive import Drive, Load
from kvreturn.bench.sample import LEGS, Failure, LegName, Sample
from kvreturn.bench.talk import Talk

_PAUSE = 0.2  # seconds between legs: what the one left behind (frees, returns) is over before the other begins
_LAST_LOOK = 2.0  # seconds for the counters of a leg that was stopped
_WARM_UP = (400, 100)  # tokens
_FEW = 8


@dataclass(frozen=True, slots=True)
class Leg:
    """One way to play.

    Attributes:
        talk: how to ask.
        meters: its counters.
    """

    talk: Talk
    meters: Meters


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be played.

    Attributes:
        source: of the conversations.
        conversations: of each leg in each round.
        rounds: how often both legs are played.
        load: how conversations come.
        seed: of all that is drawn.
    """

    source: Synthetic | Replayed
    conversations: int
    rounds: int
    load: Load
    seed: int = 0


@dataclass(slots=True)
class Played:
    """One leg in one round.

    Attributes:
        leg: which leg.
        round: number of the round.
        samples: its turns.
        failures: turns that were not answered.
        seconds: how long it took.
        look: what was counted meanwhile; None if it was stopped and they could not be read.
        lag: seconds by which this process was late in its slowest moments (99th percentile).
    """

    leg: LegName
    round: int
    samples: Sequence[Sample]
    failures: Sequence[Failure]
    seconds: float = 0.0
    look: Look | None = None
    lag: float = 0.0


@dataclass(slots=True)
class Run:
    """What was played so far.

    Attributes:
        words: how text was made.
        begun: seconds since 1970.
        epoch: the same moment in `time.perf_counter`.
        played: legs in order.
        stopped: whether it ended before its time.
        broken: what ended it, if nobody wanted it to.
    """

    words: Words = field(default_factory=Words)
    begun: float = field(default_factory=time.time)
    epoch: float = field(default_factory=time.perf_counter)
    played: list[Played] = field(default_factory=list)
    stopped: bool = False
    broken: str | None = None

    def samples(self, leg: LegName) -> list[Sample]:
        """All turns of a leg."""
        return [s for p in self.played if p.leg == leg for s in p.samples]

    def failures(self, leg: LegName) -> list[Failure]:
        """All turns of a leg that were not answered."""
        return [f for p in self.played if p.leg == leg for f in p.failures]

    def look(self, leg: LegName) -> Look:
        """What was counted in all rounds of a leg."""
        total = Look()
        for played in self.played:
            if played.leg == leg and played.look:
                total = total.plus(played.look)
        return total


Progress = Callable[[LegName, int, int, int, int], None]
"""Leg, round, turns of the whole run, and how many of them are done: before this leg, and in it."""


async def bench(
    legs: Mapping[LegName, Leg], plan: Plan, session: aiohttp.ClientSession, progress: Progress, run: Run
) -> None:
    """Play all rounds. What is cancelled leaves what was played in `run`.

    Args:
        legs: both.
        plan: what to play.
        session: reads counters.
        progress: takes how far it is.
        run: takes what was played.

    Raises:
        TalkError: the deployment did not answer the first requests.
        CountersError: its counters cannot be read.
    """
    name = secrets.token_hex(4)  # whatever an earlier run left in P's prefix cache is of no use to this one
    for leg in legs.values():
        await leg.meters.look(session)
    run.words = await legs["off"].talk.words(f"{name}-words")
    for leg_name in LEGS:
        await _warm_up(legs[leg_name], run, f"{name}-{leg_name}-warm-up")
    conversations = list(
        islice(plan.source.conversations(_rng(plan.seed), run.words), plan.conversations * plan.rounds)
    )
    done, total = 0, 2 * sum(len(c.asks) for c in conversations)
    for number, batch in enumerate(_batches(conversations, plan.conversations)):
        for leg_name in LEGS if number % 2 == 0 else reversed(LEGS):
            told = partial(progress, leg_name, number, total, done)
            salt = f"{name}-{leg_name}-{number}"
            drive = Drive(legs[leg_name].talk, leg_name, number, run.epoch, salt, told, run.words)
            run.played.append(played := Played(leg_name, number, drive.samples, drive.failures))
            await asyncio.sleep(_PAUSE)
            meters = legs[leg_name].meters
            before = await meters.look(session)
            begun = time.perf_counter()
            try:
                await drive.play(batch, plan.load, _rng(plan.seed + number))
            except asyncio.CancelledError:
                with suppress(CountersError, TimeoutError):
                    async with asyncio.timeout(_LAST_LOOK):
                        played.look = (await meters.look(session)).since(before)
                raise
            finally:
                played.seconds = time.perf_counter() - begun
                played.lag = drive.lag
            played.look = await meters.settled(session, before, len(drive.samples))
            done += sum(len(c.asks) for c in batch)


def _rng(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - to draw the same again, not to keep secrets


def _batches(conversations: Sequence[Conversation], size: int) -> Iterator[list[Conversation]]:
    for begin in range(0, len(conversations), size):
        batch = conversations[begin : begin + size]
        yield [replace(c, name=f"{c.name or 'conversation'}-{begin + i}") for i, c in enumerate(batch)]


async def _warm_up(leg: Leg, run: Run, salt: str) -> None:
    """Two turns before anything is timed: first requests take longer, on real nodes by seconds."""
    first, second = (("user", run.words.text(_rng(0), tokens)) for tokens in _WARM_UP)
    reply = await leg.talk.ask([first], _FEW, salt)
    await leg.talk.ask([first, ("assistant", reply.text), second], _FEW, salt)
