"""vLLM's own example proxies, unmodified, as orchestrators that send both legs of a turn through Envoy."""

import asyncio
import contextlib
import functools
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvreturn.core.address import split_address
from kvreturn.envoy.process import Child
from support.envoy import unused_address
from support.gateway import Product, product
from support.tap import Tap

TOY, MULTITURN = "toy_proxy_server.py", "disagg_proxy_multiturn.py"
_ROOT = Path(__file__).parents[2]
_SCRIPTS = _ROOT / ".vllm-scripts/vllm-0.32.0"
_SECONDS = 60.0  # in which a script may be fetched
_READY = 30.0


def script(name: str) -> Path:
    """One of vLLM's scripts. The test is skipped where it cannot be had."""
    _fetch(name)
    path = _SCRIPTS / name
    if not path.exists():
        pytest.skip(f"vLLM's {name} is not there: scripts/fetch_vllm_scripts.py could not fetch it")
    return path


@functools.cache
def _fetch(name: str) -> None:
    fetch = [sys.executable, str(_ROOT / "scripts/fetch_vllm_scripts.py"), name]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(fetch, check=False, timeout=_SECONDS)


@dataclass
class Orchestrator:
    """A proxy that runs.

    Attributes:
        tap: between it and its clients.
        log: its lines.
    """

    tap: Tap = field(default_factory=Tap)
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Base URL of the API, for clients."""
        return f"http://{self.tap.address}/v1"


@contextlib.asynccontextmanager
async def orchestrator(name: str, prefill: str, decode: str) -> AsyncIterator[Orchestrator]:
    """Run one of the proxies, with these addresses for its nodes."""
    there, listen = Orchestrator(), unused_address()
    argv = [sys.executable, str(script(name)), *_option("", listen)]
    argv += [*_option("prefiller-", prefill), *_option("decoder-", decode)]
    child = Child(name, argv, lambda _, line: there.log.append(line))
    await child.start()
    try:
        await child.ready(lambda: _listens(listen), _READY)
        async with there.tap.before(listen):
            yield there
    finally:
        await child.stop(grace=5)


def _option(prefix: str, address: str) -> list[str]:
    host, port = split_address(address)
    return [f"--{prefix}host", host, f"--{prefix}port", str(port)]


async def _listens(address: str) -> bool:
    try:
        _, writer = await asyncio.open_connection(*split_address(address))
    except OSError:
        return False
    writer.close()
    return True


@dataclass(frozen=True)
class Addresses:
    """Where Envoy takes the legs."""

    prefill: str = field(default_factory=unused_address)
    decode: str = field(default_factory=unused_address)

    @property
    def settings(self) -> dict[str, Any]:
        """The section `envoy`."""
        return {"orchestrated": {"prefill_listen": self.prefill, "decode_listen": self.decode}}


@contextlib.asynccontextmanager
async def orchestrated(
    name: str,
    shipped: str = "kvreturn",
    **changes: Any,  # noqa: ANN401 - as YAML has them
) -> AsyncIterator[tuple[Orchestrator, Product]]:
    """A proxy before the product, whose router has the roles `prefill` and `decode`. No handle reaches its clients.

    Args:
        name: of the proxy.
        shipped: see `configuration`.
        changes: see `product`.
    """
    at = Addresses()
    script(name)
    async with (
        product(shipped, envoy=at.settings, **changes) as there,
        orchestrator(name, at.prefill, at.decode) as proxy,
    ):
        yield proxy, there
        assert not proxy.tap.leaks(*(n.engine.identity().engine_id for n in (*there.p, *there.d)))
