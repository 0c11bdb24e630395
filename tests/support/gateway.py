"""The whole product on loopback: clients -> a tap -> real Envoy -> the router -> simulated or scripted nodes."""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import yaml
from yarl import URL

from kvreturn.config import Settings
from kvreturn.envoy.bootstrap import build, to_dict
from kvreturn.envoy.runner import EnvoyProcess
from kvreturn.server.app import running
from kvreturn.server.world import World
from kvreturn.sim import NO_TIMING, NodeConfig, SimNode, Timing
from kvreturn.sim.config import ConnectorKind, Role
from kvreturn.store.memory import MemoryStore
from support.envoy import Json, unused_address
from support.harness import outcomes
from support.nodes import FakePrefill, Handler, replies
from support.tap import Tap

FAST, PORTABLE = "kvreturn", "portable-lane"
SHIPPED = (FAST, PORTABLE, "full-duplex")
"""The examples that users start from: the fast lane, the portable one, and that with bodies in full duplex."""
BODY_MODES = (FAST, "full-duplex")
"""Those that differ in how requests pass: enough where answers do not matter."""
_EXAMPLES = Path(__file__).parents[2] / "examples"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def configuration(shipped: str, prefill: Sequence[str], decode: Sequence[str], /, **changes: Any) -> Json:  # noqa: ANN401
    """A shipped configuration on free loopback addresses, as YAML has it.

    Args:
        shipped: one of `SHIPPED`.
        prefill: addresses of prefill nodes.
        decode: addresses of decode nodes.
        changes: further settings; sections are merged.
    """
    plain: Json = yaml.safe_load((_EXAMPLES / f"{shipped}.yaml").read_text())
    ours: Json = {
        "pools": {"prefill": list(prefill), "decode": list(decode)},
        "listen": unused_address(),
        "admin": None,
        "drain_timeout": 0.05,
        "envoy": {name: unused_address() for name in ("listen", "prefill_listen", "admin")},
    }
    for section, value in (*ours.items(), *changes.items()):
        plain[section] = {**plain.get(section, {}), **value} if isinstance(value, dict) else value
    return plain


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, names of headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


