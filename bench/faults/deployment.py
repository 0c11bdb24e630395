"""What is put under faults: real Envoy, routers, a real Redis with replica and sentinel, and simulated vLLM nodes."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from faults.processes import Process, Stores, kvreturn, router
from kvreturn.config import Settings
from kvreturn.demo.stack import free_addresses, health
from kvreturn.envoy import names
from kvreturn.envoy.bootstrap import build, to_dict
from kvreturn.envoy.ports import as_envoy_knows
from kvreturn.envoy.process import Sink
from kvreturn.envoy.runner import EnvoyProcess

MODEL = "sim"
CONCURRENCY = 2
"""Envoy's worker threads; each finds out by itself that a node refuses connections."""
_EACH = 2  # routers, prefill nodes, decode nodes
DRAIN = 10.0
"""Seconds that a router may take to drain."""
DECODE_RATE = 30.0
"""Tokens per second of a stream."""
PREFILL_RATE = 8_000.0
"""Prompt tokens per second; low enough that reading back is worth it for every turn."""
DEADLINE = 0.1
"""The routers' `store.deadline` in seconds: longer than the default, so that a busy machine changes no outcome."""


@dataclass
class Deployment:
    """All of it, running.

    Attributes:
        settings: of the first router.
        prefills: P nodes.
        decodes: D nodes.
        routers: `kvreturn serve` processes.
        admins: of each router, the address of its metrics.
        stores: Redis.
        oracle: base URL of a plain single node's API, which all answers must equal.
    """

    settings: Settings
    prefills: list[Process]
    decodes: list[Process]
    routers: list[Process]
    admins: list[str]
    stores: Stores
    oracle: str

    @property
    def gateway(self) -> str:
        """Base URL of the API behind Envoy."""
        return f"http://{self.settings.envoy.listen}/v1"

    def router_at(self, listen: str) -> list[tuple[str, str]]:
        """Where Envoy asks a router: clusters, and its addresses there."""
        calls = names.requests_of(as_envoy_knows(listen)), self.settings.calls_of(listen)
        return [(names.ROUTER_CLUSTER, listen), *([calls] if self.settings.fast_lane else [])]

    async def active(self, session: aiohttp.ClientSession, cluster: str, address: str) -> int:
        """Requests, or streams, that Envoy has open to an address of a cluster."""
        key = f"{cluster}::{address}::rq_active::"
        lines = (await _text(session, f"http://{self.settings.envoy.admin}/clusters")).splitlines()
        return sum(int(line.removeprefix(key)) for line in lines if line.startswith(key))

    async def usable(self, session: aiohttp.ClientSession, cluster: str, address: str) -> None:
        """Wait until Envoy sends requests to an address of a cluster.

        Raises:
            TimeoutError: it does not within half a minute.
        """
        line = f"{cluster}::{address}::health_flags::healthy"
        url = f"http://{self.settings.envoy.admin}/clusters"
        async with asyncio.timeout(30):
            while line not in (await _text(session, url)).splitlines():  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.05)


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as response:
        return await response.text()


@contextlib.asynccontextmanager
async def deployed(sink: Sink, *, deadline: float = DEADLINE) -> AsyncIterator[Deployment]:
    """Start everything; at the end nothing is left.

    Args:
        sink: takes all logs.
        deadline: the routers' `store.deadline`, seconds.

    Raises:
        ProcessError: something did not start.
    """
    # P has no prefix cache: nobody else is on it, so it would lose nothing, and nothing would be read back.
    rates = ["--decode-rate", str(DECODE_RATE), "--prefill-rate", str(PREFILL_RATE), "--num-blocks", "32769"]
    at_once = ["--decode-rate", "0", "--prefill-rate", "0", "--no-prefix-caching"]

    def node(role: str, address: str, *arguments: str) -> Process:
        name = f"{role} node {address}"
        return kvreturn(name, ["sim", role, "--listen", address, *arguments], health(address), sink)

    free = iter(free_addresses(4 * _EACH + 3 + 3 + 1))
    p_addresses, d_addresses, listens, admins = ([next(free) for _ in range(_EACH)] for _ in range(4))
    envoy_ports = {name: next(free) for name in ("listen", "prefill_listen", "admin")}
    single, *store_addresses = free
    prefills = [node("prefill", a, *rates, "--no-prefix-caching") for a in p_addresses]
    decodes = [node("decode", a, *rates) for a in d_addresses]
    oracle = node("single", single, *at_once)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvreturn-faults-")))
        stores = Stores.create([int(a.rpartition(":")[2]) for a in store_addresses], folder, sink)
        plain: dict[str, Any] = {
            "pools": {"prefill": p_addresses, "decode": d_addresses},
            "drain_timeout": DRAIN,
            "secret": "the secret of a fault run",
            "envoy": {**envoy_ports, "routers": listens},
            "store": {"url": stores.url, "deadline": deadline},
        }
        each = [{**plain, "listen": listen, "admin": admin} for listen, admin in zip(listens, admins, strict=True)]
        running = [router(number, own, folder, sink) for number, own in enumerate(each)]
        stack.push_async_callback(stores.stop)
        await stores.start()
        started = [*prefills, *decodes, oracle, *running]
        stack.push_async_callback(_stop, started)
        await asyncio.gather(*[process.start() for process in started])
        checked = Settings.model_validate(each[0])
        envoy = EnvoyProcess(to_dict(build(checked)), sink=sink, concurrency=CONCURRENCY)
        await stack.enter_async_context(envoy)
        made = Deployment(checked, prefills, decodes, running, admins, stores, f"http://{single}/v1")
        async with aiohttp.ClientSession() as session:
            for listen in listens:
                for at in made.router_at(listen):
                    await made.usable(session, *at)
        yield made


async def _stop(processes: list[Process]) -> None:
    await asyncio.gather(*[process.stop(5.0) for process in processes])
