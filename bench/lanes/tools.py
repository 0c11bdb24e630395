"""The paced node and client: built by the system's C compiler at first use, run, and read."""

import asyncio
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_CACHE = _HERE / ".built"
_FLAGS = ("-std=gnu11", "-O2")
_GRACE = 2.0  # seconds that streams may take after the window
_KILL = 20.0  # seconds after which a client that should have ended is killed


class ToolError(Exception):
    """Node or client cannot be built or run."""


def build(name: str) -> Path:
    """Compile `NAME.c`, unless just that was compiled before.

    Raises:
        ToolError: there is no compiler, or it does not take it.
    """
    text = b"".join((_HERE / file).read_bytes() for file in ("stream.h", f"{name}.c"))
    binary = _CACHE / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}"
    if binary.exists():
        return binary
    compiler = shutil.which("cc")
    if compiler is None:
        raise ToolError("there is no C compiler `cc` here: apt-get install gcc libc6-dev")
    _CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        fresh = Path(folder) / name
        argv = [compiler, *_FLAGS, "-o", str(fresh), str(_HERE / f"{name}.c")]
        run = subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603 - our own arguments
        if run.returncode:
            raise ToolError(f"cannot build {name}.c (it needs Linux and glibc 2.35):\n{run.stderr}")
        fresh.rename(binary)
    return binary


@dataclass(frozen=True, slots=True)
class Load:
    """What the client does.

    Attributes:
        streams: connections.
        rate: tokens per second of each; 0 for a stream of two tokens at once, to time the first one.
        seconds: of the window in which tokens are looked at.
        warm: seconds before it, in which the streams begin one after another.
        requests: of each connection, one after another; with a rate they share the time.
        body: bytes of the request body, about.
    """

    streams: int
    rate: int = 30
    seconds: float = 0.0
    warm: float = 0.0
    requests: int = 1
    body: int = 1000

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.streams}x{self.rate}"

    @property
    def tokens(self) -> int:
        """Of one answer: enough that the stream that begins first lasts until the window's end."""
        whole = self.rate * (self.warm + self.seconds) * 1.02
        return int(whole / self.requests if self.rate else whole) + 2


def request_body(load: Load) -> bytes:
    """An agent's history of messages of 2,000 bytes, each conversation's its own (see client.c)."""
    head = {"model": "bench", "stream": True, "max_tokens": load.tokens, "seed": load.rate}
    messages = [{"role": "user", "content": "Task @@@@@@@@."}]
    fox = "the quick brown fox jumps over 13 lazy dogs "
    messages += [
        {"role": ("assistant", "user")[number % 2], "content": (fox * 46)[:1960]} for number in range(load.body // 2000)
    ]
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "Go on."})
    whole = {**head, "conversation_id": "@@@@@@@@", "messages": messages}
    return json.dumps(whole, separators=(",", ":")).encode()


async def run_client(port: int, load: Load, pids: Sequence[int]) -> dict[str, Any]:
    """Run the client against a port of this machine.

    Returns:
        What it printed (see client.c).

    Raises:
        ToolError: it failed.
    """
    with tempfile.NamedTemporaryFile() as body:
        body.write(request_body(load))
        body.flush()
        figures = (load.streams, load.requests, load.tokens, *(int(1e3 * s) for s in _times(load)))
        argv = [str(build("client")), str(port), body.name, *map(str, figures), *map(str, pids)]
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            within = sum(_times(load)) + _KILL
            out, err = await asyncio.wait_for(process.communicate(), within)
        except TimeoutError:
            raise ToolError(f"the client did not end within {within:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode:
        raise ToolError(f"the client failed: {err.decode().strip()}")
    figures_out: dict[str, Any] = json.loads(out)
    return figures_out


def _times(load: Load) -> tuple[float, float, float, float]:
    """Stagger, warm-up, window, grace, in seconds."""
    if not load.rate:
        return 0.0, 0.0, 0.0, _KILL
    return load.warm * 0.8, load.warm, load.seconds, load.warm + _GRACE * load.requests
