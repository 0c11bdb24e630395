"""Runs sequences: blocks, load, prefill, decode, and what remains of them."""

import asyncio
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as List
from typing import Any

from kvreturn.sim.blocks import BlockPool
from kvreturn.sim.clock import Clock
from kvreturn.sim.config import NodeConfig
from kvreturn.sim.connector import Farewell, StuckError
from kvreturn.sim.connector_stock import StockConnector
from kvreturn.sim.grammar import speak
from kvreturn.sim.holds import Holds
from kvreturn.sim.model import compute, fold, initial_state
from kvreturn.sim.sequence import Sequence, Step
from kvreturn.sim.stats import Counters
from kvreturn.sim.tokenizer import EOS


class Scheduler:
    """All sequences of one engine.

    Args:
        config: the node's settings.
        clock: time.
        counters: where to count.
        spawn: runs something in the background.
    """

    def __init__(
        self,
        config: NodeConfig,
        clock: Clock,
        counters: Counters,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._config = config
        self._clock = clock
        self._counters = counters
        self._spawn = spawn
        self.pool = BlockPool(config.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self.holds = Holds(clock, self._release)
        self.connector: StockConnector | None = None
        self._stopped = False
        self._admission = asyncio.Lock()  # first come, first served
        self._room = asyncio.Event()
        self._prefilling = asyncio.Lock()  # one prompt at a time

    def stop(self) -> None:
        """The engine has ended: nobody is told anything any more."""
        self._stopped = True
        self.holds.stop()

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
        ended = False
        try:
            if self.connector is not None:
                self.connector.arrived(seq)
            self._counters.requests += 1
            self._counters.prompt_tokens += seq.prompt_length
            await self._start(seq)
            self._counters.running += 1
            try:
                state = await self._prefill(seq)
                ended = await self._decode(seq, state, position, emit)
            finally:
                self._counters.running -= 1
        finally:
            if not ended:
                self._end(seq, normally=False)

    async def _start(self, seq: Sequence) -> None:
        """Get blocks, and load what a peer has."""
        self._counters.waiting += 1
        try:
            await self._admit(seq)
            self._counters.local_tokens += seq.local
            if self.connector is not None:
                seq.external = await self._load(seq, self.connector)
                self._counters.read_tokens += seq.external
        finally:
            self._counters.waiting -= 1
        # Loaded blocks are known under the hashes of this node's own tokens, whatever the peer's blocks held.
        self.pool.cache(seq.blocks, seq.hasher.hashes, 0, (seq.local + seq.external) // self._config.block_size)

    async def _load(self, seq: Sequence, connector: StockConnector) -> int:
        try:
            return await connector.load(seq)
        except StuckError:
            self._counters.hung_requests += 1
            try:
                await asyncio.get_running_loop().create_future()  # only a cancel ends it
            finally:
                self._counters.hung_requests -= 1
                self._counters.leaked_blocks += len(seq.blocks)
                seq.blocks = []
            raise

    async def _admit(self, seq: Sequence) -> None:
        if not self._admission.locked() and self._take_blocks(seq):
            return
        beat = self._spawn(self.connector.heartbeat(seq)) if self.connector is not None else None
        try:
            async with self._admission:
                while not self._take_blocks(seq):
                    self._room.clear()
                    await self._room.wait()
        finally:
            if beat is not None:
                beat.cancel()

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
        length = len(seq.tokens)
        start = min(seq.local + seq.external, length - 1)
        async with self._prefilling:
            await self._clock.sleep(self._config.timing.prefill(length - start))
        state = fold(initial_state(seq.job.adapter), self.pool.read(seq.blocks, start))
        state, values = compute(state, seq.inputs(start))
        self.pool.write(seq.blocks, start, values)
        self._counters.computed_tokens += length - start
        self.pool.cache(seq.blocks, seq.hasher.hashes, 0, length // self._config.block_size)
        return state

    async def _decode(self, seq: Sequence, state: int, position: int, emit: Callable[[Step], None]) -> bool:
        """Generate to the end; returns True."""
        job, sampling = seq.job, seq.job.sampling
        speech = speak(state, job.manner, job.choice)
        token, due = next(speech), self._clock.now()
        for count in range(1, sampling.max_tokens + 1):
            while token == EOS and (sampling.ignore_eos or count <= sampling.min_tokens):
                token = speech.send(state)
            seq.tokens.append(token)
            self._counters.generated_tokens += 1
            stop_token = token in sampling.stop_token_ids and count > sampling.min_tokens
            swallow = token == EOS or stop_token
            last = swallow or count == sampling.max_tokens or len(seq.tokens) >= self._config.max_model_len
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
        """Compute the KV of the last token, in a new block if need be."""
        size, position = self._config.block_size, len(seq.tokens) - 1
        seq.hasher.extend(seq.tokens)
        if position // size == len(seq.blocks):
            block = self.pool.allocate((), 1)
            if block is None:
                return await self._preempt(seq)
            seq.blocks += block
        state, values = compute(state, seq.inputs(position))
        self.pool.write(seq.blocks, position, values)
        full = len(seq.tokens) // size
        self.pool.cache(seq.blocks, seq.hasher.hashes, position // size, full)
        return state

    async def _preempt(self, seq: Sequence) -> int:
        """Give up everything, wait for room, and compute it again."""
        self._release(seq.blocks)
        seq.blocks, seq.external = [], 0
        self._counters.running -= 1
        self._counters.waiting += 1
        try:
            await self._admit(seq)
        finally:
            self._counters.waiting -= 1
            self._counters.running += 1
        return await self._prefill(seq)

    def _end(self, seq: Sequence, *, normally: bool) -> dict[str, Any] | None:
        """Free or keep a finished sequence's blocks; returns the handle."""
        farewell = Farewell()
        try:
            if self.connector is not None and not self._stopped:
                farewell = self.connector.finished(seq, normally=normally)
        finally:
            blocks, seq.blocks = seq.blocks, []
            if farewell.keep is not None:
                self.holds.add(seq.request_id, farewell.keep, blocks, farewell.seconds)
            else:
                self._release(blocks)
        return farewell.params

    def _release(self, blocks: List[int]) -> None:
        self.pool.release(blocks)
        self._room.set()
