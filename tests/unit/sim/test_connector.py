"""kvreturn's connector: what it proves, what it refuses and why, and what it tells."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvreturn.core import wire
from kvreturn.sim.tokenizer import Special
from unit.sim.cluster import CHAT, COLD, COMPLETIONS, Cluster, Json, Make, chunks, generate, ids, tokens

PLUGIN: Json = {"connector": "kvreturn"}
MORE = ids(99, 60)


async def first_turn(c: Cluster, length: int = 200, count: int = 24, **more: object) -> tuple[list[int], Json]:
    """All tokens of a turn (224), and D's handle (for 223)."""
    prompt = ids(1, length)
    _, at_d = await c.turn(COMPLETIONS, generate(prompt, count, **more))
    return prompt + tokens(at_d), at_d["kv_transfer_params"]


def sealed(handle: object, version: int = 1) -> Json:
    return {"kvreturn": {"v": version, "handle": handle}}


async def report(c: Cluster, prompt: list[int], params: Json, **more: object) -> wire.Report:
    """P's report; its answer must be right whatever it was given."""
    body = generate(prompt, 1, **more)
    status, answer = await c.post(c.p, COMPLETIONS, {**body, "kv_transfer_params": {**COLD, **params}})
    assert status == 200, answer
    assert tokens(answer) == tokens(await c.expected(COMPLETIONS, body))
    assert c.p.stats.engine_alive
    assert answer["kv_transfer_params"]["do_remote_prefill"] is True
    told = wire.load_report(answer["kv_transfer_params"]["kvreturn"])
    assert told.prompt
    assert told.expires
    return replace(told, prompt=None, expires=None)


async def test_the_handle_proves_every_block_and_tells_the_generated_tokens(cluster: Make) -> None:
    c = await cluster(**PLUGIN)
    full, handle = await first_turn(c)
    proof = wire.load_proof(handle["kvreturn"])
    seed = wire.chain_seed(b"")
    assert handle["remote_num_tokens"] == 223
    assert proof.block_size == 16
    assert proof.digests == wire.block_digests(full[:223], 16, seed)
    assert proof.generated == tuple(full[200:])
    assert proof.ttl == 480
    assert proof.mac is None
    assert len(handle["remote_block_ids"][0]) == proof.blocks == 14


@pytest.mark.parametrize("form", ["sealed", "stock"])
async def test_both_forms_of_a_handle_are_proven_and_read(cluster: Make, form: str) -> None:
    c = await cluster(p={"prefix_caching": False}, secret=b"s", **PLUGIN)
    full, handle = await first_turn(c)
    params = sealed(handle) if form == "sealed" else {**handle, "do_remote_decode": True, "do_remote_prefill": False}
    assert await report(c, full + MORE, params) == wire.Report(223, 223, 0)
    assert c.p.stats.computed_tokens == 200 + 284 - 223
    assert c.d.stats.pins == 0


async def test_a_sealed_handle_is_nothing_to_a_stock_node(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, d=PLUGIN)
    full, handle = await first_turn(c)
    body = generate(full + MORE, 1)
    _, answer = await c.post(c.p, COMPLETIONS, {**body, "kv_transfer_params": {**COLD, **sealed(handle)}})
    assert tokens(answer) == tokens(await c.expected(COMPLETIONS, body))
    assert c.p.stats.read_tokens == 0
    assert "kvreturn" not in answer["kv_transfer_params"]


