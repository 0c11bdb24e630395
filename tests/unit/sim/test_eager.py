"""Eager return: a conversation is read back right after its turn, as D's own tokens. What works, and the traps.

Figures by hand: a turn of 200 + 100 tokens leaves 299 on D, in 19 blocks. P's cache has the prompt's 12 whole blocks.
"""

import asyncio
from dataclasses import replace

import pytest

from kvreturn.core import wire
from kvreturn.sim import INSTANT, BlockUse
from unit.sim.cluster import COLD, COMPLETIONS, Cluster, Json, Make, generate, ids, tokens

HELD, WHOLE, LOCAL = 299, 288, 192
MORE = ids(99, 60)
PACED = replace(INSTANT, decode_rate=10.0)
SLOW_READS = replace(
    PACED, transfer_rate=float(PACED.bytes_per_token * (HELD - LOCAL))
)  # one second for what is missing
PLUGIN: Json = {"connector": "kvreturn"}


async def first_turn(c: Cluster, seed: int = 1) -> tuple[list[int], Json]:
    prompt = ids(seed, 200)
    _, at_p = await c.prefill(COMPLETIONS, generate(prompt))
    body = {**generate(prompt, 100), "kv_transfer_params": at_p["kv_transfer_params"]}
    _, at_d = await c.post(c.d, COMPLETIONS, body)
    handle = at_d["kv_transfer_params"]
    assert handle["remote_num_tokens"] == HELD
    assert (c.d.stats.pins, c.p.stats.leases) == (1, 0)
    return prompt + tokens(at_d), handle


def form_a(full: list[int], handle: Json) -> Json:
    params = {**handle, "do_remote_decode": True, "do_remote_prefill": False}
    return generate(full, 16, temperature=0, kv_transfer_params=params)


def form_b(prompt: list[int], handle: Json) -> Json:
    params = {**handle, "do_remote_decode": False, "do_remote_prefill": True}
    return generate(prompt, 1, kv_transfer_params=params)


def sealed(handle: Json | None, **more: object) -> Json:
    return {**COLD, "kvreturn": {"v": 1, **({} if handle is None else {"handle": handle}), **more}}


async def next_turn_hits(c: Cluster, full: list[int], local: int) -> None:
    """The next turn's P leg, without a handle: right, and so much of it is in P's cache."""
    before = c.p.stats
    body = generate(full + MORE, 1)
    status, answer = await c.post(c.p, COMPLETIONS, {**body, "kv_transfer_params": COLD})
    assert status == 200
    assert tokens(answer) == tokens(await c.expected(COMPLETIONS, body))
    assert c.p.stats.local_tokens - before.local_tokens == local
    assert c.p.stats.read_tokens == before.read_tokens


def nothing_kept(c: Cluster) -> bool:
    return all(
        (use.pinned, use.leased, use.running, use.leaked) == (0, 0, 0, 0) for use in (c.p.blocks(), c.d.blocks())
    )


# --- form A: P is bidirectional ---


@pytest.mark.parametrize("connector", ["stock", "kvreturn"])
async def test_closed_after_the_first_token_all_is_cached_and_nothing_kept(cluster: Make, connector: str) -> None:
    c = await cluster(p={"timing": PACED}, connector=connector)
    full, handle = await first_turn(c)
    stream = await c.open_stream(c.p, COMPLETIONS, form_a(full, handle))
    assert (c.p.stats.read_tokens, c.p.stats.computed_tokens) == (HELD - LOCAL, 200 + 1)
    assert c.d.stats.pins == 0
    stream.close()
    await c.until(lambda: c.p.stats.running == 0)
    assert nothing_kept(c)
    assert c.p.blocks().cached == WHOLE // 16
    await next_turn_hits(c, full, WHOLE)


async def test_not_closed_p_keeps_its_own_handle_for_the_lease(cluster: Make) -> None:
    c = await cluster()
    full, handle = await first_turn(c)
    await c.stream(c.p, COMPLETIONS, form_a(full, handle))
    assert c.d.stats.pins == 0
    await c.clock.advance(29.9)
    assert c.p.blocks().leased == 20  # 300 + 15 tokens
    await c.clock.advance(0.2)
    assert nothing_kept(c)
    await next_turn_hits(c, full, WHOLE)


@pytest.mark.parametrize("connector", ["stock", "kvreturn"])
async def test_closed_before_the_read_has_ended_nothing_is_cached_but_d_is_free(cluster: Make, connector: str) -> None:
    c = await cluster(p={"timing": SLOW_READS}, connector=connector)
    full, handle = await first_turn(c)
    sleeping = c.clock.sleeping
    request = asyncio.create_task(c.open_stream(c.p, COMPLETIONS, form_a(full, handle)))
    await c.until(lambda: c.clock.sleeping > sleeping)
    request.cancel()
    await c.until(lambda: c.p.stats.waiting == 0)
    await c.clock.advance(0.9)
    assert (c.d.stats.pins, c.p.blocks().running) == (1, 19)  # the read goes on
    await c.clock.advance(0.2)
    assert nothing_kept(c)
    await next_turn_hits(c, full, LOCAL)


