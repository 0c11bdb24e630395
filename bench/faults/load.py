"""Agents with the official `openai` client that go on with their conversations whatever happens."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import openai

from faults.deployment import MODEL, Deployment
from kvreturn.demo.leg import Leg, Said
from kvreturn.demo.script import Message, Script

_OPENING = (
    "You work in repository {number} of {run}. " + "Read before you judge, and name the files that you read. " * 12
)
_RESULT = "src/module_{number}.py:{line}: the result is checked against the limit before it is stored\n"
_LINES = 6
_RETRY = 0.2  # seconds until a turn that failed is sent again


@dataclass(frozen=True, slots=True)
class Sent:
    """One request, as its client saw it. Times are those of `time.monotonic`.

    Attributes:
        conversation: its number.
        number: of the turn, from 0.
        begun: when it was sent.
        ended: when its answer ended.
        ttft: milliseconds to the first piece of the answer, None if it failed.
        known: tokens of its prompt that the turn before had too, so that they need not be computed.
        error: what happened to it, empty if it ended well.
        wrong: whether its answer is not what the oracle says.
    """

    conversation: int
    number: int
    begun: float
    ended: float
    ttft: float | None = None
    known: int = 0
    error: str = ""
    wrong: bool = False


@dataclass
class Load:
    """So many agents, each in one conversation at a time.

    Attributes:
        deployment: what they talk to.
        conversations: at a time.
        turns: of each conversation.
        think: seconds between an answer and the next request, on average.
        tokens: longest answer.
        sent: all requests that have ended, unless they are not to be kept.
        keep: whether they are.
        open: requests that are under way, by conversation: when they began.
        answered: turns that were answered, by agent.
        count: requests that have ended.
        failed: of these, those without an answer.
        wrong: of these, those whose answer is not the oracle's.
    """

    deployment: Deployment
    conversations: int = 50
    turns: int = 6
    think: float = 3.5
    tokens: int = 24
    sent: list[Sent] = field(default_factory=list)
    open: dict[int, float] = field(default_factory=dict)
    keep: bool = True
    answered: list[int] = field(default_factory=list)
    count: int = 0
    failed: int = 0
    wrong: int = 0
    _run: str = field(default_factory=lambda: f"{random.SystemRandom().randrange(1 << 32):08x}")
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The agents talk for as long as the context lasts; then they are cut off."""
        gateway = openai.AsyncOpenAI(base_url=self.deployment.gateway, api_key="chaos", max_retries=0, timeout=60)
        oracle = openai.AsyncOpenAI(base_url=self.deployment.oracle, api_key="chaos", max_retries=2, timeout=60)
        async with gateway, oracle:
            self.answered = [0] * self.conversations
            agents = [asyncio.create_task(self._agent(n, gateway, oracle)) for n in range(self.conversations)]
            try:
                yield
                for agent in agents:
                    if agent.done():  # it never ends by itself
                        agent.result()
            finally:
                for agent in agents:
                    agent.cancel()
                await asyncio.gather(*agents, return_exceptions=True)

    async def went_on(self, turns: int, within: float) -> None:
        """Wait until each agent has had so many more answers, or a time in seconds is over."""
        goal = [count + turns for count in self.answered]
        until = time.monotonic() + within
        while time.monotonic() < until and any(a < b for a, b in zip(self.answered, goal, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def _agent(self, agent: int, gateway: openai.AsyncOpenAI, oracle: openai.AsyncOpenAI) -> None:
        await asyncio.sleep(random.uniform(0, self.think))  # noqa: S311 - no secret
        while True:
            number = next(self._numbers)
            script = self._script(number)
            await self._conversation(agent, number, Leg(gateway, MODEL, script), Leg(oracle, MODEL, script))

    async def _conversation(self, agent: int, number: int, ours: Leg, truth: Leg) -> None:
        known = 0
        for turn in range(self.turns):
            begun, said = await self._answered(ours, number, turn)
            ended = time.monotonic()
            wrong = said.text != (await truth.turn(turn)).text
            self._add(Sent(number, turn, begun, ended, said.ttft_ms, known, wrong=wrong))
            known = said.prompt_tokens
            self.answered[agent] += 1
            if wrong:
                return  # from here on the two conversations differ
            pause = random.uniform(0.5, 1.5) * self.think  # noqa: S311 - no secret
            await asyncio.sleep(max(0.0, ended + pause - time.monotonic()))

    async def _answered(self, leg: Leg, number: int, turn: int) -> tuple[float, Said]:
        """Send a turn until it is answered, as an agent does. Returns when that was sent, and the answer."""
        history: list[Message] = list(leg.messages)
        while True:
            leg.messages = list(history)
            begun = self.open[number] = time.monotonic()
            try:
                return begun, await leg.turn(turn)
            except openai.OpenAIError as e:
                self._add(Sent(number, turn, begun, time.monotonic(), error=_name(e)))
            except Exception as e:  # noqa: BLE001 - httpx's own: what a cut stream is in the client
                self._add(Sent(number, turn, begun, time.monotonic(), error=_name(e)))
            finally:
                del self.open[number]
            await asyncio.sleep(_RETRY)

    def _add(self, sent: Sent) -> None:
        self.count += 1
        self.failed += bool(sent.error)
        self.wrong += sent.wrong
        if self.keep:
            self.sent.append(sent)

    def _script(self, number: int) -> Script:
        results = [
            "".join(_RESULT.format(number=number, line=_LINES * n + i) for i in range(_LINES))
            for n in range(self.turns)
        ]
        return Script(
            opening=[{"role": "user", "content": _OPENING.format(number=number, run=self._run)}],
            turns=[[text] for text in results[1:]],
            tools=[],
            max_tokens=self.tokens,
        )


def _name(error: Exception) -> str:
    status = f" {error.status_code}" if isinstance(error, openai.APIStatusError) else ""
    return f"{type(error).__name__}{status}"
