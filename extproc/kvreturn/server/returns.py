"""Eager returns: the queue of what is to go back to prefill nodes, and the requests that bring it there.

One handle is never used for two things: a return starts by replacing the record that holds it. Whoever is first, the
next turn or the return, has it.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from opentelemetry.trace import Span

from kvreturn.core.arrival import ARRIVED, read_return
from kvreturn.core.choice import Choice, Chooser, Fate, Moment, Pressure
from kvreturn.core.left import LeftTurns, Return
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Ask, Awaited, Put, Record
from kvreturn.core.returning import PATH, Form, Job, ReturnError, probe_body, read_probe, return_body
from kvreturn.server.comers import Comers
from kvreturn.server.freeing import ask
from kvreturn.server.tasks import Tasks
from kvreturn.settings.returns import Returns as Settings
from kvreturn.telemetry.tracing import headers_of

if TYPE_CHECKING:
    from kvreturn.server.world import World

# Seconds. A return that waits for room on P keeps D's blocks, for which a request on D may wait that keeps P's. Our
# connector on D lets go of them; where there is none, the return must.
_STOCK = 5.0
log = logging.getLogger("kvreturn.return")
_PROBE_SECONDS = 10.0
_LAST = 1.0  # seconds in which D may be told of returns that were under way to the last
_LOOK = 0.02  # seconds between looks at a busy prefill node
_NOT_SENT = ("busy", "unknown_node")
_FINAL = {"small", "slow_link"}  # why a turn stays on D even if that has no room
_LARGE = 4096  # token ids from which on they are compared in a thread


class Returns:
    """All eager returns of one router.

    Args:
        world: what all exchanges share.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._settings = world.settings.returns
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._tasks = Tasks()
        self._waiting = 0
        self._tenants: Counter[bytes] = Counter()
        self._paced: dict[str, float] = {}  # when the next return to a node may begin
        self._sent: dict[bytes, Return] = {}  # what is in no store any more, and P has not read yet
        self._running: dict[bytes, asyncio.Future[Awaited]] = {}
        self._closed = False
        self._left = LeftTurns()
        self.chooser = Chooser()
        self._comers = Comers(world, self.chooser, self._tasks)

    @property
    def waiting(self) -> int:
        """Returns that wait for their turn."""
        return self._waiting

    @property
    def running(self) -> int:
        """Returns that are under way."""
        return len(self._running)

    def apply(self, settings: Settings) -> None:
        """Returns that begin from now on go by these settings."""
        if settings.concurrency != self._settings.concurrency:
            self._slots.clear()  # whoever waits for one of those, or has it, keeps to it
        self._settings = settings

    # --- what a turn leaves ---

    def offer(self, put: Put, ticket: bytes, credentials: Mapping[str, str]) -> str | None:
        """A turn has ended. Its record is in the store under this ticket, and may go back at once.

        Args:
            put: the turn's.
            ticket: of its record.
            credentials: headers of the turn's request that vLLM's `--api-key` wants.

        Returns:
            What was chosen, and by which rule; None if there was nothing to choose.
        """
        job = put.job
        if job is None or self._closed:
            return None
        choice, task = self._choose(job), Return(ticket, job, put.record, credentials)
        if choice.eager:
            obstacle = self._start(task)
            return f"lazy({obstacle})" if obstacle else f"eager({choice.why})"
        if choice.why not in _FINAL:
            # Nobody has come for it by then: that tells nothing of other turns that end so.
            self._left.add(replace(task, watched=False, until=self._world.clock() + task.record.ttl))
        return f"lazy({choice.why})"

    def _start(self, task: Return) -> str | None:
        """Return it, if that is not too much. Returns why not, in one word."""
        job, settings, result = task.job, self._settings, None
        if job.handle.tokens > settings.max_tokens:
            result = "too_large"
        elif self._waiting >= settings.queue:
            result = "queue_full"
        elif self._tenants[job.tenant] >= settings.per_tenant:
            result = "tenant_limit"
        if result:
            self._world.metrics.returns.labels(result).inc()
        self._tasks.start(self._stay(task) if result else self._run(task))
        return result

    def felt(self, node: str, pressure: Pressure) -> None:
        """A node has told how pressed it is. What was left on a D without room goes back, a little with each look."""
        for _ in range(self._settings.concurrency):
            task = None if self._closed else self._left.oldest(node, self._world.clock())
            if task is None or not self.chooser.recalls(task.job.prefill_node, node, pressure, self._world.clock()):
                return
            self._left.drop(task.ticket)
            self._world.metrics.recalls.inc()
            if self._start(task):
                self._left.add(task)  # later, perhaps
                return

    def taken(self, ticket: bytes) -> None:
        """The next turn has this record."""
        self._left.drop(ticket)

    async def _stay(self, task: Return) -> None:
        """The blocks do not go back. If the next turn may not read them either, D need not keep them."""
        if task.job.lazy:
            return
        nothing = replace(task.record, handle=None, reason=Outcome.DISABLED)
        if await self._world.replace(task.ticket, nothing):
            self.free(task.record, task.credentials)

    def _choose(self, job: Job) -> Choice:
        """Whether a turn's KV is to go back at once."""
        world = self._world
        moment = Moment(
            finish_reason=job.finish_reason,
            tokens=job.handle.tokens,
            gap=job.gap,
            turns=job.turns,
            prefill=world.pressure.of(job.prefill_node),
            decode=world.pressure.of(job.decode_node),
            decode_node=job.decode_node or "",
            ttl=job.ttl,
            # Each answer of "no" is tried now and then, so only who goes by it asks.
            worth_reading=job.mode != "auto"
            or world.judge.worth_reading(job.prefill_node, job.decode_node, job.handle.tokens),
        )
        self._comers.give_up()
        choice = self.chooser.choose(job.mode, moment, job.prefill_node, world.clock())
        world.metrics.return_choices.labels("eager" if choice.eager else "lazy", choice.why).inc()
        return choice

    def came(self, ticket: bytes, fate: Fate, node: str) -> None:
        """The next turn came to this P, which had what went back to it, or had it no more."""
        self._comers.came(ticket, fate, node)

    async def _run(self, task: Return) -> None:
        job, record = task.job, task.record
        self._tenants[job.tenant] += 1
        result = "cancelled"
        span = self._world.tracing.after(record.trace, "return", {"kvreturn.tokens.held": job.handle.tokens})
        try:
            async with self._turn_of(job) as ready:
                result = await self._send(task, span) if ready else "busy"
            if result in _NOT_SENT:
                await self._stay(task)
                if not task.watched:
                    self._left.add(task)  # later, perhaps
            if task.watched and result in ARRIVED:
                self._comers.returned(task.ticket, job.prefill_node, job.finish_reason)
        except ReturnError as e:
            result = e.reason
            if result == "scope":
                self._world.warn_once(
                    "nothing goes back eagerly: handles are made under another secret; KVRETURN_SECRET must be the "
                    "same on the router and on all nodes"
                )
            await self._stay(task)
        finally:
            self._tenants[job.tenant] -= 1
            if not self._tenants[job.tenant]:
                del self._tenants[job.tenant]
            span.set_attribute("kvreturn.return.result", result)
            span.end()
            self._world.metrics.returns.labels(result).inc()

    @contextlib.asynccontextmanager
    async def _turn_of(self, job: Job) -> AsyncIterator[bool]:
        """Waits until the prefill node has room for a return; gives False if that took too long."""
        node = job.prefill_node
        slot = self._slots.setdefault(node, asyncio.Semaphore(self._settings.concurrency))
        self._waiting += 1
        ready = False
        try:
            async with asyncio.timeout(self._settings.patience):
                await slot.acquire()
                ready = True
                await asyncio.sleep(self._pace(job))
                while self._world.prefill.load(node) > self._settings.prefill_load:  # noqa: ASYNC110 - many end at once
                    await asyncio.sleep(_LOOK)
        except TimeoutError:
            if ready:
                slot.release()
                ready = False
        finally:
            self._waiting -= 1
        try:
            yield ready
        finally:
            if ready:
                slot.release()

    def _pace(self, job: Job) -> float:
        """Seconds to wait so that no more goes back to a node than it may, on average.

        Raises:
            TimeoutError: too long. Nothing is booked for it then.
        """
        rate, now = self._settings.rate, self._world.clock()
        if rate is None:
            return 0.0
        begin = max(now, self._paced.get(job.prefill_node, now))
        if begin - now > self._settings.patience:
            raise TimeoutError
        self._paced[job.prefill_node] = begin + job.handle.tokens / rate
        return begin - now

    async def _send(self, task: Return, span: Span) -> str:
        """Have P read back. Returns what became of it, in one word."""
        settings, world = self._settings, self._world
        job, record, ticket = task.job, task.record, task.ticket
        form = await self._form(task)
        if form is None:
            return "unknown_node"
        body = await asyncio.to_thread(self._body, form, job) if job.handle.tokens > _LARGE else self._body(form, job)
        back = replace(record, handle=None, ttl=settings.ttl, returned=job.handle.tokens)
        if not await world.replace(ticket, replace(back, pending=True)):
            return "taken"
        self._sent[ticket] = task
        done = self._running[ticket] = asyncio.get_running_loop().create_future()
        result, read = "cancelled", 0
        try:
            begun = world.clock()
            reply = await ask(
                world,
                Ask(PATH, body, prefer=job.prefill_node, only=True, first=form is Form.STREAMED),
                settings.deadline if form is Form.SEALED else min(settings.deadline, _STOCK),
                {**task.credentials, **headers_of(span)},
            )
            result, read = read_return(form, reply, job.prefill_node, job.handle.tokens)
            del self._sent[ticket]
            seconds = world.clock() - begun
            world.metrics.return_seconds.observe(seconds)
            log.info("result=%s held=%d read=%d ms=%.1f", result, job.handle.tokens, read, seconds * 1e3)
            if result in ARRIVED:
                world.metrics.returned_tokens.inc(read)
                await world.replace(ticket, replace(back, brought=read))
            else:
                await world.replace(ticket, replace(back, returned=0, reason=Outcome.RETURN_FAILED))
                # A P that was left while it waited for room has told D nothing. And should it read after all: what it
                # reads for a request that is over, it forgets.
                self.free(record, task.credentials)
                if form is Form.STREAMED and result == "timeout":
                    world.forms.forget(job.prefill_node)  # perhaps it is another one by now, which this form hangs
        finally:
            del self._running[ticket]
            done.set_result(Awaited(None if result in ARRIVED else result, read))
        return result

    def _body(self, form: Form, job: Job) -> bytes:
        return return_body(form, job, job.tokens(), self._settings.priority)

    async def _form(self, task: Return) -> Form | None:
        forms, job, node = self._world.forms, task.job, task.job.prefill_node
        if forms.engine(node) != job.engine:
            return None  # P is another one than the one that the turn went to
        if forms.form(node) is None:
            probe = Ask(PATH, probe_body(job.model), prefer=node, only=True)
            reply = await ask(self._world, probe, _PROBE_SECONDS, task.credentials)
            form = read_probe(reply.status, reply.body) if reply.node == node else None
            if form:
                forms.probed(node, form)
        return forms.form(node)

    # --- the next turn ---

    async def wait(self, ticket: bytes) -> Awaited:
        """Wait until a return has ended, for a bounded time."""
        future = self._running.get(ticket)
        if future is None:
            return Awaited(elsewhere=True)  # or over since
        try:
            async with asyncio.timeout(self._settings.wait):
                return await asyncio.shield(future)
        except TimeoutError:
            return Awaited("late")

    # --- blocks that nobody will read ---

    def free(self, record: Record, credentials: Mapping[str, str]) -> None:
        """Have D free the blocks of a handle that will not be used.

        Args:
            record: with the handle.
            credentials: as for `offer`.
        """
        if record.handle is not None and not self._closed:
            self._tasks.start(self._free(record, credentials))

    async def _free(self, record: Record, credentials: Mapping[str, str]) -> None:
        await self._world.freeing.free(record, credentials)

    async def drain(self, seconds: float) -> None:
        """Let returns that are under way end, drop the others, and have D free what was on its way."""
        self._closed = True
        await self._tasks.drain(seconds)
        lost = [self._free(task.record, task.credentials) for task in self._sent.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*lost), _LAST)
