"""Plays a history, and checks at every step what must always hold."""

import asyncio
import logging
from dataclasses import dataclass, field

from property.client import Asked, Conversation
from property.cluster import Cluster, Node, open_cluster
from property.exchange import JSON, GivenUpError, exchange
from property.history import Away, Back, Fail, History, Pause, Restart, Step, Together, Turn, Wait
from property.holding import name_of_return
from property.invariants import check_end, check_engines
from property.verdict import Tally, Told, check_secrets, compare
from property.watch import Gate

_FAR = 100  # steps, by which everything is due
_WORK = ("/v1/chat/completions", "/v1/completions")


@dataclass
class Run:
    """A turn that is under way.

    Attributes:
        name: of it.
        turn: what the history says.
        talk: whose it is; None if nobody goes on with it.
        asked: the request.
        disturbed: the cluster's at the beginning; None if a fault waited for whoever came next.
        task: plays the exchange.
        gate: holds it up.
        back: holds up its return.
        due: number of the step after which it goes on, or its return does.
    """

    name: str
    turn: Turn
    talk: Conversation | None
    asked: Asked
    disturbed: int | None
    task: "asyncio.Task[Told | None]"
    gate: Gate | None = None
    back: Gate | None = None
    due: int = 0


@dataclass
class Player:
    """Plays one history."""

    cluster: Cluster
    history: History
    tally: Tally
    talks: list[Conversation] = field(init=False)
    held: list[Run] = field(default_factory=list)
    held_returns: list[Run] = field(default_factory=list)
    runs: int = 0
    number: int = 0  # of the step

    def __post_init__(self) -> None:
        self.talks = [Conversation(self.history.setup, talk) for talk in self.history.setup.talks]

    async def play(self) -> None:
        for number, step in enumerate(self.history.steps):
            self.number = number
            await self._step(step)
            check_engines(self.cluster)
            await self._resume(self.number)
        await self._resume(self.number + _FAR)
        await check_end(self.cluster, self.tally)

    async def _resume(self, number: int) -> None:
        """Let go on what is due after that step."""
        for run in [run for run in self.held if run.due <= number]:
            self.held.remove(run)
            await self._go_on(run)
        for run in [run for run in self.held_returns if run.due <= number]:
            self.held_returns.remove(run)
            assert run.back
            run.back.open()
            await self._returned(run)

    async def say(self, asked: Asked) -> Told:
        """Have one request answered, and the answer compared."""
        run = self._start(Turn(), None, asked)
        await self._finish(run)
        told = run.task.result()
        assert told
        return told

    async def _step(self, step: Step) -> None:
        match step:
            case Turn():
                await self._turn(step)
            case Together():
                for run in [self._ask(turn) for turn in step.turns]:
                    await self._finish(run)
            case Wait():
                await self.cluster.clock.advance(step.seconds)
            case Restart():
                await self.cluster.restart(step.who)
            case Fail():
                self._fail(step)
            case Away():
                self.cluster.disturbed += 1
                self.cluster.watch.away = {self._node(step.who).address}

    def _node(self, who: str) -> Node:
        return self.cluster.nodes.get(who, self.cluster.p)

    def _fail(self, step: Fail) -> None:
        cluster = self.cluster
        cluster.disturbed += 1
        cluster.delayed |= step.kind == "delay"
        node = self._node(step.who)
        node.faults.clear()
        for path in ("/tokenize",) if step.tokenizing else _WORK:
            node.faults.add(path, step.kind, status=step.status, seconds=16.0)

    # --- turns ---

    def _ask(self, turn: Turn) -> Run:
        talk = self.talks[turn.talk % len(self.talks)]
        return self._start(turn, talk, talk.ask(turn))

    def _start(self, turn: Turn, talk: Conversation | None, asked: Asked) -> Run:
        self.runs += 1
        self.tally.turns += 1
        name = f"t{self.runs}"
        gate = Gate(turn.pause.where, turn.pause.nth) if turn.pause else None
        if gate:
            self.cluster.watch.gates[name] = gate
        back = Gate(turn.back.where, turn.back.nth) if turn.back else None
        if back:
            self.cluster.watch.gates[name_of_return(name)] = back
        disturbed = None if self._faults() else self.cluster.disturbed
        task = asyncio.create_task(exchange(self.cluster, name, asked, turn.cut))
        return Run(name, turn, talk, asked, disturbed, task, gate, back)

    async def _turn(self, turn: Turn) -> None:
        run = self._ask(turn)
        pause, gate = turn.pause, run.gate
        if pause and gate:
            await self.cluster.until(lambda: run.task.done() or gate.reached, f"{turn} before its pause")
        if not (pause and gate and gate.reached):
            await self._finish(run)
            return
        await self._meanwhile(pause)
        if pause.then == "abort":
            self.tally.fates[f"left ({pause.where})"] += 1
            await self._abort(run)
        elif pause.then == "later":
            run.due = self.number + 1 + turn.at % 4
            self.held.append(run)
        else:
            await self._go_on(run)

    async def _meanwhile(self, pause: Pause | Back) -> None:
        for event in pause.meanwhile:
            if isinstance(event, str):
                await self.cluster.restart(event)
            else:
                await self.cluster.clock.advance(event)

    async def _go_on(self, run: Run) -> None:
        assert run.gate
        run.gate.open()
        await self._finish(run)

    async def _abort(self, run: Run) -> None:
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)
        gate, engines, mine = run.gate, [node.engine for node in self.cluster.nodes.values()], f"-{run.name}."
        assert gate
        await self.cluster.until(
            lambda: not any(mine in live for engine in engines for live in engine._live), "a node after an abort"
        )
        gate.open()  # a read that has begun outlives its request
        del self.cluster.watch.gates[run.name]
        await self._return(run)
        self._forget_faults()

    async def _finish(self, run: Run) -> None:
        await self.cluster.until(run.task.done, f"{run.turn}")
        self.cluster.watch.gates.pop(run.name, None)
        calm = run.disturbed == self.cluster.disturbed
        await self._return(run)
        self._forget_faults()
        try:
            told = run.task.result()
        except GivenUpError:
            self.tally.fates["given up"] += 1
            return
        if told is None or not told.whole:
            self.tally.fates["broken"] += 1
            assert not calm, f"nothing had happened, and the client got no answer to {run.turn}"
            return
        check_secrets(told)
        expected = await self._expected(run)
        if told.complete:
            self.tally.fates["complete"] += 1
            self.tally.compared += 1
            compare(told, expected)
            if run.talk:
                run.talk.answered(run.asked, told.answer(run.asked.choices - 1))
            return
        self.tally.fates["incomplete" if told.status == 200 else f"status {told.status}"] += 1
        wrong = f"{told.status} in place of {expected.status}: {told.body!r}"
        assert not calm or told.status == expected.status != 200, wrong
        if told.status == 400 and run.talk:
            run.talk.refused()

    # --- returns ---

    async def _return(self, run: Run) -> None:
        """Let a turn's return come to its end, or to where it is held up."""
        back, gate, watch = run.turn.back, run.back, self.cluster.watch
        if not (back and gate):
            await self._returned(run)
            return
        name = name_of_return(run.name)
        await self._until_returned(run, gate)
        if not gate.reached or name not in watch.returning:
            gate.open()  # it may still come there
            return
        self.tally.fates[f"return held ({back.where})"] += 1
        await self._meanwhile(back)
        if back.then == "later":
            run.due = self.number + 1 + run.turn.at % 4
            self.held_returns.append(run)
            return
        if back.then == "late" and name in watch.returning:  # and no router was killed
            watch.too_late(name)
            await self._until_returned(run)
        gate.open()
        await self._returned(run)

    async def _returned(self, run: Run) -> None:
        await self._until_returned(run)
        check_engines(self.cluster)

    async def _until_returned(self, run: Run, gate: Gate | None = None) -> None:
        """Until a return is over, or held up, or perhaps waits for another one that is; or hangs."""
        cluster, name = self.cluster, name_of_return(run.name)
        await cluster.until(
            lambda: (
                name not in cluster.watch.returning
                or bool(gate and gate.reached)
                or bool(self.held_returns)
                or any(node.stats.hung_requests for node in cluster.prefill)
            ),
            f"the return of {run.turn}",
        )

    # --- faults ---

    def _faults(self) -> list[int]:
        """How many faults wait on each node where some do."""
        nodes = self.cluster.nodes.values()
        return [n for n in (sum(map(len, node.faults._queues.values())) for node in nodes) if n]

    def _forget_faults(self) -> None:
        """A fault that has happened on one path does not happen on another."""
        for node in self.cluster.nodes.values():
            if sum(map(len, node.faults._queues.values())) == 1 < len(node.faults._queues):
                node.faults.clear()

    async def _expected(self, run: Run) -> Told:
        """What the plain node says, at the time at which the prompt was rendered: by D if it did, else by P."""
        cluster = self.cluster
        rendered = [at for name, at in cluster.watch.rendered.items() if name.startswith(f"{run.name}.")]
        if rendered:
            cluster.oracle_clock.reading = rendered[-1]
        url = cluster.url(cluster.oracle, run.asked.path)
        async with cluster.session.post(url, data=run.asked.plain, headers=JSON) as answer:
            return Told(answer.status, await answer.read(), run.asked.stream)


class _Errors(logging.Handler):
    """Collects what router, nodes and event loop log as errors: nobody may hide behind a node that is restarted."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.getMessage()} {record.exc_info and record.exc_info[1]!r}")


async def play(history: History, tally: Tally) -> None:
    """Play a history on nodes and a router of its own.

    Raises:
        WrongAnswerError: a client got a wrong answer.
        AssertionError: something else that must never happen did.
    """
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    try:
        async with open_cluster(history.setup) as cluster:
            await Player(cluster, history, tally).play()
    finally:
        logging.getLogger().removeHandler(errors)
    assert not errors.texts
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks are left: {left}"
    tally.histories += 1
