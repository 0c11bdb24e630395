"""Child processes whose output we pass on line by line."""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

Sink = Callable[[str, str], None]
"""Takes the name of a child and one line of its output."""

_LINE_LIMIT = 1 << 16  # bytes; a longer line comes in pieces
_POLL = 0.05  # seconds
_LAST_OUTPUT = 1.0  # seconds that output may lag behind the process's end


class ProcessError(Exception):
    """A child process could not be started, did not get ready, or died; the message ends with its last log lines."""


class Child:
    """A child process in a process group of its own, so that Ctrl-C reaches only us: we decide who stops first.

    Args:
        name: what logs and errors call it.
        argv: command line.
        sink: takes its output.
        env: its environment; None for ours.
        tail: so many lines of its output are told when it fails.
    """

    def __init__(
        self, name: str, argv: Sequence[str], sink: Sink, env: Mapping[str, str] | None = None, *, tail: int = 20
    ) -> None:
        self.name = name
        self._argv = list(argv)
        self._sink = sink
        self._env = env
        self._tail: deque[str] = deque(maxlen=tail)
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it.

        Raises:
            ProcessError: there is no such program, or it may not be run.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        except OSError as e:
            raise ProcessError(f"{self.name}: cannot start {self._argv[0]}: {e.strerror}") from e
        self._pump = asyncio.create_task(self._pass_lines_on())

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._started().pid

    async def wait(self) -> int:
        """Wait for its end.

        Returns:
            The exit code; negative for a signal.
        """
        code = await self._started().wait()
        if self._pump:  # bounded: a process that it left behind may hold the pipe open
            await asyncio.wait([self._pump], timeout=_LAST_OUTPUT)
        return code

    async def ready(self, probe: Callable[[], Awaitable[bool]], within: float) -> None:
        """Wait until `probe` says that it can serve.

        Args:
            probe: asked again and again until it returns True.
            within: seconds.

        Raises:
            ProcessError: it died before, or took longer.
        """
        deadline = time.monotonic() + within
        while not await probe():
            if self._started().returncode is not None:
                raise ProcessError(self.epitaph(await self.wait()))
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} is not ready after {within:g} s{self._last_lines()}")
            await asyncio.sleep(_POLL)

    async def stop(self, grace: float) -> int:
        """Ask it to end, and kill its group if it has not after `grace` seconds.

        Returns:
            The exit code; negative for a signal.
        """
        self._signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), grace)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            return await self.wait()

    def epitaph(self, code: int) -> str:
        """A sentence about how it ended, and its last log lines."""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"{self.name} {how}{self._last_lines()}"

    def _last_lines(self) -> str:
        if not self._tail:
            return ", without any output"
        return "; its last lines:\n" + "\n".join(f"  {line}" for line in self._tail)

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        if self._started().returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def _pass_lines_on(self) -> None:
        stream = self._started().stdout
        assert stream
        rest = b""
        while data := await stream.read(_LINE_LIMIT):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _LINE_LIMIT:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._pass_on(line)
        if rest:
            self._pass_on(rest)

    def _pass_on(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self._tail.append(line)
        self._sink(self.name, line)


async def first(children: Sequence[Child], *wanted: Coroutine[Any, Any, object]) -> int:
    """Wait for the first of `wanted`; the others are cancelled.

    Returns:
        Its index.

    Raises:
        ProcessError: a child died before.
    """
    tasks = [asyncio.create_task(w) for w in wanted]
    deaths = [asyncio.create_task(child.wait()) for child in children]
    try:
        await asyncio.wait([*tasks, *deaths], return_when=asyncio.FIRST_COMPLETED)
        for child, death in zip(children, deaths, strict=True):
            if death.done():
                raise ProcessError(child.epitaph(death.result()))
        index = next(i for i, task in enumerate(tasks) if task.done())
        tasks[index].result()
        return index
    finally:
        for task in [*tasks, *deaths]:
            task.cancel()
        await asyncio.gather(*tasks, *deaths, return_exceptions=True)
