import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Holding, Put, Record, Taken
from kvreturn.settings.store import Store
from kvreturn.store.errors import StoreError
from kvreturn.store.guard import Guard
from kvreturn.telemetry.metrics import Metrics
from support.stores import A, handle

COLD = Taken(None, Outcome.STORE_UNAVAILABLE)
PUT = Put([A], handle())


@dataclass
class Scripted:
    """A store that does as told.

    Attributes:
        error: what it raises, if anything.
        seconds: how long it takes.
        away: whether it does not answer pings.
        calls: what it was asked.
    """

    error: Exception | None = None
    seconds: float = 0.0
    away: bool = False
    calls: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def take(self, keys: Sequence[bytes]) -> Taken:
        del keys
        await self._call("take")
        return Taken(handle())

    async def put(self, keys: Sequence[bytes], record: Record, conversation: bytes | None = None) -> bytes:
        del keys, record, conversation
        await self._call("put")
        return b"ticket"

    async def replace(self, ticket: bytes, record: Record) -> bool:
        del ticket, record
        await self._call("replace")
        return True

    async def end(self, conversation: bytes) -> Sequence[Taken]:
        del conversation
        await self._call("end")
        return [Taken(handle())]

    async def take_all(self) -> AsyncIterator[Sequence[Taken]]:
        raise NotImplementedError  # no turn waits for this, so no guard stands before it
        yield

    async def present(self) -> None:
        raise NotImplementedError  # as above

    async def leave(self) -> bool:
        raise NotImplementedError  # as above

    async def look(self, most: int) -> Holding:
        raise NotImplementedError  # as above

    async def ping(self) -> None:
        self.calls.append("ping")
        if self.away:
            raise StoreError("connection", down=True)

    async def aclose(self) -> None:
        self.calls.append("aclose")

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        if self.error:
            raise self.error


@dataclass
class Setup:
    store: Scripted
    metrics: Metrics
    guard: Guard

    def errors(self, operation: str, kind: str) -> float:
        return self.metrics.value("kvreturn_store_errors_total", operation=operation, kind=kind)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    store, metrics = Scripted(), Metrics()
    guard = Guard(store, Store(breaker_failures=3, breaker_probe=0.05, pool_size=4), metrics)
    async with contextlib.aclosing(guard):
        yield Setup(store, metrics, guard)
    assert store.calls[-1] == "aclose"


DOWN = StoreError("connection", down=True)


async def test_what_succeeds_is_passed_on_and_timed(setup: Setup) -> None:
    assert await setup.guard.take([A]) == Taken(handle())
    assert await setup.guard.put(PUT) == b"ticket"
    assert await setup.guard.replace(b"ticket", handle()) is True
    for operation in ("take", "put", "replace"):
        assert setup.metrics.value("kvreturn_store_duration_seconds_count", operation=operation) == 1


@pytest.mark.parametrize(
    ("error", "kind"), [(DOWN, "connection"), (StoreError("full"), "full"), (KeyError("x"), "KeyError")]
)
async def test_an_error_is_a_miss_that_is_counted(setup: Setup, error: Exception, kind: str) -> None:
    setup.store.error = error
    assert await setup.guard.take([A]) == COLD
    assert await setup.guard.put(PUT) is None
    assert await setup.guard.replace(b"ticket", handle()) is False
    assert [setup.errors(operation, kind) for operation in ("take", "put", "replace")] == [1, 1, 1]


async def test_a_slow_store_costs_its_deadline(setup: Setup) -> None:
    setup.store.seconds = 60
    begun = time.monotonic()
    assert await setup.guard.take([A]) == COLD
    assert 0.02 <= time.monotonic() - begun < 0.1
    assert setup.errors("take", "timeout") == 1


async def test_what_no_turn_waits_for_has_more_time_than_a_turn(setup: Setup) -> None:
    setup.store.seconds = 0.1
    assert await setup.guard.end(b"conversation") == [Taken(handle())]
    assert await setup.guard.take([A], hurry=False) == Taken(handle())
    assert await setup.guard.take([A]) == COLD