@pytest.mark.parametrize(("connector", "pins"), [("stock", 1), ("kvreturn", 0)])
async def test_closed_while_it_waits_for_room(cluster: Make, connector: str, pins: int) -> None:
    c = await cluster(p={"num_blocks": 33}, connector=connector, max_model_len=512)
    full, handle = await first_turn(c)
    await c.prefill(COMPLETIONS, generate(ids(2, 400)))  # 25 of 32 blocks
    request = asyncio.create_task(c.open_stream(c.p, COMPLETIONS, form_a(full, handle)))
    await c.until(lambda: c.p.stats.waiting == 1)
    request.cancel()
    await c.until(lambda: c.p.stats.waiting == 0)
    await c.until(lambda: c.d.stats.pins == pins)
    await c.clock.advance(481)
    assert nothing_kept(c)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_trap_p_without_the_flag_hangs_and_loses_its_blocks(cluster: Make, *, stream: bool) -> None:
    c = await cluster(p={"bidirectional": False})
    full, handle = await first_turn(c)
    request = asyncio.create_task(c.post(c.p, COMPLETIONS, {**form_a(full, handle), "stream": stream}))
    await c.until(lambda: c.p.stats.hung_requests == 1)
    await c.clock.advance(400)
    assert not request.done()
    assert (c.p.blocks().running, c.d.stats.pins) == (19, 1)
    request.cancel()
    await c.until(lambda: c.p.stats.hung_requests == 0)
    await c.clock.advance(1_000)
    assert c.p.blocks() == BlockUse(free=8_192 - 19, leaked=19)


async def test_the_trap_stays_shut_where_nothing_would_be_read(cluster: Make) -> None:
    c = await cluster(p={"bidirectional": False}, recompute_threshold=HELD - LOCAL + 1)
    full, handle = await first_turn(c)
    status, _ = await c.post(c.p, COMPLETIONS, form_a(full, handle))
    assert (status, c.p.stats.leases, c.d.stats.pins) == (200, 1, 1)  # D is not told


# --- form B: P is not ---


@pytest.mark.parametrize(("bidirectional", "kept"), [(False, 0), (True, 19)])
async def test_ids_cut_to_what_d_holds_are_read_and_nothing_is_computed(
    cluster: Make, *, bidirectional: bool, kept: int
) -> None:
    c = await cluster(p={"bidirectional": bidirectional, "decoder_ttl": 100.0})
    full, handle = await first_turn(c)
    status, answer = await c.post(c.p, COMPLETIONS, form_b(full[:HELD], handle))
    assert status == 200
    assert tokens(answer) == tokens(await c.expected(COMPLETIONS, generate(full[:HELD], 1)))
    assert (answer["kv_transfer_params"] is not None) == bidirectional
    assert c.p.stats.computed_tokens - c.p.stats.recomputed_tokens == 200  # those of the first turn
    assert c.d.stats.pins == 0
    await c.clock.advance(99.9)
    assert c.p.blocks().pinned == kept
    await c.clock.advance(0.2)
    assert nothing_kept(c)
    await next_turn_hits(c, full, WHOLE)


async def test_ids_beyond_what_d_holds_are_read_from_the_wrong_end(cluster: Make) -> None:
    c = await cluster(p={"bidirectional": False})
    full, handle = await first_turn(c)
    _, answer = await c.post(c.p, COMPLETIONS, form_b(full + MORE, handle))
    assert tokens(answer) != tokens(await c.expected(COMPLETIONS, generate(full + MORE, 1)))


async def test_ids_far_beyond_what_d_holds_kill_p(cluster: Make) -> None:
    c = await cluster(p={"bidirectional": False})
    full, handle = await first_turn(c)
    assert (await c.post(c.p, COMPLETIONS, form_b(full + ids(3, 300), handle)))[0] == 500
    assert not c.p.stats.engine_alive


@pytest.mark.parametrize(("bidirectional", "status"), [(False, 200), (True, 500)])
async def test_only_a_bidirectional_p_looks_at_the_expiry(cluster: Make, *, bidirectional: bool, status: int) -> None:
    c = await cluster(
        p={"bidirectional": bidirectional, "prefix_caching": False}, d={"num_blocks": 65}, max_model_len=1_024
    )
    full, handle = await first_turn(c)
    await c.clock.advance(481)
    for seed in range(10, 14):
        await c.post(c.d, COMPLETIONS, generate(ids(seed, 700), 1))
    got, answer = await c.post(c.p, COMPLETIONS, form_b(full[:HELD], handle))
    assert got == status
    if status == 200:
        assert tokens(answer) != tokens(await c.expected(COMPLETIONS, generate(full[:HELD], 1)))


