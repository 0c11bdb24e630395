"""Runs sequences: blocks, load, prefill, decode, and what remains of them."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as List
from itertools import count
from typing import Any

from kvreturn.sim.blocks import BlockPool
from kvreturn.sim.connector import EngineDiedError, Farewell, LoadError, Services, StuckError
from kvreturn.sim.connector_stock import StockConnector
from kvreturn.sim.grammar import speak
from kvreturn.sim.holds import Holds
from kvreturn.sim.line import WaitingLine
from kvreturn.sim.model import compute, fold, initial_state
from kvreturn.sim.sequence import Sequence, Step
from kvreturn.sim.stats import BlockUse
from kvreturn.sim.tokenizer import EOS


class Scheduler:
    """All sequences of one engine.

    Args:
        engine: whose.
    """

    def __init__(self, engine: Services) -> None:
        self._engine = engine
        self._config = config = engine.config
        self._clock = engine.clock
        self._counters = engine.counters
        self.pool = BlockPool(config.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.holds = Holds(engine.clock, self._release)
        self.connector: StockConnector | None = None
        self._stopped = False
        self._arrivals = count()
        self._line = WaitingLine(self._take_blocks)
        self._waiting: dict[Sequence, None] = {}
        self._running: dict[Sequence, None] = {}  # in the order in which they were admitted
        self._aborted_loads: dict[Sequence, None] = {}
        self._prefilling = asyncio.Lock()  # one prompt at a time

    def stop(self) -> None:
        """The engine has ended: nobody is told anything any more."""
        self._stopped = True
        self.holds.stop()

    def block_use(self) -> BlockUse:
        """Every block but the null block, by what it is used for."""
        used = self.pool.in_use
        out = BlockUse(free=self.pool.free - self.pool.cached, cached=self.pool.cached)
        out.pinned = len(pinned := used & self.holds.held("pin"))
        out.leased = len(leased := used & self.holds.held("lease") - pinned)
        live = (*self._waiting, *self._running, *self._aborted_loads)
        running = {block for seq in live for block in seq.blocks} - pinned - leased
        out.running = len(running)
        out.leaked = len(used - pinned - leased - running)
        return out

    async def run(self, seq: Sequence, position: int, emit: Callable[[Step], None]) -> None:
        """Run one sequence to its end; cancelling aborts it.

        Args:
            seq: the sequence.
            position: of its job in the request.
            emit: takes every step.

        Raises:
            LoadError: its prompt could not be loaded.
            EngineDiedError: the engine does not survive it.
        """
        seq.rank = (seq.job.priority if self._config.scheduling_policy == "priority" else 0, next(self._arrivals))
        ended = False
        try:
            if self.connector is not None:
                self.connector.arrived(seq)
            self._counters.requests += 1
            self._move(seq, self._waiting)
            await self._start(seq)
            self._move(seq, self._running)
            state = await self._prefill(seq)
            ended = await self._decode(seq, state, position, emit)
        finally:
            if not ended:
                self._end(seq, normally=False)

    def _move(self, seq: Sequence, to: dict[Sequence, None] | None) -> None:
        self._waiting.pop(seq, None)
        self._running.pop(seq, None)
        if to is not None:
            to[seq] = None
        self._counters.waiting, self._counters.running = len(self._waiting), len(self._running)

    async def _start(self, seq: Sequence) -> None:
        """Get blocks, and load what a peer has."""
        await self._admit(seq)
        self._counters.queried_tokens += seq.prompt_length
        self._counters.local_tokens += seq.local
        if self.connector is not None:
            seq.external = await self._load(seq, self.connector)
            self._counters.read_tokens += seq.external
        # Loaded blocks are known under the hashes of this node's own tokens, whatever the peer's blocks held.
        self.pool.cache(seq.blocks, seq.hasher.hashes, 0, (seq.local + seq.external) // self._config.block_size)

    async def _load(self, seq: Sequence, connector: StockConnector) -> int:
        load = self._engine.spawn(connector.load(seq))
        self._counters.loading += 1
        try:
            return await asyncio.shield(load)
        except asyncio.CancelledError:
            if not load.cancelled():
                self._aborted_loads[seq] = None
                self._engine.spawn(self._end_aborted(seq, load))
            raise
        except StuckError:
            self._counters.hung_requests += 1
            try:
                await asyncio.get_running_loop().create_future()  # only a cancel ends it
            finally:
                self._counters.hung_requests -= 1
                self._counters.leaked_blocks += len(seq.blocks)
                seq.blocks = []
            raise
        finally:
            self._counters.loading -= 1

    async def _end_aborted(self, seq: Sequence, load: asyncio.Task[int]) -> None:
        """A read under way cannot be called back: it ends, frees the peer's blocks, and only then ours are free."""
        try:
            await load
        except (LoadError, StuckError):
            pass
        except EngineDiedError:
            self._engine.die()
        finally:
            del self._aborted_loads[seq]
            self._release(seq.blocks)

    async def _admit(self, seq: Sequence) -> None:
        self._line.join(seq)
        assert seq.place is not None
        beat = None
        if self.connector is not None and not seq.place.done():
            beat = self._engine.spawn(self.connector.heartbeat(seq))
        try:
            await seq.place
        finally:
            if beat is not None:
                beat.cancel()
        seq.place = None

    def _take_blocks(self, seq: Sequence) -> bool:
        """Take the cached prefix (never the whole: the last token must be computed) and new blocks for the rest."""
        size, length = self._config.block_size, len(seq.tokens)
        cached = self.pool.lookup(seq.hasher.hashes[: (length - 1) // size])
        blocks = self.pool.allocate(cached, -(-length // size) - len(cached))
        if blocks is None:
            return False
        seq.blocks, seq.local = blocks, len(cached) * size
        return True

    async def _prefill(self, seq: Sequence) -> int:
        """Compute the KV of all tokens that are neither cached nor loaded; returns the state after the last."""
        length, start, done = len(seq.tokens), 0, False
        while not done:
            start = min(seq.local + seq.external, length - 1)
            async with self._prefilling:
                await self._clock.sleep(self._config.timing.prefill(length - start))
            done = not await self._resumed(seq)
        state = fold(initial_state(seq.job.adapter), self.pool.read(seq.blocks, start))
        state, values = compute(state, seq.inputs(start))
        self.pool.write(seq.blocks, start, values)
        self._counters.computed_tokens += length - start
        if length == seq.prompt_length:
            self._counters.prompt_tokens += length
            self._counters.recomputed_tokens += seq.local + seq.external - start
        else:
            self._counters.recomputed_tokens += length - start
        self.pool.cache(seq.blocks, seq.hasher.hashes, 0, length // self._config.block_size)
        return state

    async def _decode(self, seq: Sequence, state: int, position: int, emit: Callable[[Step], None]) -> bool:
        """Generate to the end; returns True."""
        job, sampling = seq.job, seq.job.sampling
        speech = speak(state, job.manner, job.choice)
        token, due = next(speech), self._clock.now()
        for number in range(1, sampling.max_tokens + 1):
            while token == EOS and (sampling.ignore_eos or number <= sampling.min_tokens):
                token = speech.send(state)
            seq.tokens.append(token)
            self._counters.generated_tokens += 1
            stop_token = token in sampling.stop_token_ids and number > sampling.min_tokens
            swallow = token == EOS or stop_token
            last = swallow or number == sampling.max_tokens or len(seq.tokens) >= self._config.max_model_len
            heard = job.listen(token, swallow, last)
            if last or heard.stop is not None:
                # The front end aborts the request in the engine on a stop string, unless it has ended by itself.
                params = self._end(seq, normally=last)
                reason = heard.stop if heard.stop is not None else token if stop_token and token != EOS else None
                finish = "stop" if swallow or heard.stop is not None else "length"
                emit(Step(position, seq, token, heard, finish, reason, params))
                return True
            emit(Step(position, seq, token, heard))
            due += self._config.timing.decode()
            await self._clock.sleep(due - self._clock.now())
            state = await self._append(seq, state)
            token = speech.send(state)
        raise AssertionError("the last step returns")

    async def _append(self, seq: Sequence, state: int) -> int:
        """Compute the KV of the last token, in a new block if need be; returns the state after it."""
        size, position = self._config.block_size, len(seq.tokens) - 1
        seq.hasher.extend(seq.tokens)
        if seq.place is None and position // size == len(seq.blocks):
            self._grow(seq)
        if await self._resumed(seq):
            return await self._prefill(seq)
        state, values = compute(state, seq.inputs(position))
        self.pool.write(seq.blocks, position, values)
        full = len(seq.tokens) // size
        self.pool.cache(seq.blocks, seq.hasher.hashes, position // size, full)
        return state

    def _grow(self, seq: Sequence) -> None:
        """Take one more block; running sequences are preempted, the last first, until there is one."""
        victims: list[Sequence] = []
        while seq not in victims:
            block = self.pool.allocate((), 1)
            if block is not None:
                seq.blocks += block
                break
            by_priority = self._config.scheduling_policy == "priority"
            victim = max(self._running, key=lambda other: other.rank) if by_priority else next(reversed(self._running))
            self._move(victim, self._waiting)
            self.pool.release(victim.blocks)
            victim.blocks, victim.external = [], 0
            victims.append(victim)
        # Nobody who waits may take the freed blocks before `seq` has its own.
        self._counters.preemptions += len(victims)
        for victim in reversed(victims):
            self._line.join(victim)

    async def _resumed(self, seq: Sequence) -> bool:
        """Whether it was preempted; then its blocks are there again, but nothing is in them."""
        if seq.place is None:
            return False
        await seq.place
        seq.place = None
        self._move(seq, self._running)
        return True

    def _end(self, seq: Sequence, *, normally: bool) -> dict[str, Any] | None:
        """Free or keep a finished sequence's blocks; returns the handle."""
        self._move(seq, None)
        self._line.leave(seq)
        farewell = Farewell()
        try:
            if self.connector is not None and not self._stopped:
                farewell = self.connector.finished(seq, normally=normally)
        finally:
            if seq not in self._aborted_loads:
                blocks, seq.blocks = seq.blocks, []
                if farewell.keep is not None:
                    self.holds.add(
                        seq.request_id, farewell.keep, blocks, farewell.seconds, releasable=farewell.releasable
                    )
                else:
                    self._release(blocks)
        return farewell.params

    def _release(self, blocks: List[int]) -> None:
        self.pool.release(blocks)
        self._line.advance()