async def test_that_ends_too(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvreturn.store.guard._PATIENCE", 0.05)
    setup.store.seconds = 60
    with pytest.raises(StoreError):
        await setup.guard.end(b"conversation")
    assert setup.errors("end", "timeout") == 1


async def test_failures_in_a_row_open_the_breaker_until_the_store_answers(setup: Setup) -> None:
    setup.store.error, setup.store.away = DOWN, True
    for _ in range(3):
        await setup.guard.take([A])
    assert setup.guard.is_open
    assert setup.metrics.value("kvreturn_store_breaker_open") == 1
    setup.store.calls.clear()
    assert await setup.guard.take([A]) == COLD
    assert await setup.guard.put(PUT) is None
    assert (setup.errors("take", "breaker_open"), setup.errors("put", "breaker_open")) == (1, 1)
    await asyncio.sleep(0.12)
    assert set(setup.store.calls) == {"ping"}  # no turn is spent on asking
    setup.store.error, setup.store.away = None, False
    await asyncio.sleep(0.1)
    assert not setup.guard.is_open
    assert await setup.guard.take([A]) == Taken(handle())


async def test_of_a_store_that_has_just_come_back_one_failure_is_enough(setup: Setup) -> None:
    setup.store.error = DOWN
    for _ in range(3):
        await setup.guard.take([A])
    await asyncio.sleep(0.1)
    assert not setup.guard.is_open
    await setup.guard.take([A])
    assert setup.guard.is_open


async def test_a_success_between_keeps_it_closed(setup: Setup) -> None:
    for _ in range(4):
        setup.store.error = DOWN
        await setup.guard.take([A])
        await setup.guard.take([A])
        setup.store.error = None
        await setup.guard.take([A])
    assert not setup.guard.is_open


async def test_errors_of_a_store_that_is_there_keep_it_closed(setup: Setup) -> None:
    setup.store.error = StoreError("full")
    for _ in range(10):
        await setup.guard.put(PUT)
    assert not setup.guard.is_open


async def test_what_this_process_was_too_busy_for_keeps_it_closed(setup: Setup) -> None:
    setup.store.seconds = 0.001
    for _ in range(4):
        call = asyncio.create_task(setup.guard.take([A]))
        await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251 - the loop is what stands still
        assert await call == COLD
    assert setup.errors("take", "busy") == 4
    assert not setup.guard.is_open


async def test_calls_at_a_time_are_bounded_and_who_waits_too_long_goes_cold(setup: Setup) -> None:
    setup.store.seconds, setup.guard._settings = 0.3, Store(deadline=0.4, pool_size=4)
    taken = await asyncio.gather(*(setup.guard.take([A]) for _ in range(20)))
    assert setup.store.most == 4
    assert 4 <= taken.count(Taken(handle())) <= 8
    assert setup.errors("take", "busy") >= 12
    assert not setup.guard.is_open


async def test_a_client_that_leaves_is_no_failure(setup: Setup) -> None:
    setup.store.seconds = 60
    for _ in range(5):
        call = asyncio.create_task(setup.guard.take([A]))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert not setup.guard.is_open


async def test_a_store_that_is_away_at_the_start_is_asked_until_it_is_there(setup: Setup) -> None:
    setup.store.away = True
    await setup.guard.start()
    assert setup.guard.is_open
    setup.store.away = False
    await asyncio.sleep(0.1)
    assert await setup.guard.take([A]) == Taken(handle())


async def test_each_failure_is_said_once_with_a_hint(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        setup.store.error = StoreError("full")
        for _ in range(3):
            await setup.guard.put(PUT)
            await setup.guard.take([A])
        setup.store.error = None
        await setup.guard.put(PUT)
    said = [r.message for r in caplog.records]
    assert said.count("store take failed: full: the server has no room: raise its maxmemory") == 1
    assert said.count("store put failed: full: the server has no room: raise its maxmemory") == 2