@pytest.mark.parametrize("bidirectional", [True, False])
async def test_a_request_in_neither_direction_tells_what_p_is(cluster: Make, *, bidirectional: bool) -> None:
    c = await cluster(p={"bidirectional": bidirectional, "decoder_ttl": 100.0})
    params = {"do_remote_prefill": False, "do_remote_decode": False}
    _, answer = await c.post(c.p, COMPLETIONS, generate([1], 1, kv_transfer_params=params))
    assert (answer["kv_transfer_params"] is not None) == bidirectional
    assert c.p.blocks().pinned == bidirectional
    await c.clock.advance(100.1)
    assert nothing_kept(c)


# --- giving a handle back ---


@pytest.mark.parametrize(("body", "status", "pins"), [({"model": "no-such-model"}, 404, 0), ({"prompt": ""}, 400, 1)])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("connector", ["stock", "kvreturn"])
async def test_a_request_that_is_rejected_after_it_was_parsed_frees(
    cluster: Make, connector: str, body: Json, status: int, pins: int, *, bidirectional: bool
) -> None:
    c = await cluster(p={"bidirectional": bidirectional}, connector=connector)
    full, handle = await first_turn(c)
    assert (await c.post(c.p, COMPLETIONS, form_b(full, handle) | body))[0] == status
    if pins:
        await asyncio.sleep(0.02)
    await c.until(lambda: c.d.stats.pins == pins)
    assert c.p.stats.read_tokens == 0


# --- kvreturn's connector ---


async def test_keep_false_reads_back_and_keeps_nothing(cluster: Make) -> None:
    c = await cluster(**PLUGIN)
    full, handle = await first_turn(c)
    body = generate(full, 1, kv_transfer_params=sealed(handle, keep=False))
    status, answer = await c.post(c.p, COMPLETIONS, body)
    assert status == 200
    assert list(answer["kv_transfer_params"]) == ["kvreturn"]
    told = wire.load_report(answer["kv_transfer_params"]["kvreturn"])
    assert replace(told, prompt=None) == wire.Report(HELD, HELD - LOCAL, LOCAL, "local_hit")
    assert nothing_kept(c)
    await next_turn_hits(c, full, WHOLE)


async def test_keep_false_without_a_handle_warms_the_cache(cluster: Make) -> None:
    c = await cluster(**PLUGIN)
    full = ids(1, 300)
    _, answer = await c.post(c.p, COMPLETIONS, generate(full, 1, kv_transfer_params=sealed(None, keep=False)))
    assert wire.load_report(answer["kv_transfer_params"]["kvreturn"]).read == 0
    assert nothing_kept(c)
    await next_turn_hits(c, full, WHOLE)


def give_back(handle: Json) -> Json:
    return generate([1], 1, kv_transfer_params=sealed(handle, free=True))


@pytest.mark.parametrize("at", ["p", "d"])
@pytest.mark.parametrize("bidirectional", [True, False])
async def test_free_gives_the_handle_back_once(cluster: Make, at: str, *, bidirectional: bool) -> None:
    c = await cluster(p={"bidirectional": bidirectional}, secret=b"s", **PLUGIN)
    _, handle = await first_turn(c)
    node = {"p": c.p, "d": c.d}[at]
    forged = {**handle, "remote_request_id": "another"}
    for given, reason, pins in ((forged, "mac", 1), ({}, "malformed", 1), (handle, "freed", 0), (handle, "used", 0)):
        status, answer = await c.post(node, COMPLETIONS, give_back(given))
        assert (status, list(answer["kv_transfer_params"])) == (200, ["kvreturn"])
        told = wire.load_report(answer["kv_transfer_params"]["kvreturn"])
        assert (told.proven, told.read, told.reason) == (0, 0, reason)
        assert c.d.stats.pins == pins
    assert nothing_kept(c)


async def test_free_tells_that_d_is_gone(cluster: Make) -> None:
    c = await cluster(**PLUGIN)
    _, handle = await first_turn(c)
    c.d.restart()
    _, answer = await c.post(c.p, COMPLETIONS, give_back(handle))
    assert answer["kv_transfer_params"]["kvreturn"]["reason"] == "node_gone"


async def test_free_does_not_wait_for_room(cluster: Make) -> None:
    c = await cluster(p={"num_blocks": 33}, max_model_len=512, **PLUGIN)
    _, handle = await first_turn(c)
    await c.prefill(COMPLETIONS, generate(ids(2, 511)))  # all of P's blocks
    request = asyncio.create_task(c.post(c.p, COMPLETIONS, give_back(handle)))
    await c.until(lambda: c.p.stats.waiting == 1 and c.d.stats.pins == 0)
    await c.clock.advance(31)
    assert (await request)[1]["kv_transfer_params"]["kvreturn"]["reason"] == "freed"


async def test_a_stock_p_frees_nothing_that_only_our_connector_knows(cluster: Make) -> None:
    c = await cluster(p={"connector": "stock"}, d=PLUGIN)
    _, handle = await first_turn(c)
    await c.post(c.p, COMPLETIONS, give_back(handle))
    assert (c.p.stats.leases, c.d.stats.pins) == (1, 1)
