"""Time, memory and leaving clients."""

import asyncio

import aiohttp
import pytest

from kvreturn.sim import NO_TIMING, ManualClock, NodeConfig, RealClock, Timing
from unit.sim.cluster import CHAT, COMPLETIONS, Json, Make, chunks, generate, ids, tokens

SMALL: Json = {"num_blocks": 33, "max_model_len": 512}  # 32 blocks of 16 tokens
TIMING = Timing(prefill_rate=1_000.0, decode_rate=10.0, transfer_rate=131_072_000.0, overhead=0.5)


async def test_a_request_takes_the_time_of_its_parts(cluster: Make) -> None:
    c = await cluster(timing=TIMING)
    # 0.5 s overhead, 0.2 s for 200 tokens; the first token comes with the prefill, 4 more at 10 per second.
    status, _ = await c.elapsed(c.post(c.oracle, COMPLETIONS, generate(ids(1, 200), 5)), 1.1)
    assert status == 200


async def test_a_load_takes_transfer_time_instead_of_prefill_time(cluster: Make) -> None:
    c = await cluster(timing=TIMING)
    body = generate(ids(1, 200), 1)
    _, at_p = await c.elapsed(c.prefill(COMPLETIONS, body), 0.7)
    leg = c.post(c.d, COMPLETIONS, {**body, "kv_transfer_params": at_p["kv_transfer_params"]})
    # 200 tokens at 1,000 tokens per second of transfer, then the last one computed again.
    await c.elapsed(asyncio.wait_for(leg, 5), 0.2 + 0.501)


async def test_prompts_are_computed_one_after_another_but_streams_run_side_by_side(cluster: Make) -> None:
    c = await cluster(timing=TIMING)
    body = generate(ids(1, 500), 11)  # 1 s to compute, 1 s to generate
    first = asyncio.create_task(c.post(c.oracle, COMPLETIONS, body))
    second = asyncio.create_task(c.post(c.oracle, COMPLETIONS, body))
    await c.until(lambda: c.oracle.stats.running == 2)
    await c.clock.advance(2.05)
    await asyncio.sleep(0.02)
    assert first.done() != second.done()
    await c.clock.advance(1.0)
    await asyncio.gather(first, second)


async def test_a_request_waits_until_there_are_blocks(cluster: Make) -> None:
    c = await cluster(**SMALL)
    await c.turn(COMPLETIONS, generate(ids(1, 400), 1))  # 25 blocks pinned on D for 480 s
    task = asyncio.create_task(c.post(c.d, COMPLETIONS, generate(ids(2, 200), 1)))
    await c.until(lambda: c.d.stats.waiting == 1)
    await c.clock.advance(479)
    assert not task.done()
    await c.clock.advance(2)
    assert (await task)[0] == 200
    assert c.d.stats.expired_holds == 1


async def test_who_came_first_gets_blocks_first(cluster: Make) -> None:
    c = await cluster(**SMALL)
    await c.turn(COMPLETIONS, generate(ids(1, 400), 1))
    large = asyncio.create_task(c.post(c.d, COMPLETIONS, generate(ids(2, 300), 1)))
    await c.until(lambda: c.d.stats.waiting == 1)
    small = asyncio.create_task(c.post(c.d, COMPLETIONS, generate(ids(3, 10), 1)))
    await c.until(lambda: c.d.stats.waiting == 2)
    await asyncio.sleep(0.02)
    assert not small.done()  # it would fit
    await c.clock.advance(481)
    await asyncio.gather(large, small)


async def test_p_frees_its_blocks_when_its_lease_is_over(cluster: Make) -> None:
    c = await cluster()
    await c.prefill(COMPLETIONS, generate(ids(1, 100)))
    await c.clock.advance(29.9)
    assert (c.p.stats.leases, c.p.stats.blocks_pinned) == (1, 7)
    await c.clock.advance(0.2)
    assert (c.p.stats.leases, c.p.stats.blocks_used, c.p.stats.expired_holds) == (0, 0, 1)


async def test_a_decode_request_that_waits_renews_the_lease(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, d={"decoder_ttl": 200.0}, **SMALL)
    await c.turn(COMPLETIONS, generate(ids(1, 400), 1))
    body = generate(ids(2, 200))
    _, at_p = await c.prefill(COMPLETIONS, body)
    task = asyncio.create_task(c.post(c.d, COMPLETIONS, {**body, "kv_transfer_params": at_p["kv_transfer_params"]}))
    await c.until(lambda: c.d.stats.waiting == 1)
    await c.clock.advance(150)
    assert c.p.stats.leases == 1
    for seed in range(3, 6):  # P would use freed blocks
        await c.post(c.p, COMPLETIONS, generate(ids(seed, 250), 1))
    await c.clock.advance(51)
    _, answer = await task
    assert tokens(answer) == tokens(await c.expected(COMPLETIONS, body))
    assert c.p.stats.leases == 0