@pytest.mark.parametrize(
    ("change", "proven"),
    [
        pytest.param(lambda full: full + MORE, 223, id="continuation"),
        pytest.param(lambda full: full[:160] + ids(3, 120), 160, id="edited after 160"),
        pytest.param(lambda full: full[:150], 144, id="shorter: whole blocks only"),
        pytest.param(lambda full: full[:128], 128, id="shorter by whole blocks"),
        pytest.param(lambda full: [*full[:150], full[150] ^ 1, *full[151:]], 144, id="one token edited at 150"),
        pytest.param(lambda full: full[:223], 223, id="just what is held"),
    ],
)
async def test_the_longest_proven_prefix_is_read(
    cluster: Make, change: Callable[[list[int]], list[int]], proven: int
) -> None:
    c = await cluster(p={"prefix_caching": False}, **PLUGIN)
    full, handle = await first_turn(c)
    assert await report(c, change(full), sealed(handle)) == wire.Report(proven, proven, 0)
    assert c.d.stats.pins == 0


def without(handle: Json, key: str) -> Json:
    return {k: v for k, v in handle.items() if k != key}


def proof_with(handle: Json, **changes: object) -> Json:
    return {**handle, "kvreturn": {**handle["kvreturn"], **changes}}


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda h: without(h, "kvreturn"), "no_digests"),
        (lambda h: proof_with(h, v=2), "version"),
        (lambda h: proof_with(h, digests="!"), "malformed"),
        (lambda h: proof_with(h, block_size=0), "malformed"),
        (lambda h: {**h, "remote_num_tokens": 250}, "malformed"),
        (lambda h: {**h, "remote_num_tokens": "223"}, "malformed"),
        (lambda h: {**h, "remote_block_ids": "abc"}, "malformed"),
        (lambda h: {**h, "remote_block_ids": [[1, 2]]}, "malformed"),
        (lambda h: {**h, "remote_block_ids": [[1], [2]]}, "groups"),
        (lambda h: {**h, "remote_engine_id": None}, "malformed"),
        (lambda h: without(h, "remote_port"), "malformed"),
        (lambda _h: "junk", "malformed"),
        (lambda _h: {}, "malformed"),
        (lambda h: proof_with(h, block_size=8), "malformed"),
        (lambda h: {**h, "remote_engine_id": "nope"}, "node_gone"),
        (lambda h: {**h, "remote_port": 1}, "node_gone"),
        (lambda h: {**h, "remote_host": "192.0.2.55"}, "node_gone"),
        (lambda h: {**h, "remote_request_id": "unknown"}, "used"),
        (lambda h: {**h, "remote_block_ids": [list(range(90_000, 90_014))]}, "read_failed"),
        (lambda h: {**h, "remote_blocks_expiry_time": 1.0}, "expired"),
    ],
)
async def test_a_tampered_handle_is_named_and_computed_around(
    cluster: Make, tamper: Callable[[Json], object], reason: str
) -> None:
    c = await cluster(p={"prefix_caching": False}, **PLUGIN)
    full, handle = await first_turn(c)
    got = await report(c, full + MORE, sealed(tamper(handle)))
    assert (got.read, got.local, got.reason) == (0, 0, reason)
    assert c.clock.now() == 0.0  # nothing was waited for


async def test_a_sealed_member_of_another_version(cluster: Make) -> None:
    c = await cluster(**PLUGIN)
    full, handle = await first_turn(c)
    assert (await report(c, full + MORE, sealed(handle, version=2))).reason == "version"


@pytest.mark.parametrize(
    ("prompt", "more", "reason"),
    [(ids(2, 300), {}, "not_a_continuation"), (None, {"cache_salt": "s"}, "scope"), (None, {"model": "lora"}, "scope")],
)
async def test_what_is_not_its_own_prefix_is_not_read_and_d_is_told_to_free(
    cluster: Make, prompt: list[int] | None, more: Json, reason: str
) -> None:
    c = await cluster(p={"prefix_caching": False}, adapters=("lora",), **PLUGIN)
    full, handle = await first_turn(c)
    assert await report(c, prompt or full + MORE, sealed(handle), **more) == wire.Report(0, 0, 0, reason)
    await c.until(lambda: c.d.stats.pins == 0)


