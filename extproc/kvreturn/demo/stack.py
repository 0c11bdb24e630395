"""The processes of the demo: nodes, router and Envoy, on free loopback ports."""

import asyncio
import contextlib
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp
import openai
import yaml

from kvreturn.envoy.process import Child, ProcessError, Sink, first

Engine = Literal["sim", "vllm-cpu"]
"""What the nodes are."""
_READY_WITHIN = 60.0
_STOP_WITHIN = 15.0
_DYING = 5.0  # seconds that a node may take from its first failure to its end; vLLM 0.32.0 took under 2
# Below those that the system hands out by itself (on Linux from 32768 on): one of these would be gone before its server
# binds it, if somebody's connection came first.
_PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to play the conversation behind the gateway.

    Attributes:
        name: what table and JSON call it.
        settings: of the router, for the way's model.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def model(self) -> str:
        """The model's name, by which the router tells the ways apart; to the nodes all names mean the same."""
        return f"demo-{self.name}"


WAYS = (Way("off", {"proof": "off"}), Way("on"))


@dataclass(frozen=True, slots=True)
class Stack:
    """Where things are.

    Attributes:
        gateway: base URL of the OpenAI API behind Envoy.
        oracle: base URL of the plain single node.
        prefill_metrics: URL of P's metrics.
        router_metrics: URL of the router's metrics.
        children: the processes, all of which have to live.
    """

    gateway: str
    oracle: str
    prefill_metrics: str
    router_metrics: str
    children: Sequence[Child] = ()

    async def while_alive(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it while all processes live.

        Raises:
            ProcessError: one of them died. To its clients a dying node is an error first, and dead a little later.
        """

        async def patient() -> None:
            try:
                await work
            except (openai.APIError, aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(_DYING)
                raise

        await first(self.children, patient())


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How the simulated nodes behave.

    Attributes:
        template: chat template.
        tokenizer: `exact` or `blurry`.
        prefill_cache: whether P has a prefix cache.
        prefill_rate: prompt tokens per second.
        decode_rate: tokens per second of a stream.
    """

    template: str = "plain"
    tokenizer: str = "exact"
    prefill_cache: bool = False
    prefill_rate: float = 10_000.0
    decode_rate: float = 400.0


def free_addresses(count: int) -> list[str]:
    """Loopback addresses that nobody listens on.

    Raises:
        ProcessError: there are not so many.
    """
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(_PORTS, len(_PORTS)):
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(f"127.0.0.1:{port}")
            if len(found) == count:
                return found
    raise ProcessError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop} on 127.0.0.1")


@contextlib.asynccontextmanager
async def simulated(options: SimOptions, sink: Sink, progress: Callable[[str], None]) -> AsyncIterator[Stack]:
    """P, D and a single node, all simulated, with router and Envoy in front of P and D.

    Args:
        options: how the nodes behave.
        sink: takes the processes' logs.
        progress: takes what is being waited for.

    Raises:
        ProcessError: one of them did not start.
    """
    p, d, single = free_addresses(3)
    common = ["--template", options.template, "--tokenizer", options.tokenizer]
    for way in WAYS:
        common += ["--model", way.model]
    rates = ["--prefill-rate", str(options.prefill_rate), "--decode-rate", str(options.decode_rate)]
    at_once = ["--prefill-rate", "0", "--decode-rate", "0"]  # only the oracle's words are of interest
    cache = "--prefix-caching" if options.prefill_cache else "--no-prefix-caching"
    nodes = {
        p: _kvreturn("prefill node", sink, ["sim", "prefill", "--listen", p, cache, *rates, *common]),
        d: _kvreturn("decode node", sink, ["sim", "decode", "--listen", d, *rates, *common]),
        single: _kvreturn(
            "plain node", sink, ["sim", "single", "--listen", single, "--no-prefix-caching", *at_once, *common]
        ),
    }
    async with contextlib.AsyncExitStack() as stack:
        progress("simulated nodes")
        await start(stack, {child: [health(address)] for address, child in nodes.items()})
        progress("router and Envoy")
        yield await front(stack, sink, nodes)


def health(address: str) -> str:
    """Where a node says that it can serve."""
    return f"http://{address}/health"


async def front(stack: contextlib.AsyncExitStack, sink: Sink, nodes: Mapping[str, Child]) -> Stack:
    """Start router and Envoy before P and D, as `kvreturn up` does.

    Args:
        stack: stops them.
        sink: takes their logs.
        nodes: P, D and the plain node, in this order, by address.

    Raises:
        ProcessError: they did not start.
    """
    prefill, decode, single = nodes
    listen, admin, client, loopback, envoy_admin = free_addresses(5)
    settings = {
        "listen": listen,
        "admin": admin,
        "pools": {"prefill": [prefill], "decode": [decode]},
        "models": {way.model: dict(way.settings) for way in WAYS},
        "envoy": {"listen": client, "prefill_listen": loopback, "admin": envoy_admin},
        "drain_timeout": 2,
    }
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvreturn-demo-"))
    path = Path(folder) / "kvreturn.yaml"
    path.write_text(yaml.safe_dump(settings))
    up = _kvreturn("up", sink, ["up", "--config", str(path)])
    await start(stack, {up: [f"http://{admin}/healthz", f"http://{client}/health"]})
    return Stack(
        gateway=f"http://{client}/v1",
        oracle=f"http://{single}/v1",
        prefill_metrics=f"http://{prefill}/metrics",
        router_metrics=f"http://{admin}/metrics",
        children=[*nodes.values(), up],
    )


def _kvreturn(name: str, sink: Sink, arguments: Sequence[str]) -> Child:
    return Child(name, [sys.executable, "-m", "kvreturn.cli.main", *arguments], sink)


async def start(
    stack: contextlib.AsyncExitStack, probes: Mapping[Child, Sequence[str]], within: float = _READY_WITHIN
) -> None:
    """Start processes side by side, and wait until all can serve.

    Args:
        stack: stops them, side by side.
        probes: URLs that answer with success when the process can serve.
        within: seconds.

    Raises:
        ProcessError: one of them did not start, or died.
    """
    started: list[Child] = []

    async def stop() -> None:
        await asyncio.gather(*[child.stop(_STOP_WITHIN) for child in started])

    stack.push_async_callback(stop)
    for child in probes:
        await child.start()
        started.append(child)
    await first(started, _ready(probes, within))


async def _ready(probes: Mapping[Child, Sequence[str]], within: float) -> None:
    async with aiohttp.ClientSession() as session:

        async def healthy(urls: Sequence[str]) -> bool:
            try:
                for url in urls:
                    async with session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
                        response.raise_for_status()
            except (aiohttp.ClientError, TimeoutError):
                return False
            return True

        for child, urls in probes.items():
            await child.ready(partial(healthy, urls), within)