async def test_blocks_read_after_the_lease_may_hold_something_else(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, **SMALL)
    body = generate(ids(2, 200))
    _, at_p = await c.prefill(COMPLETIONS, body)
    await c.clock.advance(31)
    for seed in range(3, 6):
        await c.post(c.p, COMPLETIONS, generate(ids(seed, 400), 1))
    _, answer = await c.post(c.d, COMPLETIONS, {**body, "kv_transfer_params": at_p["kv_transfer_params"]})
    assert tokens(answer) != tokens(await c.expected(COMPLETIONS, body))
    assert c.p.stats.late_notifications == 1


async def test_a_generation_that_finds_no_block_is_preempted_and_computed_again(cluster: Make) -> None:
    slow = Timing(prefill_rate=0, decode_rate=10, transfer_rate=0, overhead=0)
    c = await cluster(p={"num_blocks": 65}, d={**SMALL, "timing": slow, "prefix_caching": False}, max_model_len=512)
    bodies = [generate(ids(seed, 200), 150) for seed in (1, 2)]  # together 44 of D's 32 blocks
    legs = []
    for body in bodies:
        _, at_p = await c.prefill(COMPLETIONS, body)
        request = {**body, "kv_transfer_params": at_p["kv_transfer_params"]}
        legs.append(asyncio.create_task(c.post(c.d, COMPLETIONS, request)))
    await c.until(lambda: c.d.stats.running == 2)
    assert c.d.stats.read_tokens == 400
    while not legs[0].done() and not legs[1].done():
        await c.clock.advance(1)
        await asyncio.sleep(0)
        assert c.clock.now() < 100
    assert (c.d.stats.running, c.d.stats.waiting) == (0, 1)
    await c.clock.advance(500)  # the one that is finished keeps its blocks until the end of its TTL
    for leg, body in zip(legs, bodies, strict=True):
        _, answer = await asyncio.wait_for(leg, 5)
        assert tokens(answer) == tokens(await c.expected(COMPLETIONS, body))
    assert c.d.stats.computed_tokens > 200  # one prompt and what followed it, besides the last tokens of the prompts


async def test_loaded_blocks_can_be_shared_before_the_request_that_loaded_them_is_computed(cluster: Make) -> None:
    c = await cluster(d={"timing": TIMING})
    body = generate(ids(1, 200), 1)
    _, at_p = await c.prefill(COMPLETIONS, body)
    first = asyncio.create_task(c.post(c.d, COMPLETIONS, {**body, "kv_transfer_params": at_p["kv_transfer_params"]}))
    await c.until(lambda: c.d.stats.waiting == 1)
    await c.clock.advance(0.21)  # loaded; its overhead of 0.5 s is not over
    second = asyncio.create_task(c.post(c.d, COMPLETIONS, body))
    await c.until(lambda: c.d.stats.local_tokens == 192)
    assert c.d.stats.computed_tokens == 0
    await c.clock.advance(2)
    assert tokens((await first)[1]) == tokens((await second)[1])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(cluster: Make, *, stream: bool) -> None:
    c = await cluster(d={"timing": TIMING})
    body = generate(ids(1, 100), 1_000)
    _, at_p = await c.prefill(COMPLETIONS, body)
    request = {**body, "stream": stream, "kv_transfer_params": at_p["kv_transfer_params"]}
    task = asyncio.create_task(c.session.post(c.urls[id(c.d)] + COMPLETIONS, json=request).__aenter__())
    await c.until(lambda: c.d.stats.waiting == 1)
    await c.clock.advance(5)
    await c.until(lambda: c.d.stats.generated_tokens > 5)
    if stream:
        (await task).close()
    else:
        task.cancel()
    await c.until(lambda: c.d.stats.running == 0)
    assert (c.d.stats.blocks_used, c.d.stats.pins) == (0, 0)


async def test_a_client_that_leaves_while_its_request_waits_frees_the_blocks_of_p(cluster: Make) -> None:
    c = await cluster(**SMALL)
    await c.turn(COMPLETIONS, generate(ids(1, 400), 1))
    body = generate(ids(2, 200))
    _, at_p = await c.prefill(COMPLETIONS, body)
    task = asyncio.create_task(c.post(c.d, COMPLETIONS, {**body, "kv_transfer_params": at_p["kv_transfer_params"]}))
    await c.until(lambda: c.d.stats.waiting == 1)
    assert c.p.stats.leases == 1
    task.cancel()
    await c.until(lambda: c.p.stats.leases == 0)
    assert c.d.stats.waiting == 0


