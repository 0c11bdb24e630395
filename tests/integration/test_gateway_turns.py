"""Conversations of the official client through real Envoy, the router and simulated nodes that prove and read."""

import asyncio
import itertools

import pytest

from kvreturn.sim import SimNode
from support.gateway import CHAT, COMPLETIONS, SHIPPED, Product, client, product
from support.talk import Talk

TURNS = 4
_APIS = [pytest.param(CHAT, id="chat"), pytest.param(COMPLETIONS, id="completions")]
_NAMES = ("Ada", "Bob")


def places(there: Product, api: str) -> dict[str, tuple[set[int], set[int]]]:
    """By conversation: which prefill and which decode nodes it was at."""

    def at(nodes: list[SimNode], name: str) -> set[int]:
        return {i for i, n in enumerate(nodes) if any(f"{name} says" in str(b) for b in there.asked(n, api))}

    return {name: (at(there.p, name), at(there.d, name)) for name in _NAMES}


@pytest.mark.parametrize("shipped", SHIPPED)
@pytest.mark.parametrize("api", _APIS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_two_conversations_are_read_back_from_turn_2_on_each_at_its_own_nodes(
    shipped: str,
    api: str,
    stream: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    async with (
        product(shipped, prefills=2, decodes=2) as there,
        client(there.front.url) as sdk,
        client(there.oracle) as plain,
    ):
        for node in (*there.p, *there.d):
            node.faults.add(api, "delay", seconds=0.15)  # so that the first turns overlap, and find different nodes
        talks = [Talk(name, api, stream) for name in _NAMES]
        await asyncio.gather(*(talk.turn(sdk) for talk in talks))
        # From here on all nodes are idle at each choice: without affinity both talks would go to the first ones.
        for _, talk in itertools.product(range(TURNS - 1), talks):
            await talk.turn(sdk)
        expected = [Talk(name, api, stream) for name in _NAMES]
        for _, talk in itertools.product(range(TURNS), expected):
            await talk.turn(plain)
        assert [t.answers for t in talks] == [t.answers for t in expected]
        assert await there.front.outcomes(2 * TURNS) == {"first_turn": 2, "hit": 2 * (TURNS - 1)}
        for at in zip(*places(there, api).values(), strict=True):
            assert sorted(map(sorted, at)) == [[0], [1]]
        read = sum(node.stats.read_tokens for node in there.p)
        assert read == there.front.metric("read_back_tokens_total") > 0
        engines = [node.engine.identity().engine_id for node in (*there.p, *there.d)]
        assert not there.front.tap.leaks(*engines)