async def test_images_are_told_apart(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, **PLUGIN)

    def body(url: str, *more: Json) -> Json:
        parts = [{"type": "text", "text": "Look at this. " * 40}, {"type": "image_url", "image_url": {"url": url}}]
        messages = [{"role": "user", "content": parts}, *more]
        return {"messages": messages, "max_tokens": 20, "return_token_ids": True}

    for url, same in (("http://a/1", True), ("http://a/2", False)):
        _, first = await c.turn(CHAT, body("http://a/1"))
        handle = first["kv_transfer_params"]
        more = first["choices"][0]["message"], {"role": "user", "content": "And now?"}
        at_p, at_d = await c.turn(CHAT, body(url, *more), {**COLD, **sealed(handle)})
        got = wire.load_report(at_p["kv_transfer_params"]["kvreturn"])
        image = first["prompt_token_ids"].index(Special.IMAGE)
        assert got.proven == got.read == (handle["remote_num_tokens"] if same else image - image % 16)
        assert at_d["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
        assert tokens(at_d) == tokens(await c.expected(CHAT, body(url, *more)))
    answers = [tokens(await c.expected(CHAT, body(url))) for url in ("http://a/1", "http://a/2")]
    assert answers[0] != answers[1]


async def test_a_mac_guards_the_handle_where_a_secret_is_set(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, secret=b"s", **PLUGIN)
    full, handle = await first_turn(c)
    for forged in ({**handle, "remote_block_ids": [list(range(1, 15))[::-1]]}, proof_with(handle, mac=None)):
        assert await report(c, full + MORE, sealed(forged)) == wire.Report(0, 0, 0, "mac")
    moved = {**handle, "remote_host": "127.0.0.1"}  # the router may replace a loopback name
    assert await report(c, full + MORE, sealed(moved)) == wire.Report(223, 223, 0)


async def test_no_peer_outside_the_allowed_list_is_contacted(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False, "allowed_peers": ("10.0.0.2",)}, **PLUGIN)
    full, handle = await first_turn(c)
    assert await report(c, full + MORE, sealed(handle)) == wire.Report(0, 0, 0, "peer")
    await asyncio.sleep(0.02)
    assert c.d.stats.pins == 1


async def test_a_handle_works_once(cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    c = await cluster(p={"prefix_caching": False}, **PLUGIN)
    full, handle = await first_turn(c)
    assert (await report(c, full + MORE, sealed(handle))).read == 223
    monkeypatch.setattr(c.d.ranks[0], "read", None)  # D is not even asked
    assert await report(c, full + MORE, sealed(handle)) == wire.Report(223, 0, 0, "used")


async def test_blocks_that_d_gave_up_are_not_read(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, **PLUGIN)
    full, handle = await first_turn(c)
    c.d.ranks[0].notify(handle["remote_engine_id"], handle["remote_request_id"])
    assert await report(c, full + MORE, sealed(handle)) == wire.Report(223, 0, 0, "used")


@pytest.mark.parametrize(("waited", "reason"), [(474.9, None), (475.1, "expired"), (500, "expired")])
async def test_expiry_is_noticed(cluster: Make, waited: float, reason: str | None) -> None:
    c = await cluster(p={"prefix_caching": False}, **PLUGIN)
    full, handle = await first_turn(c)
    await c.clock.advance(waited)
    assert (await report(c, full + MORE, sealed(handle))).reason == reason


async def test_a_restarted_decode_node_is_noticed(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, **PLUGIN)
    full, handle = await first_turn(c)
    assert (await report(c, full + MORE, sealed(handle))).read == 223
    full, handle = await first_turn(c)
    c.d.restart()
    assert await report(c, full + MORE, sealed(handle)) == wire.Report(223, 0, 0, "node_gone")


async def test_local_hits_and_the_threshold_are_reported(cluster: Make) -> None:
    c = await cluster(**PLUGIN)
    full, handle = await first_turn(c)
    # 192 of the 200 prompt tokens are whole blocks in P's cache; 31 more are proven.
    assert await report(c, full + MORE, sealed(handle)) == wire.Report(223, 0, 192, "below_threshold")
    await c.until(lambda: c.d.stats.pins == 0)
    full, handle = await first_turn(c, count=100)  # 200 + 99 are held
    assert await report(c, full + MORE, sealed(handle)) == wire.Report(299, 299 - 224, 224, "local_hit")
    full, handle = await first_turn(c, length=192, count=1)
    assert await report(c, full + MORE, sealed(handle)) == wire.Report(192, 0, 192, "local_hit")


async def test_cold_requests_report_too(cluster: Make) -> None:
    c = await cluster(**PLUGIN)
    assert await report(c, ids(1, 100), {}) == wire.Report(0, 0, 0)
    assert await report(c, ids(1, 100), {}) == wire.Report(0, 0, 96)


async def test_p_without_bidirectional_transfer_computes(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False, "bidirectional": False}, **PLUGIN)
    full, handle = await first_turn(c)
    assert await report(c, full + MORE, sealed(handle)) == wire.Report(0, 0, 0, "disabled")
    await c.until(lambda: c.d.stats.pins == 0)


