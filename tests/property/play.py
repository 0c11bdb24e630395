"""Plays a history: the harness is Envoy and all clients, and checks after every step what must always hold."""

import asyncio
import json
import random
from dataclasses import dataclass, field

import aiohttp

from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from kvreturn.core.handle import PARAMS
from property.client import Asked, Conversation
from property.cluster import Cluster, Gate, open_cluster
from property.history import Fail, History, Pause, Restart, Step, Together, Turn, Wait
from property.verdict import SECRETS, Tally, Told, compare
from support.cuts import randomly
from support.extproc import ALL_MODES, Envoy, Modes, Request, Response
from support.harness import outcomes
from support.messages import body_message, headers_message
from support.streams import LocalStream

_PIECES = (1_000_000, 20_000, 3_000, 700, 150, 60)  # mean bytes of what a node's response comes in
_LEASE = 30.0  # seconds; vLLM's `kv_lease_duration`
_JSON = {"content-type": "application/json"}
_FOR_GOOD = 1_000.0  # seconds after which no TTL and no lease is left


class HeldStream(LocalStream):
    """A stream on which a message can be held up."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._watch, self._name = cluster.watch, name
        super().__init__(cluster.router.service)

    async def send(self, message: pb.ProcessingRequest) -> None:
        await self._watch.at("send", self._name)
        await super().send(message)


class Exchange(Envoy):
    """One exchange; the node's connection may break in the midst of its response."""

    def __init__(self, stream: LocalStream, modes: Modes) -> None:
        super().__init__(stream, modes)
        self.stream = stream

    async def respond_in_part(self, response: Response) -> None:
        """The response begins, and does not end."""
        side = self._sides["response"]
        headers = {":status": str(response.status), **response.headers}
        side.headers_sent(headers, end=False)
        await self._give(headers_message("response", headers, node=response.node))
        await self._until(lambda: not side.headers_due)
        for data in response.pieces:
            side.body_sent(data, end=False)
            await self._give(body_message("response", data))
        await self._until(lambda: side.settled)

    async def reset(self) -> None:
        """The client has left, or the node."""
        self.stream.cancel()
        await asyncio.gather(self.stream.task, return_exceptions=True)


@dataclass
class Run:
    """A turn that is under way."""

    name: str
    turn: Turn
    talk: Conversation
    asked: Asked
    disturbed: int | None
    task: "asyncio.Task[Told | None] | None" = None
    gate: Gate | None = None
    due: int = 0
    given_up: bool = False


