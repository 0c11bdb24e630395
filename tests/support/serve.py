"""`kvreturn serve` as a process."""

import asyncio
import os
import re
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import grpc.aio
import yaml


class Process:
    """A running router.

    Attributes:
        listen: its gRPC address.
        stderr: what it wrote, once it has ended.
    """

    def __init__(self, process: asyncio.subprocess.Process, listen: str) -> None:
        self.process = process
        self.listen = listen
        self.stderr = ""

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.listen)

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        _, err = await asyncio.wait_for(self.process.communicate(), 10)
        self.stderr = err.decode()
        return self.process.returncode or 0

    @property
    def resident(self) -> int:
        """Bytes of memory that the process has."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found
        return int(found[1]) << 10


async def spawn(config: Path, *options: str, **more: str) -> asyncio.subprocess.Process:
    """Start it, with more in its environment."""
    environ = {k: v for k, v in os.environ.items() if k != "KVRETURN_SECRET"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvreturn.cli.main", "serve", "--config", str(config), *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ | more,
    )


def write(path: Path, text: str | dict[str, Any]) -> Path:
    file = path / "kvreturn.yaml"
    file.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return file


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        text: str = response.read().decode()
        return text
