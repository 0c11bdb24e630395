"""Starts processes, and stops them."""

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvreturn.envoy.process import Child, Sink
from kvreturn.envoy.runner import EnvoyProcess

_READY = 30.0  # seconds
_STOP = 10.0


@dataclass(frozen=True)
class Ground:
    """On what candidates are started.

    Attributes:
        stack: stops them.
        folder: takes their files.
        concurrency: Envoy's worker threads.
        sink: takes all logs.
    """

    stack: contextlib.AsyncExitStack
    folder: Path
    concurrency: int
    sink: Sink

    async def started(self, name: str, argv: Sequence[str], health: str) -> Child:
        """Start a process, and wait until it answers.

        Args:
            name: of the process.
            argv: its command line.
            health: URL that answers 200 when it can serve.

        Raises:
            ProcessError: it did not.
        """
        child = Child(name, argv, self.sink, {**os.environ, "PYTHONUNBUFFERED": "1"})
        await child.start()
        self.stack.push_async_callback(child.stop, _STOP)
        async with aiohttp.ClientSession() as session:

            async def answers() -> bool:
                try:
                    async with session.get(health) as response:
                        return response.status == 200  # noqa: PLR2004
                except aiohttp.ClientError:
                    return False

            await child.ready(answers, _READY)
        return child

    async def envoy(self, config: Mapping[str, Any]) -> int:
        """Start Envoy, and wait until it is ready.

        Returns:
            Its process id.

        Raises:
            ProcessError: it did not.
        """
        process = EnvoyProcess(config, sink=self.sink, concurrency=self.concurrency)
        return (await self.stack.enter_async_context(process)).child.pid


@contextlib.asynccontextmanager
async def ground(concurrency: int, sink: Sink) -> AsyncIterator[Ground]:
    """A ground of which nothing is left at the end."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvreturn-lanes-"))
        yield Ground(stack, Path(folder), concurrency, sink)