@dataclass
class Player:
    """Plays one history."""

    cluster: Cluster
    history: History
    tally: Tally
    talks: list[Conversation] = field(init=False)
    held: list[Run] = field(default_factory=list)
    exchanges: int = 0

    def __post_init__(self) -> None:
        self.talks = [Conversation(self.history.setup, talk) for talk in self.history.setup.talks]

    async def play(self) -> None:
        for number, step in enumerate(self.history.steps):
            await self._step(step, number)
            self._check_engines()
            for run in [run for run in self.held if run.due <= number]:
                self.held.remove(run)
                await self._go_on(run)
        for run in self.held:
            await self._go_on(run)
        await self._check_end()

    async def _step(self, step: Step, number: int) -> None:
        cluster = self.cluster
        match step:
            case Turn():
                await self._turn(step, number)
            case Together():
                runs = [self._start(turn) for turn in step.turns]
                for run in runs:
                    await self._finish(run)
            case Wait():
                await cluster.clock.advance(step.seconds)
            case Restart():
                await cluster.restart(step.who)
            case Fail():
                cluster.disturbed += 1
                cluster.delayed |= step.kind == "delay"
                node = cluster.p if step.who == "P" else cluster.d
                node.faults.clear()
                for path in ("/v1/chat/completions", "/v1/completions"):
                    node.faults.add(path, step.kind, status=step.status, seconds=16.0)

    # --- turns ---

    def _start(self, turn: Turn) -> Run:
        self.exchanges += 1
        name = f"t{self.exchanges}"
        talk = self.talks[turn.talk % len(self.talks)]
        # None: a fault waits for whoever comes next.
        disturbed = None if self._faults() else self.cluster.disturbed
        run = Run(name, turn, talk, talk.ask(turn), disturbed)
        if turn.pause:
            run.gate = self.cluster.watch.gates[name] = Gate(turn.pause.where, turn.pause.nth)
        run.task = asyncio.create_task(self.exchange(run))
        return run

    async def _turn(self, turn: Turn, number: int) -> None:
        run = self._start(turn)
        pause, gate, task = turn.pause, run.gate, run.task
        if pause is None or gate is None:
            await self._finish(run)
            return
        assert task
        await self.cluster.until(lambda: task.done() or gate.reached, "a turn before its pause")
        if not gate.reached:
            await self._finish(run)
            return
        await self._meanwhile(pause)
        if pause.then == "abort":
            await self._abort(run)
        elif pause.then == "later":
            run.due = number + 1 + turn.at % 4
            self.held.append(run)
        else:
            await self._go_on(run)

    async def _meanwhile(self, pause: Pause) -> None:
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
        assert run.task
        self.tally.fates["aborted"] += 1
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)
        del self.cluster.watch.gates[run.name]
        engines = (self.cluster.p.engine, self.cluster.d.engine)
        mine = f"-{run.name}."
        await self.cluster.until(
            lambda: not any(mine in live for engine in engines for live in engine._live), "a node after an abort"
        )

    async def _finish(self, run: Run) -> None:
        task = run.task
        assert task
        await self.cluster.until(task.done, f"turn {run.name} {run.turn}")
        told = task.result()
        self.cluster.watch.gates.pop(run.name, None)
        calm = run.disturbed == self.cluster.disturbed
        if run.given_up:
            self.tally.fates["given up"] += 1
            return
        if told is None or not told.whole:
            self.tally.fates["broken"] += 1
            assert not calm, f"nothing happened, and the client got no answer to {run.turn}"
            return
        check_secrets(told)
        expected = await self._expected(run)
        if told.complete:
            self.tally.fates["complete"] += 1
            self.tally.compared += 1
            compare(told, expected)
            run.talk.answered(run.asked, told.answer(run.asked.choices - 1))
            return
        self.tally.fates["incomplete" if told.status == 200 else f"status {told.status}"] += 1
        if told.status == 400:
            run.talk.refused()
        assert not calm or told.status == expected.status, f"{told.status} in place of {expected.status}: {told.body!r}"

    def _faults(self) -> bool:
        return any(queue for node in (self.cluster.p, self.cluster.d) for queue in node.faults._queues.values())

    async def _expected(self, run: Run) -> Told:
        """What the plain node says, at the time at which the prompt was rendered: by D if it did, else by P."""
        cluster = self.cluster
        rendered = {name: at for name, at in cluster.watch.rendered.items() if name.startswith(f"{run.name}.")}
        if rendered:
            cluster.oracle_clock.reading = list(rendered.values())[-1]
        url = cluster.url(cluster.oracle, run.asked.path)
        async with cluster.session.post(url, data=run.asked.plain, headers=_JSON) as answer:
            return Told(answer.status, await answer.read(), run.asked.stream)

    # --- one exchange ---

    async def exchange(self, run: Run) -> Told | None:
        """Returns what the client got; None if its connection broke before it got anything."""
        cluster, turn, asked = self.cluster, run.turn, run.asked
        self.tally.turns += 1
        cluster.watch.turn.set(run.name)
        rng = random.Random(turn.cut)
        exchange = Exchange(HeldStream(cluster, run.name), ALL_MODES[self.history.setup.modes])
        try:
            request = Request(asked.path, randomly(rng, asked.body, 2_000), headers={**_JSON, **asked.headers})
            if await exchange.request(request):
                await self._decode(run, exchange, rng)
            if exchange.client.headers is None or not exchange.client.ended:
                await exchange.reset()
            else:
                await exchange.finish()
        except asyncio.CancelledError:
            await exchange.reset()
            raise
        if exchange.failed:
            raise AssertionError(f"the router failed: {exchange.failed}")
        client = exchange.client
        return Told(client.status, client.body, asked.stream, client.ended) if client.headers else None

    async def _decode(self, run: Run, exchange: Exchange, rng: random.Random) -> None:
        """D's leg."""
        cluster, up = self.cluster, exchange.upstream
        assert up.node == cluster.d.address
        _check_forwarded(run.asked, up.body)
        begun = cluster.clock.now()
        await cluster.watch.at("between", run.name)
        if cluster.clock.now() - begun >= _LEASE:
            # P has given the blocks up, and in vLLM 0.32.0 D does not see that. Envoy is not that slow.
            run.given_up = True
            return
        headers = {name: value for name, value in (up.headers or {}).items() if not name.startswith(":")}
        status, kind, body, whole = await _read(cluster, run.asked.path, headers, up.body)
        cluster.watch.events += 1
        if status:
            pieces = randomly(rng, body, _PIECES[run.turn.cut]) or [b""]
            response = Response(pieces, status, {"content-type": kind}, node=cluster.d.address)
            await (exchange.respond(response) if whole else exchange.respond_in_part(response))

    # --- what must hold ---

    def _check_engines(self) -> None:
        for name, node in (("P", self.cluster.p), ("D", self.cluster.d)):
            stats = node.stats
            assert stats.engine_alive, f"{name}'s engine died"
            assert stats.hung_requests == 0, f"a request hangs on {name}"
            assert stats.leaked_blocks == 0, f"{name} leaks blocks"

    async def _check_end(self) -> None:
        """Nothing is left of anything, once its time is over."""
        cluster, tally = self.cluster, self.tally
        await cluster.clock.advance(_FOR_GOOD)
        nodes = (cluster.p, cluster.d)
        await cluster.until(lambda: not any(n.engine._live for n in nodes), "a node at the end")
        self._check_engines()
        for name, node in (("P", cluster.p), ("D", cluster.d)):
            stats = node.stats
            left = (stats.blocks_used, stats.pins, stats.leases, stats.running, stats.waiting)
            assert left == (0, 0, 0, 0, 0), f"{name} is left with {stats}"
        for router in cluster.routers:
            assert not router.service.running, "the router is left with streams"
            for pool in (router.world.prefill, router.world.decode):
                assert all(node.load == 0 for node in pool._nodes.values()), "the router is left with load"
            tally.outcomes.update(outcomes(router.world.metrics))
        tally.read_tokens += cluster.read_tokens + cluster.p.stats.read_tokens


