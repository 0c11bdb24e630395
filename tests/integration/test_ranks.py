"""Data parallel: several engines behind one address, and a conversation that stays with its own, behind real Envoy."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvreturn.sim import NO_TIMING, NodeConfig, SimNode
from kvreturn.sim.config import Role
from support.gateway import BODY_MODES, CHAT, Front, client, front, serving_sims

LONG = "Tell me about the river and the town behind it. " * 8
HEADER = "x-data-parallel-rank"


def node(role: Role, ranks: int, *, cache: bool = True) -> SimNode:
    config = NodeConfig(role=role, connector="kvreturn", timing=NO_TIMING, prefix_caching=cache)
    return SimNode(replace(config, data_parallel_size=ranks))


def ranks(node: SimNode) -> list[str | None]:
    """Which rank each turn's request asked for, in order."""
    return [request.headers.get(HEADER) for request in node.requests if request.path == CHAT]


async def converse(there: Front, name: str, turns: int, **headers: str) -> None:
    messages: Any = [{"role": "user", "content": f"{name}: {LONG}"}]
    async with client(there.url) as ours:
        for _ in range(turns):
            answer = await ours.chat.completions.create(
                model="sim", messages=messages, max_tokens=8, extra_headers=headers
            )
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
            messages += [{"role": "user", "content": "and then?"}]


@pytest.mark.parametrize("returns", ["lazy", "eager"])
async def test_each_turn_of_a_conversation_goes_to_the_ranks_that_hold_it(returns: str) -> None:
    p, d = node("prefill", 2, cache=returns == "eager"), node("decode", 3)  # without one, what P reads shows
    async with serving_sims(p, d) as urls:
        pools = [url.removeprefix("http://") for url in urls]
        changes = {"return": returns}
        nodes = {"prefill": {"static": pools[:1], "ranks": 2}, "decode": {"static": pools[1:], "ranks": 3}}
        async with front("kvreturn", [], [], pools=nodes, **changes) as there:
            for i in range(6):
                await converse(there, f"talk {i}", 3)
            counted = await there.outcomes(18)
            assert there.world
            loads = [view.loads for pool in (there.world.prefill, there.world.decode) for view in pool.snapshot()]
    # By turns, each conversation on one rank of each node.
    assert ranks(p) == [rank for talk in range(6) for rank in [str(talk % 2)] * 3]
    assert ranks(d) == [rank for talk in range(6) for rank in [str(talk % 3)] * 3]
    assert counted == {"first_turn": 6, "hit": 12}
    assert loads == [(0, 0), (0, 0, 0)]
    answered = Counter(rank.engine.stats().requests > 0 for rank in (*p.ranks, *d.ranks))
    assert answered == {True: 5}


@pytest.mark.parametrize("shipped", BODY_MODES)
async def test_no_client_chooses_a_rank(shipped: str) -> None:
    p, d = node("prefill", 2), node("decode", 2)
    async with serving_sims(p, d) as urls:
        pools = [url.removeprefix("http://") for url in urls]
        nodes = {"prefill": {"static": pools[:1]}, "decode": {"static": pools[1:], "ranks": 2}}
        async with front(shipped, [], [], pools=nodes) as there:
            for i in range(4):
                await converse(there, f"talk {i}", 1, **{HEADER: "1"})
    assert set(ranks(p)) == {None}
    assert ranks(d) == ["0", "1", "0", "1"]