async def test_blocks_of_another_size_are_not_read(cluster: Make) -> None:
    c = await cluster(d={"block_size": 8, "num_blocks": 16_386}, **PLUGIN)
    full, handle = await first_turn(c)
    assert len(handle["remote_block_ids"][0]) == 28
    assert await report(c, full + MORE, sealed(handle)) == wire.Report(0, 0, 192, "block_size")


@pytest.mark.parametrize(
    "params",
    [
        {"x": 1},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_block_ids": "abc", "remote_engine_id": 7},
        {"do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_num_tokens": 32},
    ],
)
async def test_d_keeps_nothing_for_junk(cluster: Make, params: Json) -> None:
    c = await cluster(**PLUGIN)
    body = generate(ids(1, 100))
    status, answer = await c.post(c.d, COMPLETIONS, {**body, "kv_transfer_params": params})
    assert status == 200
    assert answer["kv_transfer_params"] is None
    assert tokens(answer) == tokens(await c.expected(COMPLETIONS, body))
    assert c.d.stats.blocks_used == 0


async def test_d_computes_where_p_cannot_be_read(cluster: Make) -> None:
    c = await cluster(**PLUGIN)
    body = generate(ids(1, 100))
    _, at_p = await c.prefill(COMPLETIONS, body)
    c.p.restart()
    status, answer = await c.post(c.d, COMPLETIONS, {**body, "kv_transfer_params": at_p["kv_transfer_params"]})
    assert status == 200
    assert tokens(answer) == tokens(await c.expected(COMPLETIONS, body))
    assert answer["kv_transfer_params"]["kvreturn"]["v"] == 1


@pytest.mark.parametrize(("waited", "read"), [(19.9, 100), (20.1, 0), (31.0, 0)])
async def test_d_reads_nothing_that_p_may_have_given_away(cluster: Make, waited: float, read: int) -> None:
    """P's lease is 30 s; D counts on 5 s less for a heartbeat, and vLLM on 5 s less for the read."""
    c = await cluster(**PLUGIN)
    body = generate(ids(1, 100))
    _, at_p = await c.prefill(COMPLETIONS, body)
    await c.clock.advance(waited)
    for seed in range(2, 7):
        await c.post(c.p, COMPLETIONS, generate(ids(seed, 400), 1))
    status, answer = await c.post(c.d, COMPLETIONS, {**body, "kv_transfer_params": at_p["kv_transfer_params"]})
    assert status == 200
    assert tokens(answer) == tokens(await c.expected(COMPLETIONS, body))
    assert c.d.stats.read_tokens == read
    assert answer["kv_transfer_params"]["kvreturn"]["v"] == 1


