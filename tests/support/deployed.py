"""What containers would run, as processes of this machine.

Each container gets an address of its own in 127.0.0.0/8, so ports stay what the files say. Paths that are mounted are
folders of the test's. All else of command lines, settings and environments is taken as it stands.
"""

import asyncio
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvreturn.envoy.process import Child
from kvreturn.envoy.runner import find_envoy

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]
LONG = {"max_tokens": 96, "ignore_eos": True}
"""Of a request: an answer of more tokens than `limits.min_tokens`, so that there is something to read back."""

_STOP = 10.0  # seconds
_START = 30.0  # seconds; two cores may have much else to do
_REDIS = {
    name: shutil.which(name) or shutil.which(name.replace("valkey", "redis"))
    for name in ("valkey-server", "valkey-cli")
}


def network() -> str:
    """Three free bytes of loopback addresses, another network for each test."""
    return f"127.{random.randint(16, 250)}.{random.randint(0, 255)}"


@dataclass
class Container:
    """One of them.

    Attributes:
        name: in logs.
        own: its address.
        mounts: folder by the path inside.
        names: what other texts are to be read as, addresses above all.
        environ: its environment, above this process's.
        lines: what it wrote.
    """

    name: str
    own: str
    mounts: dict[str, Path] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    child: Child | None = None

    def outside(self, text: str) -> str:
        """A text from inside as it is to be read here."""
        # "Any" and "this machine" inside a container are the container's own addresses.
        known = {**dict.fromkeys(("0.0.0.0", "127.0.0.1", "localhost"), self.own), **self.names}
        known |= {inside: str(folder) for inside, folder in self.mounts.items()}
        longest_first = sorted(map(re.escape, known), reverse=True)
        return re.sub(rf"(?<![\w.-])({'|'.join(longest_first)})", lambda found: known[found[1]], text)

    def mount(self, inside: str, source: Path, target: Path) -> None:
        """Have a folder or a file there, with its contents read as everything else.

        In a router's settings the store has more time than by default, so that a busy machine changes no outcome.
        """
        files = [source] if source.is_file() else [f for f in source.iterdir() if f.is_file()]
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            text = self.outside(file.read_text())
            if re.search("^pools:", text, re.MULTILINE):
                text += "store: {deadline: 1.0}\n"
            (target / file.name).write_text(text)
        self.mounts[inside] = target / source.name if source.is_file() else target

    async def start(self, argv: Sequence[str]) -> None:
        """Start it."""
        self.child = Child(self.name, self._argv(argv), lambda _, line: self.lines.append(line), self._environ())
        await self.child.start()

    async def run(self, argv: Sequence[str]) -> tuple[int, str]:
        """Run something inside; its exit code, and what it wrote."""
        process = await asyncio.create_subprocess_exec(
            *self._argv(argv), env=self._environ(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    async def succeeds(self, argv: Sequence[str]) -> None:
        """Wait until a command in it succeeds."""
        deadline = time.monotonic() + _START
        while (result := await self.run(argv))[0]:
            gone = self.exit_code is not None or time.monotonic() > deadline
            assert not gone, "\n".join([f"{self.name}: {argv} fails: {result}", *self.lines])
            await asyncio.sleep(0.2)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self.child
        assert self.child._process
        return self.child._process.returncode

    async def kill(self) -> None:
        """End it without a warning; returns when it is gone."""
        assert self.child
        os.killpg(self.child.pid, signal.SIGKILL)
        await self.child.wait()

    async def stop(self, grace: float) -> int:
        """Ask it to end; the exit code."""
        assert self.child
        return await self.child.stop(grace)

    def _argv(self, argv: Sequence[str]) -> list[str]:
        program, *rest = argv
        ours = {
            "kvreturn": [sys.executable, "-m", "kvreturn.cli.main"],
            "python": [sys.executable],
            "python3": [sys.executable],
            "envoy": [str(find_envoy())] if program == "envoy" else [],
        }
        begin = ours.get(program) or [_REDIS.get(program) or program]
        rest = [self.outside(part) for part in rest]
        if program in {"sh", "bash"}:
            rest = [re.sub(r"valkey-cli", str(_REDIS["valkey-cli"]), part) for part in rest]
        return [*begin, *rest]

    def _environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVRETURN_", "OTEL_"))}
        return kept | {k: self.outside(v) for k, v in self.environ.items()}


async def stop_all(containers: Iterable[Container]) -> None:
    """Stop those that were started."""
    await asyncio.gather(*(c.stop(_STOP) for c in containers if c.child))


def outcomes(*routers: Container) -> list[str]:
    """Of the turns that they logged."""
    return sorted(
        found[1] for router in routers for line in router.lines if (found := re.search(r"outcome=(\w+)", line))
    )


def interpolate(value: Any, environ: Mapping[str, str]) -> Any:  # noqa: ANN401 - YAML
    """Fill in variables as compose does, below a parsed document.

    Raises:
        ValueError: a variable that has to be there is not; with its message.
    """
    if isinstance(value, dict):
        return {k: interpolate(v, environ) for k, v in value.items()}
    if isinstance(value, list):
        return [interpolate(v, environ) for v in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        name, how, rest = match.groups()
        if given := environ.get(name):
            return given
        if how == ":?":
            raise ValueError(f"{name}: {rest}")
        return rest or ""

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", fill, value)
