"""Playing conversations: by so many clients that wait for their answers, or as they would arrive, whoever waits."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvreturn.bench.conversation import Conversation, Words
from kvreturn.bench.sample import Failure, LegName, Sample
from kvreturn.bench.talk import Reply, Said, Talk, TalkError

_TICK = 0.02  # seconds
_MS = 1e3


@dataclass(frozen=True, slots=True)
class Load:
    """How conversations come.

    Attributes:
        clients: hold one conversation each at a time, and begin the next one when it is over (closed loop).
        rate: requests per second on average; conversations begin by a Poisson process, however many are still going
            on (open loop). None for a closed loop.
    """

    clients: int = 1
    rate: float | None = None


@dataclass(slots=True)
class Drive:
    """Plays the conversations of one leg in one round.

    Attributes:
        talk: how to ask.
        leg: which one it is.
        round: number of the round.
        epoch: `time.perf_counter` at the run's begin.
        salt: of all its prompts.
        told: called after each turn with how many are over.
        words: makes the text that conversations lack.
        samples: what was answered.
        failures: what was not.
        lags: seconds by which this process itself was late, now and then.
    """

    talk: Talk
    leg: LegName
    round: int
    epoch: float
    salt: str
    told: Callable[[int], None]
    words: Words = field(default_factory=Words)
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)

    @property
    def lag(self) -> float:
        """The 99th percentile of `lags`, in seconds."""
        return sorted(self.lags)[int(len(self.lags) * 0.99)] if self.lags else 0.0

    async def play(self, conversations: Sequence[Conversation], load: Load, rng: random.Random) -> None:
        """Play them all.

        Args:
            conversations: with text or without; it is made when each of them begins, and gone with its end.
            load: how they come.
            rng: of the arrivals.
        """
        watch = asyncio.create_task(self._watch())
        try:
            if load.rate is None:
                waiting = iter(conversations)
                clients = [self._client(number, waiting) for number in range(load.clients)]
            else:
                turns = sum(len(c.asks) for c in conversations) / len(conversations)
                gaps = [rng.expovariate(load.rate / turns) for _ in conversations]
                begins = itertools.accumulate(gaps, initial=0.0)  # the first one begins at once
                clients = [self._later(*each) for each in zip(begins, enumerate(conversations), strict=False)]
            async with asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(client)
        finally:
            watch.cancel()

    async def _client(self, number: int, waiting: Iterator[Conversation]) -> None:
        for conversation in waiting:
            await self._converse(number, conversation)

    async def _later(self, delay: float, numbered: tuple[int, Conversation]) -> None:
        await asyncio.sleep(delay)
        await self._converse(*numbered)

    async def _converse(self, client: int, conversation: Conversation) -> None:
        conversation = await asyncio.to_thread(self.words.fill, conversation)
        said: list[Said] = [("system", conversation.system)] if conversation.system else []
        before = 0
        for turn, ask in enumerate(conversation.asks):
            await asyncio.sleep(ask.gap)
            said.append(("user", ask.text or ""))
            try:
                begun = time.perf_counter()
                reply = await self.talk.ask(said, ask.max_tokens, self.salt)
            except TalkError as e:
                self.failures.append(Failure(self.leg, self.round, turn, conversation.name, str(e)))
                return
            cached = 100.0 * min(before, reply.prompt_tokens) / max(1, reply.prompt_tokens)
            self.samples.append(
                Sample(
                    ttft_ms=reply.ttft * _MS,
                    tpot_ms=_per_token(reply) * _MS,
                    latency_ms=reply.latency * _MS,
                    start_time_ms=(begun - self.epoch) * _MS,
                    input_num_turns=len(said),
                    input_num_tokens=reply.prompt_tokens,
                    output_num_tokens=reply.output_tokens,
                    output_num_chunks=max(0, reply.chunks - 1),
                    output_num_first_chunk_tokens=None,
                    approx_cached_percent=cached,
                    conversation_id=conversation.name,
                    client_id=client,
                    leg=self.leg,
                    round=self.round,
                    turn=turn,
                    text=reply.text,
                )
            )
            self.told(len(self.samples) + len(self.failures))
            said.append(("assistant", reply.text))
            before = reply.prompt_tokens + reply.output_tokens

    async def _watch(self) -> None:
        """Note how late this process comes to its own timers: what it is late, it adds to what it measures."""
        while True:
            due = time.perf_counter() + _TICK
            await asyncio.sleep(_TICK)
            self.lags.append(max(0.0, time.perf_counter() - due))


def _per_token(reply: Reply) -> float:
    behind = reply.output_tokens - 1
    return (reply.latency - reply.ttft) / behind if behind > 0 and reply.latency > reply.ttft else 0.0