async def test_d_computes_where_p_computed_another_prompt_and_frees_its_blocks(cluster: Make) -> None:
    """The minute turns between the two legs, and with it the rendered prompt; its length stays the same."""
    c = await cluster(template="dated_minute", **PLUGIN)
    body: Json = {"messages": [{"role": "user", "content": "Hi " * 50}], "max_tokens": 20}
    await c.clock.advance(45)
    _, at_p = await c.prefill(CHAT, body)
    await c.clock.advance(20)
    status, answer = await c.post(c.d, CHAT, {**body, "kv_transfer_params": at_p["kv_transfer_params"]})
    assert status == 200
    assert answer["choices"][0]["message"] == (await c.expected(CHAT, body))["choices"][0]["message"]
    assert (c.d.stats.read_tokens, c.p.stats.leases) == (0, 0)


async def test_d_keeps_nothing_that_nobody_will_come_back_for(cluster: Make) -> None:
    c = await cluster(**PLUGIN)
    body = generate(ids(1, 100))
    _, at_p = await c.prefill(COMPLETIONS, body)
    params = at_p["kv_transfer_params"]
    params["kvreturn"]["keep"] = False
    status, answer = await c.post(c.d, COMPLETIONS, {**body, "kv_transfer_params": params})
    assert status == 200
    assert answer["kv_transfer_params"] is None
    assert c.d.stats.blocks_used == 0


async def test_several_choices_keep_nothing_and_give_no_handle(cluster: Make) -> None:
    c = await cluster(**PLUGIN)
    body = generate(ids(1, 100), n=2, temperature=1.0)
    _, at_d = await c.turn(COMPLETIONS, body)
    assert at_d["kv_transfer_params"] is None
    assert c.d.stats.blocks_used == 0
    at_p, _ = await c.turn(COMPLETIONS, generate(ids(1, 100)))
    events = chunks(await c.stream(c.d, COMPLETIONS, {**body, "kv_transfer_params": at_p["kv_transfer_params"]}))
    assert not any("kv_transfer_params" in event for event in events)


@pytest.mark.parametrize(("connector", "loaded", "late"), [("kvreturn", 100, 0), ("stock", 200, 1)])
async def test_of_several_choices_one_loads_what_p_keeps(cluster: Make, connector: str, loaded: int, late: int) -> None:
    # The first read frees P's blocks. What a second one finds there is luck.
    c = await cluster(d={"connector": connector, "prefix_caching": False})
    body = generate(ids(1, 100), n=2, temperature=1.0)
    _, at_d = await c.turn(COMPLETIONS, body)
    expected = await c.expected(COMPLETIONS, body)
    assert [tokens(at_d, i) for i in (0, 1)] == [tokens(expected, i) for i in (0, 1)]
    assert c.d.stats.read_tokens == loaded
    assert c.p.stats.late_notifications == late


@pytest.mark.parametrize(("connector", "given"), [("kvreturn", True), ("stock", False)])
@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_only_the_plugin_puts_the_handle_on_the_terminal_chunk(
    cluster: Make, connector: str, path: str, *, given: bool, usage: bool
) -> None:
    c = await cluster(connector=connector)
    body: Json = {"max_tokens": 20, "messages": [{"role": "user", "content": "Hi " * 50}], "prompt": "Hi " * 50}
    if usage:
        body["stream_options"] = {"include_usage": True}
    _, at_p = await c.prefill(path, body)
    events = chunks(await c.stream(c.d, path, {**body, "kv_transfer_params": at_p["kv_transfer_params"]}))
    carriers = [event for event in events if "kv_transfer_params" in event]
    terminal = [event for event in events if event["choices"] and event["choices"][0]["finish_reason"]]
    assert carriers == (terminal if given else [])
    assert len(terminal) == 1
    if given:
        assert list(terminal[0])[-1] == "kv_transfer_params"
        assert terminal[0]["kv_transfer_params"]["do_remote_decode"] is True
        assert c.d.stats.pins == 1
