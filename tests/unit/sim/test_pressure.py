"""Too little memory: who waits, who is preempted, what is evicted, what is let go.

Figures by hand: a turn of 200 + 24 tokens needs 13 blocks to start, 14 in the end, and leaves them pinned on D.
"""

import asyncio
import functools
from dataclasses import replace

import pytest

from kvreturn.core import wire
from kvreturn.sim import INSTANT, BlockUse
from unit.sim.cluster import COLD, COMPLETIONS, Cluster, Json, Make, generate, ids, tokens

PACED = replace(INSTANT, decode_rate=10.0)
SMALL: Json = {"num_blocks": 33, "max_model_len": 512}
PLUGIN: Json = {"connector": "kvreturn"}


async def advance_until(c: Cluster, live: int, limit: float, step: float = 0.5) -> None:
    """Let time pass until only `live` requests run or wait on D, at most `limit` seconds."""
    end = c.clock.now() + limit
    while c.d.stats.running + c.d.stats.waiting > live:
        await c.clock.advance(step)
        assert c.clock.now() < end


def running(c: Cluster, number: int) -> bool:
    return c.d.stats.running == number


async def decode_leg(c: Cluster, body: Json) -> Json:
    _, at_p = await c.prefill(COMPLETIONS, body)
    status, answer = await c.post(c.d, COMPLETIONS, {**body, "kv_transfer_params": at_p["kv_transfer_params"]})
    assert status == 200
    return answer


async def turn(c: Cluster, seed: int, length: int = 200) -> tuple[list[int], Json | None]:
    prompt = ids(seed, length)
    answer = await decode_leg(c, generate(prompt))
    return prompt + tokens(answer), answer["kv_transfer_params"]


# --- waiting ---


@pytest.mark.parametrize("connector", ["stock", "kvreturn"])
async def test_room_for_8_of_24_conversations(cluster: Make, connector: str) -> None:
    d = {"num_blocks": 8 * 14 + 1, "max_model_len": 1_024, "timing": PACED}
    c = await cluster(d=d, connector=connector)
    bodies = [generate(ids(seed, 200)) for seed in range(24)]
    legs = [asyncio.create_task(decode_leg(c, body)) for body in bodies]
    await c.until(lambda: c.d.stats.running == 8)
    await c.until(lambda: c.d.stats.waiting == 16)
    assert c.d.blocks() == BlockUse(running=8 * 13, free=8)
    await advance_until(c, 16, 5)
    if connector == "stock":
        # D starves on what nobody has come for: nothing runs before the first TTL is over.
        await c.clock.advance(400)
        assert (c.d.stats.running, c.d.stats.waiting) == (0, 16)
        assert c.d.blocks() == BlockUse(pinned=8 * 14)
    else:
        # At most half of the blocks are kept: 4 turns; the oldest are let go for later ones. 8 + 4 + 4 + 4 + 4 run.
        assert c.d.stats.pins == 4
        await advance_until(c, 0, 15)
        assert (c.d.stats.pins, c.d.stats.early_releases, c.d.stats.refused_pins) == (4, 20, 0)
    await advance_until(c, 0, 1_500, 20.0)
    for leg, body in zip(legs, bodies, strict=True):
        assert tokens(await leg) == tokens(await c.expected(COMPLETIONS, body))
    await c.clock.advance(500)
    use = c.d.blocks()
    assert use == BlockUse(free=use.free, cached=use.cached)
    assert c.d.stats.preemptions == 0


@pytest.mark.parametrize(
    ("policy", "headers", "priority", "waits"),
    [("fcfs", {}, -1, True), ("priority", {}, -1, False), ("priority", {"X-Vllm-Priority": "5"}, -1, True)],
)
async def test_only_a_higher_priority_overtakes(
    cluster: Make, policy: str, headers: dict[str, str], priority: int, *, waits: bool
) -> None:
    c = await cluster(scheduling_policy=policy, **SMALL)
    await c.turn(COMPLETIONS, generate(ids(1, 400), 1))  # 25 of 32 blocks pinned
    large = asyncio.create_task(c.post(c.d, COMPLETIONS, generate(ids(2, 300), 1)))
    await c.until(lambda: c.d.stats.waiting == 1)
    small = asyncio.create_task(c.post(c.d, COMPLETIONS, generate(ids(3, 10), 1, priority=priority), **headers))
    if waits:
        await c.until(lambda: c.d.stats.waiting == 2)
    else:
        await small
    assert not large.done()
    await c.clock.advance(481)
    await asyncio.gather(large, small)


@pytest.mark.parametrize(
    ("policy", "priorities", "victim"), [("fcfs", (5, 0), 1), ("priority", (5, 0), 0), ("priority", (0, 0), 1)]
)
async def test_who_is_preempted(cluster: Make, policy: str, priorities: tuple[int, int], victim: int) -> None:
    c = await cluster(d={"timing": PACED}, scheduling_policy=policy, **SMALL)
    bodies = [generate(ids(1 + i, 200), 150, priority=priority) for i, priority in enumerate(priorities)]
    tasks = []
    for i, body in enumerate(bodies):  # together 44 blocks
        tasks.append(asyncio.create_task(c.post(c.d, COMPLETIONS, body)))
        await c.until(functools.partial(running, c, i + 1))
    await advance_until(c, 1, 20)
    await tasks[1 - victim]
    assert not tasks[victim].done()
    assert c.d.stats.preemptions == 1
    await advance_until(c, 0, 20)
    for task, body in zip(tasks, bodies, strict=True):
        assert tokens((await task)[1]) == tokens(await c.expected(COMPLETIONS, body))
    use = c.d.blocks()
    assert use == BlockUse(free=use.free, cached=use.cached)


