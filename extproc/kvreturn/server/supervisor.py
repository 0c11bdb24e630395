"""Several worker processes as one: started, started again when one dies, and stopped together.

Each worker is a fresh interpreter, never a fork: gRPC's threads and locks, and those of exporters, do not survive one.
Workers write to our standard error themselves. The pipe that is a worker's standard input ends with us, which tells it
to drain: no worker outlives its supervisor, however that dies.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvreturn.config import ConfigError, Settings

log = logging.getLogger("kvreturn")
REFUSED = 78  # a worker's exit code if it cannot start with these settings (EX_CONFIG)
_SOON = 10.0  # seconds; a worker that dies sooner than that after its start counts as one that cannot live
_GIVE_UP = 5  # such deaths of one worker in a row
_BACKOFF = (0.0, 0.2, 0.5, 1.0, 2.0)  # seconds before the next start, by such deaths
_BEYOND = 15.0  # seconds that a worker may take to end, beyond `drain_timeout`
_CLEAN = (0, -signal.SIGTERM, -signal.SIGINT)  # the latter two: it was not up yet


class SupervisorError(Exception):
    """The workers do not run any more; the message says why."""


class Supervisor:
    """Keeps workers running.

    Args:
        count: of workers.
        argv: the command line of a worker, by its index.
        load: reads the settings.
    """

    def __init__(self, count: int, argv: Callable[[int], Sequence[str]], load: Callable[[], Settings]) -> None:
        self._count = count
        self._argv = argv
        self._load = load
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._failures: list[str] = []
        self._drain = 0.0  # the longest `drain_timeout` that a worker may go by

    async def run(self) -> None:
        """Start the workers, and return when a signal has come and they have drained.

        Raises:
            SupervisorError: a worker cannot be kept alive, or did not end well. All have ended by then.
        """
        self._look()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        keepers = [asyncio.create_task(self._keep(index)) for index in range(self._count)]
        await self._stopping.wait()
        log.info("stopping %d workers", len(self._running))
        self._look()
        _, slow = await asyncio.wait(keepers, timeout=self._drain + _BEYOND)
        if slow:
            self._pass_on(signal.SIGKILL)
        await asyncio.gather(*keepers)
        if self._failures:
            raise SupervisorError("\n".join(self._failures))
        log.info("all workers have stopped")

    async def _keep(self, index: int) -> None:
        """Have one worker running until all are to stop."""
        deaths, first = 0, True
        while not self._stopping.is_set():
            begun = time.monotonic()
            try:
                process = await self._start(index)
            except OSError as e:  # a machine that is short of memory, which may be why the last one died
                log.error("worker %d cannot be started (%s); it is tried again in %g s", index, e, _BACKOFF[-1])  # noqa: TRY400
                await _unless(self._stopping, _BACKOFF[-1])
                continue
            code = await process.wait()
            del self._running[index]
            if self._stopping.is_set():
                if code not in _CLEAN:
                    self._failures.append(f"worker {index} {_how(code)} while it drained")
                return
            if code == REFUSED and first:
                self._fail(f"worker {index} could not start; its last lines say why")
                return
            first = False
            deaths = deaths + 1 if code not in {0, REFUSED} and time.monotonic() - begun < _SOON else 0
            if deaths >= _GIVE_UP:
                self._fail(f"worker {index} {_how(code)}, {deaths} times in a row within {_SOON:g} s of its start")
                return
            # Refused now: the settings are not what they were, and the others go on with those that they have.
            delay = _BACKOFF[-1 if code == REFUSED else min(deaths, len(_BACKOFF) - 1)]
            again = f"it is started again in {delay:g} s, and knows of no drained nodes then"
            log.error("worker %d (pid %d) %s; %s", index, process.pid, _how(code), again)
            await _unless(self._stopping, delay)

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        # A SIGHUP that comes before the worker knows what to do with it would end it: it waits until then.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            process = await asyncio.create_subprocess_exec(*self._argv(index), stdin=asyncio.subprocess.PIPE)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        self._running[index] = process
        log.info("worker %d is process %d", index, process.pid)
        if self._stopping.is_set():
            _signal(process, signal.SIGTERM)
        return process

    def _stop(self) -> None:
        self._stopping.set()
        self._pass_on(signal.SIGTERM)

    def _fail(self, text: str) -> None:
        log.critical("%s; stopping", text)
        self._failures.append(text)
        self._stop()

    def _pass_on(self, number: signal.Signals) -> None:
        for process in self._running.values():
            _signal(process, number)

    def _reload(self) -> None:
        self._pass_on(signal.SIGHUP)
        self._look()

    def _look(self) -> None:
        """See how long workers may drain. Who has not reloaded, or refused to, goes by what was there before."""
        with suppress(ConfigError):
            self._drain = max(self._drain, self._load().drain_timeout)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just died, and `_keep` has not seen it yet
        process.send_signal(number)


async def _unless(event: asyncio.Event, seconds: float) -> None:
    """Sleep, unless something happens."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
