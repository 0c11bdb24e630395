"""Real vLLM nodes on the CPU, NIXL between them, Envoy and the router in front: started once for all tests."""

import asyncio
import contextlib
import functools
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvreturn.config import Settings
from kvreturn.demo.counters import prompt_tokens_by_source
from kvreturn.demo.stack import free_addresses
from kvreturn.demo.vllm_node import EngineMissingError, VllmNode, engine_python, make_model
from kvreturn.envoy import bootstrap
from kvreturn.envoy.process import Child, Sink
from kvreturn.envoy.runner import EnvoyProcess
from kvreturn.server.app import Router, running

JSON = dict[str, Any]
BUDGET = 0.3
ON = {"bidirectional_kv_xfer": True}
UNCACHED = ("--no-enable-prefix-caching",)
_START = 600.0  # seconds; about 40 on two quiet cores


@dataclass
class Engine:
    """Where the nodes are, and the router that runs in this process."""

    p: str
    d: str
    single: str
    gateway: str
    router: Router
    session: aiohttp.ClientSession
    nodes: dict[str, VllmNode]
    python: Path
    children: dict[str, Child]
    lines: deque[str]  # what nodes and Envoy logged

    async def post(self, base: str, path: str, body: JSON) -> tuple[int, JSON]:
        async with self.session.post(base + path, json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def stop(self, name: str) -> None:
        """Take a node away."""
        await self.children[name].stop(20.0)

    async def start(
        self, name: str, *, arguments: Sequence[str] | None = None, stock: bool = False, **extra: object
    ) -> None:
        """A new process in its place, changed.

        Args:
            name: of the node.
            arguments: in place of its usual ones.
            stock: whether it runs vLLM's own connector.
            extra: members of `kv_connector_extra_config`; added to its usual ones, of which a stock one has but one.
        """
        usual = self.nodes[name]
        given = usual.arguments if arguments is None else arguments
        members = {**(ON if stock else usual.extra), **extra}
        node = replace(usual, extra=members, arguments=given, connector="stock" if stock else usual.connector)
        child = self.children[name] = node.child(self.python, functools.partial(note, self.lines))
        await child.start()
        await healthy(self.session, child, node)

    async def metric(self, base: str, name: str) -> float:
        """The sum of one of a node's own metrics."""
        async with self.session.get(f"{base}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    async def sources(self, base: str = "") -> dict[str, float]:
        """A node's prompt tokens, P's by default, by where their KV came from."""
        return await prompt_tokens_by_source(self.session, f"{base or self.p}/metrics")

    def outcomes(self) -> dict[str, float]:
        """The router's turns by outcome, so far."""
        families = self.router.world.metrics.registry.collect()
        totals: dict[str, float] = {}
        for sample in (s for f in families for s in f.samples if s.name == "kvreturn_turns_total"):
            totals[sample.labels["outcome"]] = totals.get(sample.labels["outcome"], 0.0) + sample.value
        return totals


def note(lines: deque[str], name: str, line: str) -> None:
    lines.append(f"{name}: {line}")
    folder = os.environ.get("KVRETURN_ENGINE_LOGS")
    if folder:
        with (Path(folder) / f"{name}.log").open("a") as file:
            file.write(line + "\n")


async def healthy(session: aiohttp.ClientSession, child: Child, node: VllmNode) -> None:
    """Wait until the node serves."""

    async def probe() -> bool:
        try:
            async with session.get(f"http://{node.address}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    await child.ready(probe, _START)


@contextlib.asynccontextmanager
async def front(
    prefill: Sequence[str], decode: Sequence[str], sink: Sink, envoy: JSON | None = None, **changes: object
) -> AsyncIterator[tuple[Router, str]]:
    """A router, and Envoy with the gateway at this URL, before these nodes."""
    listen, client, loopback, admin = free_addresses(4)
    settings = Settings.model_validate(
        {
            "listen": listen,
            "admin": None,
            "pools": {"prefill": list(prefill), "decode": list(decode)},
            "envoy": {"listen": client, "prefill_listen": loopback, "admin": admin, **(envoy or {})},
            "drain_timeout": 1,
            **changes,
        }
    )
    async with (
        running(settings) as router,
        EnvoyProcess(bootstrap.to_dict(bootstrap.build(settings)), sink=sink) as process,
    ):
        await process.ready()
        yield router, f"http://{client}"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    try:
        python = engine_python()
    except EngineMissingError as e:
        pytest.skip(str(e))
    model = tmp_path_factory.mktemp("model") / "tiny"
    lines: deque[str] = deque(maxlen=10_000)
    sink = functools.partial(note, lines)
    await make_model(python, model, sink, template="drop_thinking")
    p, d, single, *sides = free_addresses(6)
    nodes = [
        VllmNode("prefill", p, sides[0], model, "prefill", arguments=UNCACHED),
        VllmNode("decode", d, sides[1], model, "decode", extra={**ON, "retention_budget": BUDGET}),
        VllmNode("single", single, sides[2], model, "single", arguments=UNCACHED),
    ]
    async with contextlib.AsyncExitStack() as stack:
        # A new connection each time: vLLM closes those that are idle for 5 s, maybe just as one is used again.
        connector = aiohttp.TCPConnector(force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        children = {node.name: node.child(python, sink) for node in nodes}

        async def stop() -> None:
            await asyncio.gather(*[child.stop(20.0) for child in children.values()])

        for child in children.values():
            await child.start()
        stack.push_async_callback(stop)
        for node in nodes:
            await healthy(session, children[node.name], node)
        router, gateway = await stack.enter_async_context(front([p], [d], sink))
        yield Engine(
            p=f"http://{p}",
            d=f"http://{d}",
            single=f"http://{single}",
            gateway=gateway,
            router=router,
            session=session,
            nodes={node.name: node for node in nodes},
            python=python,
            children=children,
            lines=lines,
        )