async def test_a_restart_breaks_connections_and_forgets_everything(cluster: Make) -> None:
    c = await cluster(d={"timing": TIMING})
    body = generate(ids(1, 100), 1_000)
    before = c.d.engine.id
    whole = asyncio.create_task(c.post(c.d, COMPLETIONS, body))
    streamed = asyncio.create_task(c.stream(c.d, COMPLETIONS, body))
    await c.until(lambda: c.d.stats.running == 2)
    await c.clock.advance(5)
    c.d.restart()
    for task in (whole, streamed):
        with pytest.raises(aiohttp.ClientError):
            await task
    assert c.d.engine.id != before
    assert (c.d.stats.requests, c.d.stats.blocks_used) == (0, 0)
    status, _ = await c.elapsed(c.post(c.d, COMPLETIONS, generate(ids(1, 500), 1)), 1.0)
    assert status == 200


async def test_a_dying_engine_ends_its_streams_with_an_error_event(cluster: Make) -> None:
    c = await cluster(d={"timing": TIMING})
    task = asyncio.create_task(
        c.stream(c.d, CHAT, {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True})
    )
    await c.until(lambda: c.d.stats.running == 1)
    await c.clock.advance(3)
    c.d.engine.die()
    events = await task
    assert len(events) > 10
    assert '"type": "InternalServerError"' in events[-2]
    assert events[-1] == "[DONE]"


async def test_reads_race_with_nothing_while_many_conversations_run(cluster: Make) -> None:
    c = await cluster(timing=NO_TIMING, connector="kvreturn", num_blocks=129, max_model_len=1_024)

    async def conversation(seed: int) -> None:
        prompt = ids(seed, 60)
        handle: Json | None = None
        for i in range(4):
            at_p, at_d = await c.turn(COMPLETIONS, generate(prompt, 30), handle)
            assert tokens(at_d) == tokens(await c.expected(COMPLETIONS, generate(prompt, 30)))
            prompt += tokens(at_d) + ids(seed * 100 + i, 20)
            handle = at_d["kv_transfer_params"]
            assert at_p["kv_transfer_params"]["kvreturn"]["proven"] <= len(prompt)
        assert handle is not None
        c.d.ranks[0].notify(handle["remote_engine_id"], handle["remote_request_id"])

    await asyncio.gather(*(conversation(seed) for seed in range(1, 9)))
    assert c.d.stats.blocks_used == 0
    assert c.p.stats.hung_requests == c.p.stats.leaked_blocks == 0


async def test_whole_and_streamed_usage_agree(cluster: Make) -> None:
    c = await cluster()
    body: Json = {"messages": [{"role": "user", "content": "Hi " * 40}], "max_tokens": 30}
    _, whole = await c.post(c.d, CHAT, body)
    events = chunks(await c.stream(c.d, CHAT, {**body, "stream_options": {"include_usage": True}}))
    usage = events[-1]["usage"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    # <|im_start|>user\n, 40 words, a space, <|im_end|>\n<|im_start|>assistant\n: 49 tokens, 3 whole blocks.
    assert (whole["usage"]["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]) == (0, 49)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 48, "created_cache_tokens": 0}


async def test_the_manual_clock_wakes_sleepers_in_order() -> None:
    clock, woken = ManualClock(), []

    async def sleeper(name: str, *naps: float) -> None:
        for nap in naps:
            await clock.sleep(nap)
            woken.append((name, clock.now()))

    tasks = [asyncio.create_task(sleeper("a", 3, 3)), asyncio.create_task(sleeper("b", 2, 2, 2))]
    await clock.advance(5)
    assert woken == [("b", 2), ("a", 3), ("b", 4)]
    assert (clock.sleeping, clock.now()) == (2, 5)
    await clock.advance(1)
    assert woken[3:] == [("a", 6), ("b", 6)]
    await asyncio.gather(*tasks)


async def test_a_fast_clock_sleeps_less() -> None:
    clock = RealClock(speed=100)
    start, real = clock.now(), asyncio.get_running_loop().time()
    await clock.sleep(1)
    assert 1 <= clock.now() - start < 10
    assert asyncio.get_running_loop().time() - real < 0.1
    with pytest.raises(ValueError, match="speed"):
        RealClock(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "no"}, "template 'no' is none of plain"),
        ({"block_size": 0}, "must be positive"),
        ({"num_blocks": 10, "max_model_len": 145}, "raise num_blocks"),
        ({"retention_budget": 1.1}, "from 0 to 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Json, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NodeConfig(**settings)


def test_the_longest_sequence_may_fill_all_blocks_but_the_null_block() -> None:
    assert NodeConfig(num_blocks=10, max_model_len=144).max_model_len == 9 * 16
