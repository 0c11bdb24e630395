"""How turns and returns pass through router, P and D. The steps and their times are those of the simulated nodes."""

from collections.abc import Iterable
from dataclasses import dataclass

from scale.figures import Figures, Served, Tally, figures
from scale.loop import Loop, Steps
from scale.memory import BLOCK, Memory
from scale.nodes import DecodeNode, Pin, PrefillNode, Talk
from scale.rates import Rates
from scale.router import LOOK, SETTINGS, Router, Way
from scale.workload import Turn

_BUSY_LOOK = 0.02  # seconds between looks at a P that has too much to do for a return


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is modelled.

    Attributes:
        rates: of the nodes.
        pairs: of P and D, all in one pool of each.
        ttl: seconds for which D keeps a turn's blocks (vLLM's `decoder_kv_blocks_ttl`).
        budget: share of D's memory that pins may keep (our connector's `retention_budget`).
        prefill_room: tokens of KV on each P; None for what the rates say.
        decode_room: the same for each D.
        caching: whether P has a prefix cache.
        shared: tokens of the system prompt that all conversations have in common.
        block: tokens of a block.
        threshold: tokens from which on P reads rather than computes (vLLM's `kv_recompute_threshold`).
    """

    rates: Rates
    pairs: int = 1
    ttl: float = 480.0
    budget: float = 0.5
    prefill_room: int | None = None
    decode_room: int | None = None
    caching: bool = True
    shared: int = 0
    block: int = BLOCK
    threshold: int = 64


class Serving:
    """All nodes and the router.

    Args:
        deployment: of what.
        way: to serve.
        tally: counts.
    """

    def __init__(self, deployment: Deployment, way: Way, tally: Tally) -> None:
        rates, loop = deployment.rates, Loop()
        self.loop = loop
        self._deployment, self._way, self._tally = deployment, way, tally
        p_room, d_room = deployment.prefill_room or rates.room, deployment.decode_room or rates.room
        block, shared, ttl = deployment.block, deployment.shared, deployment.ttl
        self.prefill: list[PrefillNode] = []
        self.decode: list[DecodeNode] = []
        for i in range(deployment.pairs):
            cache = Memory(loop, p_room, block, shared, caching=deployment.caching)
            self.prefill.append(PrefillNode(loop, f"p{i}", rates.prefill, cache, SETTINGS.concurrency))
            memory = Memory(loop, d_room, block, shared)
            self.decode.append(DecodeNode(loop, f"d{i}", rates.decode, memory, (ttl, deployment.budget)))
        self.router = Router(loop, way, self.prefill, self.decode, ttl)

    def run(self, conversations: Iterable[tuple[float, list[Turn]]], until: float) -> Figures:
        """Serve them.

        Args:
            conversations: seconds since the one before, and turns.
            until: seconds since the start at which to stop.
        """
        self.loop.spawn(self._arrive(conversations))
        self.loop.spawn(self._look())
        self.loop.run(until)
        return figures(self._way.name, self._tally, self._deployment.pairs, self.router.choices)

    def converse(self, talk: Talk, turns: Iterable[Turn]) -> Steps:
        """One conversation from its first turn to its last."""
        gap: float | None = None
        for turn in turns:
            if talk.turns:
                gap = turn.gap
                yield gap
            yield from self.turn(talk, turn, gap)

    def _arrive(self, conversations: Iterable[tuple[float, list[Turn]]]) -> Steps:
        for number, (delay, turns) in enumerate(conversations):
            yield delay
            self.loop.spawn(self.converse(Talk(number), turns))

    def _look(self) -> Steps:
        """The router reads the nodes' metrics, and has D's with too little room emptied."""
        while True:
            yield LOOK
            for p in self.prefill:
                p.look()
            self._tally.worked(self.loop.now, sum(p.busy for p in self.prefill))
            for d in self.decode:
                d.look()
                if self._tally.counts(self.loop.now):
                    self._tally.pinned.append(d.pinned / d.memory.capacity)
                if self._way.mode == "auto":
                    self._recall(d)

    def _recall(self, d: DecodeNode) -> None:
        for _ in range(SETTINGS.concurrency):
            pin = next((pin for pin in d.pins.values() if pin.recallable), None)
            if pin is None or not self.router.recalls(pin.talk, d):
                return
            pin.recallable = False
            self.loop.spawn(self._return(pin.talk, pin, "", watched=False))

    def turn(self, talk: Talk, turn: Turn, gap: float | None) -> Steps:
        """One turn, to the end of its answer; `gap` is None for a first one."""
        loop, asked, before = self.loop, self.loop.now, talk.prompt
        held = max(talk.length - 1, 0)
        if talk.returning:
            talk.waiter = loop.current
            yield from loop.wait(SETTINGS.wait)
            talk.waiter = None
        talk.asking = True
        pin, talk.pin, returned, talk.returned = talk.pin, None, talk.returned, 0
        prompt = talk.length + turn.new
        p = self.router.prefill(talk)
        p.load += prompt
        outcome = "disabled" if self._way.mode is None else "no_handle" if talk.turns else "first_turn"
        begun = loop.now
        objection = self.router.objection(talk, pin) if pin else ""
        if pin and objection and talk.keeper:
            talk.keeper.unpin(pin, objection)
        yield self._deployment.rates.front
        p.loading += 1
        local = yield from p.memory.admit(talk.number, prompt, prompt)
        read = 0
        if pin and talk.keeper:
            read = yield from self._read(talk.keeper, pin, local)
            short = "below_threshold" if pin.gone == "read" else pin.gone
            outcome = "hit" if read or local + BLOCK >= pin.tokens else objection or short
            if p is talk.prefill and not objection:
                self.router.noticed(p, kept=local + BLOCK >= before)
        p.loading -= 1
        yield p.compute(max(prompt - local - read, 1))
        p.load -= prompt
        self.router.prefilled(p, talk.keeper, max(prompt - local - read, 1), read, loop.now - begun)
        if returned:
            outcome = self.router.came(talk, p, local, returned, before)
        d = self.router.decode(talk)
        d.load += 1
        there = yield from d.memory.admit(talk.number, prompt, prompt + turn.output - 1)
        yield d.timing.transfer(prompt - there)
        p.memory.release(talk.number, prompt)
        yield d.compute(1)
        first = loop.now - asked
        self._tally.served(Served(asked, first, talk.turns > 0, prompt, held, local, read, prompt - there, outcome))
        yield (turn.output - 1) * d.timing.decode()
        d.load -= 1
        talk.length, talk.prompt, talk.prefill, talk.decode = prompt + turn.output, prompt, p, d
        talk.turns += 1
        talk.asking = False
        self._leave(talk, turn, d, gap)

    def _read(self, d: DecodeNode, pin: Pin, local: int) -> Steps:
        """P reads from D what it has not, and D frees it all. Gives the number of tokens."""
        wanted = pin.tokens - local
        if pin.gone:
            return 0
        pin.reading = True
        if wanted >= self._deployment.threshold:
            yield d.timing.transfer(wanted)
        d.unpin(pin, "read")
        return wanted if wanted >= self._deployment.threshold else 0

    def _leave(self, talk: Talk, turn: Turn, d: DecodeNode, gap: float | None) -> None:
        """A turn has ended; D holds what it has computed."""
        tokens = talk.length - 1
        if self._way.mode is None:
            d.memory.release(talk.number, tokens)
            return
        pin = d.pin(talk, tokens)
        talk.pin, talk.keeper = pin, d
        if pin and self.router.choose(talk, pin, turn.finish, gap).eager:
            self.loop.spawn(self._return(talk, pin, turn.finish, watched=True))

    # --- a return ---

    def _return(self, talk: Talk, pin: Pin, finish: str, *, watched: bool) -> Steps:
        p, loop, begun = talk.prefill, self.loop, self.loop.now
        assert p
        if p.slots:
            p.slots -= 1
        else:
            p.returns.append(loop.current)
            if not (yield from loop.wait(SETTINGS.patience)):
                p.returns.remove(loop.current)
                pin.recallable = not watched
                return
        while p.load > SETTINGS.prefill_load and loop.now - begun < SETTINGS.patience:
            yield _BUSY_LOOK
        if loop.now - begun >= SETTINGS.patience:
            pin.recallable = not watched
        elif talk.pin is pin and not pin.gone:
            talk.pin, talk.returning = None, True
            arrived = yield from self._send(talk, pin, p)
            talk.returning = False
            if talk.waiter:
                loop.wake(talk.waiter)
            if arrived and not talk.asking:  # else its turn did not wait
                talk.returned = pin.tokens
                if watched:
                    self.router.returned(talk, p, finish)
        if p.returns:
            loop.wake(p.returns.popleft(), value=True)
        else:
            p.slots += 1

    def _send(self, talk: Talk, pin: Pin, p: PrefillNode) -> Steps:
        """Have P read back. Gives whether D still had it."""
        tokens = pin.tokens
        assert talk.keeper
        keeper = talk.keeper
        yield self._deployment.rates.front
        p.loading += 1
        local = yield from p.memory.admit(talk.number, tokens, tokens)
        read = yield from self._read(keeper, pin, local)
        p.loading -= 1
        yield p.compute(max(tokens - local - read, 1))
        p.memory.release(talk.number, tokens)
        if self._tally.counts(self.loop.now):
            self._tally.returned += read
        return pin.gone == "read"
