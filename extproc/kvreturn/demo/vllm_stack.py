"""The demo's processes with real vLLM: P and D with NIXL between them, and a plain node, on this machine's CPU."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from kvreturn.demo.stack import WAYS, Stack, before_nodes, by_cache, free_addresses, health, prefill_name, start
from kvreturn.demo.vllm_node import Role, VllmNode, make_model
from kvreturn.envoy.process import Sink

_READY_WITHIN = 600.0  # seconds; 122 on two busy cores


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How the real nodes are run.

    Attributes:
        python: the Python that vLLM is installed in.
        free_words: whether the model may say what does not encode back to the tokens that it generated.
        prefill_cache: whether all ways are played on a P with a prefix cache.
    """

    python: Path
    free_words: bool = False
    prefill_cache: bool = False


@contextlib.asynccontextmanager
async def on_vllm(options: VllmOptions, sink: Sink, progress: Callable[[str], None]) -> AsyncIterator[Stack]:
    """Prefill nodes, D and a plain node of real vLLM with a tiny model; routers and Envoys before all but the last.

    Ways to play the conversation share nodes where they can, since each takes memory and time to start: they differ in
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
        groups = by_cache(all_cached=options.prefill_cache)
        count = len(groups) + 2
        addresses = free_addresses(2 * count)
        places = iter(zip(addresses[:count], addresses[count:], strict=True))
        served = [way.model for way in WAYS]

        def node(name: str, role: Role, *, cached: bool) -> VllmNode:
            address, side = next(places)
            arguments = () if cached else ("--no-enable-prefix-caching",)
            return VllmNode(name, address, side, folder, role, served=served, arguments=arguments)

        prefills = [node(prefill_name(cached=cached), "prefill", cached=cached) for cached in groups]
        decode = node("decode node", "decode", cached=True)
        plain = node("plain node", "single", cached=False)
        nodes = {n.child(options.python, sink): n.address for n in (*prefills, decode, plain)}
        progress(f"{count} vLLM nodes")
        await start(stack, {child: [health(address)] for child, address in nodes.items()}, _READY_WITHIN)
        progress("router and Envoy")
        by_node = dict(zip((p.address for p in prefills), groups.values(), strict=True))
        fronts, children = await before_nodes(stack, sink, by_node, decode.address)
        yield Stack(fronts, f"http://{plain.address}/v1", [*nodes, *children])
