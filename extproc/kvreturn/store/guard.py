"""The session store as a turn meets it: within its deadline, behind a breaker, and never an error."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Put, Record, SessionStore, Taken
from kvreturn.settings.store import Store
from kvreturn.store.errors import StoreError
from kvreturn.telemetry.metrics import Metrics

log = logging.getLogger("kvreturn")
T = TypeVar("T")
_MOST = 0.8
_PATIENCE = 2.0  # seconds for calls that no turn waits for
_HINTS = {
    "auth": "check user, password and permissions of `store.url`",
    "busy": "more turns at once than this process, or `store.pool_size`, can serve within `store.deadline`",
    "full": "the server has no room: raise its maxmemory",
    "oversize": "a record over `store.max_record_bytes`",
    "refused": "the server refused the command: Redis 7.0 or newer, or Valkey, is needed",
    "unreadable": "something else writes to this store, or another version of kvreturn",
    "wrong_key": "routers that share a store need the same secret and `store.encryption_key`",
}


class Guard:
    """Calls a store for turns.

    So many failures in a row open the breaker: turns then go cold at once, and the store is asked in the background,
    with time to connect, until it answers. No turn waits for that. Then one failure more opens it again.

    Args:
        store: the store.
        settings: deadline, breaker and pool size.
        metrics: where calls are counted.
    """

    def __init__(self, store: SessionStore, settings: Store, metrics: Metrics) -> None:
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._slots = asyncio.Semaphore(settings.pool_size)
        self._failures = 0
        self._probing: asyncio.Task[None] | None = None
        self._said: set[tuple[str, str]] = set()
        metrics.watch("store_breaker_open", "Whether the store is not asked because it failed.", lambda: self.is_open)

    def apply(self, settings: Store) -> None:
        """Calls from now on go by this deadline and this breaker; the pool stays."""
        self._settings = settings

    @property
    def is_open(self) -> bool:
        """Whether calls fail at once."""
        return self._probing is not None

    async def start(self) -> None:
        """See whether the store is there. If not, turns are cold until it is."""
        if not await self._answers():
            self._open()

    async def aclose(self) -> None:
        """Let go of the store."""
        if self._probing:
            self._probing.cancel()
            await asyncio.wait([self._probing])
        await self._store.aclose()

    async def take(self, keys: Sequence[bytes], *, hurry: bool = True) -> Taken:
        """Take from the store. Without `hurry` no turn waits for it, and it has more time."""
        taken = await self._call("take", lambda: self._store.take(keys), hurry=hurry)
        return taken or Taken(None, Outcome.STORE_UNAVAILABLE)

    async def put(self, put: Put) -> bytes | None:
        """Put into the store. Returns the ticket, or None if it is not there."""
        return await self._call("put", lambda: self._store.put(put.keys, put.record, put.conversation))

    async def replace(self, ticket: bytes, record: Record) -> bool:
        """Replace a record in the store. Returns whether it was still there."""
        return bool(await self._call("replace", lambda: self._store.replace(ticket, record)))

    async def end(self, conversation: bytes) -> Sequence[Taken]:
        """Take all records of a conversation, with more time than turns have.

        Raises:
            StoreError: the store failed; why has been told.
        """
        taken = await self._call("end", lambda: self._store.end(conversation), hurry=False)
        if taken is None:
            raise StoreError("unavailable")
        return taken

    async def _call(self, operation: str, call: Callable[[], Awaitable[T]], *, hurry: bool = True) -> T | None:
        if self.is_open:
            self._metrics.store_errors.labels(operation, "breaker_open").inc()
            return None
        clock, deadline = asyncio.get_running_loop().time, self._settings.deadline
        if not hurry:
            deadline = max(deadline, _PATIENCE)
        begun, entered = clock(), math.inf
        try:
            async with asyncio.timeout(deadline), self._slots:
                entered = clock()
                result = await call()
        except TimeoutError:
            # The store is to blame if it had nearly all of the time. Where much more than that has passed, this process
            # was busy, and the answer may have been here for long.
            blame = clock() - entered > _MOST * deadline and clock() - begun < 2 * deadline
            self._failed(operation, StoreError("timeout", down=True) if blame else StoreError("busy"))
            return None
        except StoreError as e:
            self._failed(operation, e)
            return None
        except Exception as e:  # noqa: BLE001 - whatever the store does, the turn goes on
            self._failed(operation, StoreError(type(e).__name__))
            return None
        self._metrics.store_seconds.labels(operation).observe(clock() - begun)
        self._failures = 0
        self._said = {said for said in self._said if said[0] != operation}
        return result

    def _failed(self, operation: str, error: StoreError) -> None:
        self._metrics.store_errors.labels(operation, error.kind).inc()
        if (operation, error.kind) not in self._said:  # a server that is full says so with every turn
            self._said.add((operation, error.kind))
            hint = _HINTS.get(error.kind)
            log.warning("store %s failed: %s%s", operation, error.kind, f": {hint}" if hint else "")
        if error.down:
            self._failures += 1
            if self._failures >= self._settings.breaker_failures and not self.is_open:
                self._open()

    def _open(self) -> None:
        log.warning("the session store is away: turns are cold until it is back")
        self._probing = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self._settings.breaker_probe)
            if await self._answers():
                break
        self._failures = self._settings.breaker_failures - 1
        self._probing = None
        log.info("the session store is back")

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(2 * self._settings.connect_timeout):  # to connect, and to answer
                await self._store.ping()
        except Exception as e:  # noqa: BLE001 - as above
            kind = e.kind if isinstance(e, StoreError) else type(e).__name__
            self._metrics.store_errors.labels("ping", kind).inc()
            return False
        return True