async def test_a_preempted_request_whose_client_leaves_gives_everything_back(cluster: Make) -> None:
    c = await cluster(d={"timing": PACED}, **SMALL)
    tasks = [asyncio.create_task(c.post(c.d, COMPLETIONS, generate(ids(i, 200), 150))) for i in (1, 2)]
    await c.until(lambda: c.d.stats.running == 2)
    while not c.d.stats.preemptions:
        await c.clock.advance(0.5)
    assert (c.d.stats.running, c.d.stats.waiting) == (1, 1)
    for task in tasks:
        task.cancel()
    await c.until(lambda: c.d.stats.running + c.d.stats.waiting == 0)
    use = c.d.blocks()
    assert use == BlockUse(free=use.free, cached=use.cached)


# --- the prefix cache ---


async def test_the_least_recently_used_prefix_is_evicted_and_pins_never_are(cluster: Make) -> None:
    c = await cluster(d={"num_blocks": 65}, max_model_len=1_024)
    held, _ = await turn(c, 1)  # 14 of 64 blocks pinned
    for seed in (2, 3):
        await c.post(c.d, COMPLETIONS, generate(ids(seed, 320), 1))  # 20 blocks each
    await c.post(c.d, COMPLETIONS, generate(ids(2, 320), 1))  # 2 is used again
    assert c.d.blocks() == BlockUse(pinned=14, cached=40, free=10)
    await c.post(c.d, COMPLETIONS, generate(ids(4, 400), 1))  # 25: the 10 free ones, and 15 of 3's
    for prompt, local in ((ids(2, 320), 304), (ids(3, 320), 5 * 16), (held, 208)):
        before = c.d.stats.local_tokens
        await c.post(c.d, COMPLETIONS, generate(prompt, 1))
        assert c.d.stats.local_tokens - before == local


# --- kvreturn's retention budget: 32 of 65 blocks ---

BUDGET: Json = {"num_blocks": 65, "max_model_len": 1_024, **PLUGIN}


async def test_the_oldest_turn_is_let_go_for_a_new_one(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False, **PLUGIN}, d=BUDGET, max_model_len=1_024)
    turns = [await turn(c, seed) for seed in (1, 2, 3)]
    assert (c.d.stats.pins, c.d.stats.blocks_pinned, c.d.stats.early_releases) == (2, 28, 1)
    for (full, handle), read in zip(turns, (0, 223, 223), strict=True):
        body = generate(full + ids(99, 60), 1)
        params = {**COLD, "kvreturn": {"v": 1, "handle": handle}}
        _, answer = await c.post(c.p, COMPLETIONS, {**body, "kv_transfer_params": params})
        assert tokens(answer) == tokens(await c.expected(COMPLETIONS, body))
        told = wire.load_report(answer["kv_transfer_params"]["kvreturn"])
        assert (told.proven, told.read, told.reason) == (223, read, None if read else "used")
    assert c.d.stats.pins == 0


async def test_shared_blocks_count_once(cluster: Make) -> None:
    c = await cluster(d=BUDGET, p=PLUGIN, max_model_len=1_024)
    full, _ = await turn(c, 1)
    await decode_leg(c, generate(full + ids(99, 60)))  # 307 held: 20 blocks, 13 of them the first turn's
    assert (c.d.stats.pins, c.d.stats.blocks_pinned, c.d.stats.early_releases) == (2, 21, 0)


async def test_a_turn_that_is_too_large_leaves_no_handle_and_lets_none_go(cluster: Make) -> None:
    c = await cluster(d=BUDGET, p=PLUGIN, max_model_len=1_024)
    await turn(c, 1)
    _, handle = await turn(c, 2, 600)  # 39 blocks
    assert handle is None
    assert (c.d.stats.pins, c.d.stats.early_releases, c.d.stats.refused_pins) == (1, 0, 1)


async def test_what_a_stock_p_may_read_without_asking_is_not_let_go(cluster: Make) -> None:
    c = await cluster(d=BUDGET, max_model_len=1_024)
    handles = [(await turn(c, seed))[1] for seed in (1, 2, 3)]
    assert [handle is not None for handle in handles] == [True, True, False]
    assert (c.d.stats.pins, c.d.stats.early_releases, c.d.stats.refused_pins) == (2, 0, 1)


async def test_a_budget_of_nothing_keeps_nothing(cluster: Make) -> None:
    c = await cluster(d={**PLUGIN, "retention_budget": 0.0}, p=PLUGIN)
    assert (await turn(c, 1))[1] is None
    assert c.d.stats.blocks_used == 0
