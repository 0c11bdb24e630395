"""The demo: a short conversation, the command in this process, and its stack on nodes that take no time."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import click.testing

from kvreturn.cli.main import main
from kvreturn.demo.stack import WAYS, Front, Stack, by_cache
from kvreturn.sim import NO_TIMING, NodeConfig, SimNode
from support.envoy import unused_address
from support.gateway import front, serving_sims

SHORT = {
    "messages": [
        {"role": "system", "content": "You are a helpful engineer. " * 30},
        {"role": "user", "content": "Where is the bug? " * 20},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "1", "function": {"name": "grep"}}]},
        {"role": "tool", "content": "main.c:7: int x = y;\n" * 20, "tool_call_id": "1"},
        {"role": "assistant", "content": "There."},
        {"role": "user", "content": "Then mend it."},
    ]
}


@dataclass
class Ran:
    """How the command ended, and what it printed."""

    code: int
    out: str
    err: str


def run(*arguments: str) -> Ran:
    """Run the command in this process; it must not end with an exception."""
    result = click.testing.CliRunner().invoke(main, ["demo", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


@dataclass
class Nodes:
    d: SimNode
    stack: Stack


@contextlib.asynccontextmanager
async def nodes(
    template: str = "plain", oracle_template: str | None = None, tokenizer: str = "exact"
) -> AsyncIterator[Nodes]:
    """The demo's stack, but P's prefix cache stays. Another template for the oracle makes it say other words."""
    common: Any = {
        "model": WAYS[0].model,
        "aliases": tuple(way.model for way in WAYS[1:]),
        "tokenizer": tokenizer,
        "timing": NO_TIMING,
        "connector": "kvreturn",
    }
    groups = by_cache(all_cached=False)
    prefills = [
        SimNode(NodeConfig(role="prefill", prefix_caching=cached, template=template, **common)) for cached in groups
    ]
    d = SimNode(NodeConfig(role="decode", template=template, **common))
    oracle = SimNode(NodeConfig(role="single", template=oracle_template or template, **common))
    fronts: dict[str, Front] = {}
    async with contextlib.AsyncExitStack() as stack:
        *urls, d_url, oracle_url = await stack.enter_async_context(serving_sims(*prefills, d, oracle))
        for url, ways in zip(urls, groups.values(), strict=True):
            admin = unused_address()
            p_address, d_address = (u.removeprefix("http://") for u in (url, d_url))
            models = {way.model: dict(way.settings) for way in ways}
            there = await stack.enter_async_context(
                front("kvreturn", [p_address], [d_address], admin=admin, models=models)
            )
            fronts |= {way.name: Front(there.url, url, f"http://{admin}/metrics") for way in ways}
        yield Nodes(d, Stack(fronts, f"{oracle_url}/v1"))