async def _read(cluster: Cluster, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes, bool]:
    """D's response: status (0: none), content type, body, and whether it is whole."""
    data = bytearray()
    status, kind = 0, ""
    try:
        async with cluster.session.post(cluster.url(cluster.d, path), data=body, headers=headers) as response:
            status, kind = response.status, response.headers["content-type"]
            async for chunk in response.content.iter_any():
                data += chunk
    except aiohttp.ClientError:
        return status, kind, bytes(data), False
    return status, kind, bytes(data), True


def _check_forwarded(asked: Asked, body: bytes) -> None:
    """D gets what the client sent, and transfer parameters of ours at most."""
    forwarded = json.loads(body)
    forwarded.pop(PARAMS, None)
    sent = json.loads(asked.plain)
    if "vllm_xargs" in forwarded:
        assert forwarded.pop("vllm_xargs") == {"kept": "yes"}
    assert forwarded == sent, f"{forwarded} was made of {sent}"


def check_secrets(told: Told) -> None:
    """Nothing of handles reaches a client."""
    found = [secret for secret in SECRETS if secret in told.body]
    assert not found, f"the client sees {found}: {told.body!r}"


async def play(history: History, tally: Tally) -> None:
    """Play a history on nodes and a router of its own.

    Raises:
        WrongAnswerError: a client got a wrong answer.
        AssertionError: something else that must never happen did.
    """
    async with open_cluster(history.setup) as cluster:
        await Player(cluster, history, tally).play()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks are left: {left}"
    tally.histories += 1
    tally.combinations[history.setup.template, history.setup.tokenizer] += 1