async def what_comes(answer: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """What is left of an answer's body, and whether it came to its end."""
    got = b""
    try:
        async for piece in answer.content.iter_any():
            got += piece
    except aiohttp.ClientPayloadError:
        return got, False
    return got, True


@dataclass
class Front:
    """Envoy with clients before it.

    Attributes:
        settings: what its bootstrap was made of.
        envoy: the process.
        tap: between clients and Envoy.
        client: talks to the tap.
        log: Envoy's lines.
        world: the router's, if it runs in this process.
    """

    settings: Settings
    envoy: EnvoyProcess
    tap: Tap
    client: aiohttp.ClientSession
    log: list[str]
    world: World | None = None

    async def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """One request; names of `headers` have underscores for hyphens. A body is JSON unless they say otherwise."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named.setdefault("content-type", "application/json")
        data = None if body is None else io.BytesIO(body)  # aiohttp warns of large bodies that are plain bytes
        url = URL(f"http://{self.tap.address}{path}", encoded=True)  # as it is: `//` and escapes stay
        async with self.client.request(method, url, data=data, headers=named, allow_redirects=False) as response:
            got = await response.read()
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, got)

    async def post(self, path: str, body: bytes, **headers: str) -> Answer:
        return await self.request("POST", path, body, **headers)

    @property
    def url(self) -> str:
        """Base URL of the API, for clients."""
        return f"http://{self.tap.address}/v1"

    @property
    def store(self) -> MemoryStore:
        assert self.world
        assert isinstance(self.world.store, MemoryStore)
        return self.world.store

    async def outcomes(self, turns: int) -> dict[str, int]:
        """Turns by outcome, once so many are counted: that is when their streams close, a moment after the answer."""
        assert self.world
        async with asyncio.timeout(5):
            while sum((counted := outcomes(self.world.metrics)).values()) < turns:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
        return counted

    def metric(self, name: str, **labels: str) -> float:
        assert self.world
        return self.world.metrics.value(f"kvreturn_{name}", **labels)


@contextlib.asynccontextmanager
async def envoy_before(settings: Settings, change: Callable[[Json], object] = lambda _: None) -> AsyncIterator[Front]:
    """Envoy with our bootstrap, and a tap before it; the router is the caller's business.

    Args:
        settings: what the bootstrap is made of.
        change: edits the bootstrap.
    """
    bootstrap = to_dict(build(settings))
    change(bootstrap)
    log: list[str] = []
    tap = Tap()
    async with (
        EnvoyProcess(bootstrap, sink=lambda _, line: log.append(line), concurrency=1) as envoy,
        tap.before(settings.envoy.listen),
        aiohttp.ClientSession(f"http://{tap.address}", auto_decompress=False) as client,
    ):
        yield Front(settings, envoy, tap, client, log)


@contextlib.asynccontextmanager
async def front(
    shipped: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    change: Callable[[Json], object] = lambda _: None,
    /,
    **changes: Any,  # noqa: ANN401 - settings as YAML has them
) -> AsyncIterator[Front]:
    """Envoy and the router before these nodes; see `configuration`. Whatever clients did, no handle reached them."""
    settings = Settings.model_validate(configuration(shipped, prefill, decode, **changes))
    async with running(settings) as router, envoy_before(settings, change) as envoy:
        envoy.world = router.world
        yield envoy
        assert not envoy.tap.leaks(*prefill, *decode)


@contextlib.asynccontextmanager
async def scripted(
    shipped: str,
    d: Handler | None = None,
    p: Handler | None = None,
    change: Callable[[Json], object] = lambda _: None,
    /,
    **changes: Any,  # noqa: ANN401 - settings as YAML has them
) -> AsyncIterator[tuple[Front, FakePrefill, FakePrefill]]:
    """`front` before a prefill and a decode node that do as told; left out, P is one with our connector.

    Yields:
        The front, P and D.
    """
    async with (
        FakePrefill(p or replies()) as prefill,
        FakePrefill(d or replies()) as decode,
        front(shipped, [prefill.address], [decode.address], change, **changes) as there,
    ):
        yield there, prefill, decode


@dataclass
class Product:
    """The front before simulated nodes.

    Attributes:
        front: Envoy and the router.
        p: prefill nodes.
        d: decode nodes.
        oracle: base URL of a plain node's API, which the answers must equal.
    """

    front: Front
    p: list[SimNode]
    d: list[SimNode]
    oracle: str

    def asked(self, node: SimNode, path: str) -> list[Json]:
        """Bodies of the requests that a node got on this path."""
        return [json.loads(r.body) for r in node.requests if r.path == path]


@contextlib.asynccontextmanager
async def product(
    shipped: str,
    *,
    prefills: int = 1,
    decodes: int = 1,
    timing: Timing = NO_TIMING,
    template: str = "plain",
    store_responses: bool = False,
    cached: bool = False,
    stock: bool = False,
    change: Callable[[Json], object] = lambda _: None,
    **changes: Any,  # noqa: ANN401 - settings as YAML has them
) -> AsyncIterator[Product]:
    """Everything, with simulated nodes that run our connector.

    Args:
        shipped: see `configuration`.
        prefills: number of prefill nodes.
        decodes: number of decode nodes.
        timing: of the nodes.
        template: of the nodes.
        store_responses: whether nodes keep responses.
        stock: whether P runs vLLM's own connector.
        cached: whether P has a prefix cache; without one, what it reads shows. Eager returns need it.
        change: edits Envoy's bootstrap.
        changes: see `configuration`.
    """

    def node(role: Role, connector: ConnectorKind, *, cache: bool) -> SimNode:
        config = NodeConfig(
            role=role,
            connector=connector,
            timing=timing,
            template=template,
            prefix_caching=cache,
            store_responses=store_responses,
            model="sim",
        )
        return SimNode(config)

    p = [node("prefill", "stock" if stock else "kvreturn", cache=cached) for _ in range(prefills)]
    d = [node("decode", "kvreturn", cache=True) for _ in range(decodes)]
    oracle = node("single", "stock", cache=False)
    async with serving_sims(*p, *d, oracle) as urls:
        addresses = [url.removeprefix("http://") for url in urls]
        async with front(shipped, addresses[:prefills], addresses[prefills:-1], change, **changes) as before:
            yield Product(before, p, d, f"{urls[-1]}/v1")


@contextlib.asynccontextmanager
async def serving_sims(*nodes: SimNode) -> AsyncIterator[list[str]]:
    """Let simulated nodes serve; their base URLs."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for node in nodes:
            urls.append(await node.start())
            stack.push_async_callback(node.stop)
        yield urls


def client(url: str) -> openai.AsyncOpenAI:
    """The official client, unmodified."""
    return openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0)
