"""The processes of the demo: nodes, router and Envoy, on free loopback ports."""

import contextlib
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from kvreturn.envoy.process import Child, ProcessError, Sink

MODEL = "sim"
MODEL_OFF = "sim-off"
_READY_WITHIN = 60.0
_STOP_WITHIN = 15.0
# Below those that the system hands out by itself (on Linux from 32768 on): one of these would be gone before its server
# binds it, if somebody's connection came first.
_PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True)
class Stack:
    """Where things are.

    Attributes:
        gateway: base URL of the OpenAI API behind Envoy.
        oracle: base URL of the plain single node.
        prefill_metrics: URL of P's metrics.
        router_metrics: URL of the router's metrics.
        engine: what the nodes are.
        simulated: whether nodes and timing are simulated.
    """

    gateway: str
    oracle: str
    prefill_metrics: str
    router_metrics: str
    engine: str
    simulated: bool


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
    common = ["--model", MODEL, "--model", MODEL_OFF, "--template", options.template, "--tokenizer", options.tokenizer]
    rates = ["--prefill-rate", str(options.prefill_rate), "--decode-rate", str(options.decode_rate)]
    at_once = ["--prefill-rate", "0", "--decode-rate", "0"]  # only the oracle's words are of interest
    cache = "--prefix-caching" if options.prefill_cache else "--no-prefix-caching"
    nodes = [
        _node("prefill node", sink, ["sim", "prefill", "--listen", p, cache, *rates, *common]),
        _node("decode node", sink, ["sim", "decode", "--listen", d, *rates, *common]),
        _node("single node", sink, ["sim", "single", "--listen", single, "--no-prefix-caching", *at_once, *common]),
    ]
    async with contextlib.AsyncExitStack() as stack:
        progress("simulated nodes")
        for child, address in zip(nodes, (p, d, single), strict=True):
            await _start(stack, child, f"http://{address}/health")
        progress("router and Envoy")
        gateway, router = await front(stack, sink, [p], [d])
        yield Stack(
            gateway=f"http://{gateway}/v1",
            oracle=f"http://{single}/v1",
            prefill_metrics=f"http://{p}/metrics",
            router_metrics=f"http://{router}/metrics",
            engine="sim",
            simulated=True,
        )


async def front(
    stack: contextlib.AsyncExitStack, sink: Sink, prefill: Sequence[str], decode: Sequence[str]
) -> tuple[str, str]:
    """Router and Envoy before these nodes, as `kvreturn up` starts them.

    Returns:
        Addresses of the gateway and of the router's metrics.
    """
    listen, admin, client, loopback, envoy_admin = free_addresses(5)
    settings = {
        "listen": listen,
        "admin": admin,
        "pools": {"prefill": list(prefill), "decode": list(decode)},
        "models": {MODEL_OFF: {"proof": "off"}},
        "envoy": {"listen": client, "prefill_listen": loopback, "admin": envoy_admin},
        "drain_timeout": 2,
    }
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvreturn-demo-"))
    path = Path(folder) / "kvreturn.yaml"
    path.write_text(yaml.safe_dump(settings))
    up = _node("up", sink, ["up", "--config", str(path)])
    await _start(stack, up, f"http://{admin}/healthz", f"http://{client}/health")
    return client, admin


def _node(name: str, sink: Sink, arguments: Sequence[str]) -> Child:
    return Child(name, [sys.executable, "-m", "kvreturn.cli.main", *arguments], sink)


async def _start(stack: contextlib.AsyncExitStack, child: Child, *health: str) -> None:
    await child.start()
    stack.push_async_callback(child.stop, _STOP_WITHIN)
    async with aiohttp.ClientSession() as session:

        async def healthy() -> bool:
            try:
                for url in health:
                    async with session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
                        response.raise_for_status()
            except (aiohttp.ClientError, TimeoutError):
                return False
            return True

        await child.ready(healthy, _READY_WITHIN)
