"""The demo's processes with real vLLM: P and D with NIXL between them, and a plain node, on this machine's CPU."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import openai

from kvreturn.demo.leg import Leg
from kvreturn.demo.script import Script
from kvreturn.demo.stack import WAYS, Stack, free_addresses, front, health, start
from kvreturn.demo.vllm_node import VllmNode, make_model
from kvreturn.envoy.process import Sink

_READY_WITHIN = 600.0  # seconds; about 40 on two quiet cores
_UNCACHED = ("--no-enable-prefix-caching",)
_WARM_UP = Script(
    opening=[{"role": "user", "content": "Return the name of the file object that was opened. " * 20}],
    turns=[["And now the next one."]],
    tools=[],
    max_tokens=8,
)


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How the real nodes are run.

    Attributes:
        python: the Python that vLLM is installed in.
        free_words: whether the model may say what does not encode back to the tokens that it generated.
        prefill_cache: whether P has a prefix cache.
    """

    python: Path
    free_words: bool = False
    prefill_cache: bool = False


@contextlib.asynccontextmanager
async def on_vllm(options: VllmOptions, sink: Sink, progress: Callable[[str], None]) -> AsyncIterator[Stack]:
    """P, D and a plain node of real vLLM with a tiny model, and router and Envoy in front of P and D.

    All ways to play the conversation share the nodes, since each start takes half a minute: they differ in
    `cache_salt`, which is part of vLLM's block hashes, so that no cached block serves two of them.

    Args:
        options: how the nodes are run.
        sink: takes the processes' logs.
        progress: takes what is being waited for.

    Raises:
        ProcessError: one of them did not start.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvreturn-model-")))
        progress("a tiny model with random weights")
        await make_model(options.python, folder, sink, free=options.free_words)
        p, d, single, *sides = free_addresses(6)
        served = [way.model for way in WAYS]
        cache = () if options.prefill_cache else _UNCACHED
        nodes = [
            VllmNode("prefill node", p, sides[0], folder, "prefill", served=served, arguments=cache),
            VllmNode("decode node", d, sides[1], folder, "decode", served=served),
            VllmNode("plain node", single, sides[2], folder, "single", served=served, arguments=_UNCACHED),
        ]
        children = {node.address: node.child(options.python, sink) for node in nodes}
        progress("three vLLM nodes")
        await start(stack, {child: [health(address)] for address, child in children.items()}, _READY_WITHIN)
        progress("router and Envoy")
        there = await front(stack, sink, children)
        progress("the first requests (NIXL's handshakes)")
        await there.while_alive(_warm_up(there))
        yield there


async def _warm_up(there: Stack) -> None:
    """Two turns and one plain answer before anything is timed: the first of each kind takes seconds."""
    for url, turns in ((there.gateway, 2), (there.oracle, 1)):
        async with openai.AsyncOpenAI(base_url=url, api_key="demo", max_retries=0) as client:
            leg = Leg(client, WAYS[-1].model, _WARM_UP)
            for number in range(turns):
                await leg.turn(number)
