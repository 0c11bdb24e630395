"""What stock vLLM does with a misused handle: every row of the table in feasibility.md, measured on real nodes."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from unit.sim.cluster import COMPLETIONS, Cluster, Json, Make, generate, ids, tokens

MORE = ids(99, 60)


async def first_turn(c: Cluster, seed: int = 1, length: int = 200, count: int = 24) -> tuple[list[int], Json]:
    """A finished turn: all its tokens (224 of them), and D's handle for 223."""
    prompt = ids(seed, length)
    _, at_d = await c.turn(COMPLETIONS, generate(prompt, count))
    return prompt + tokens(at_d), at_d["kv_transfer_params"]


async def first_token_right(c: Cluster, prompt: list[int], handle: Json | None, **changes: object) -> bool:
    """As `correct`, for the P leg alone: D pins nothing for it."""
    status, at_p = await c.prefill(COMPLETIONS, generate(prompt), handle, **changes)
    assert status == 200, at_p
    return tokens(at_p) == tokens(await c.expected(COMPLETIONS, generate(prompt, 1)))


async def correct(c: Cluster, prompt: list[int], handle: Json | None, **changes: object) -> bool:
    """Whether P and D, given the handle, answer as one plain node."""
    _, at_d = await c.turn(COMPLETIONS, generate(prompt), handle, **changes)
    return tokens(at_d) == tokens(await c.expected(COMPLETIONS, generate(prompt)))


def edited(full: list[int], position: int) -> list[int]:
    return [*full[:position], full[position] ^ 1, *full[position + 1 :]]


async def test_an_honest_continuation_is_read_and_right(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    assert handle["remote_num_tokens"] == 223
    assert await correct(c, full + MORE, handle)
    assert c.p.stats.read_tokens == 223
    assert c.p.stats.computed_tokens == 200 + (284 - 223)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _full: ids(2, 224) + MORE, id="another text of the same length"),
        pytest.param(lambda full: edited(full, 3) + MORE, id="one token changed at position 3"),
        pytest.param(lambda full: full[:150], id="shorter, a true prefix"),
        pytest.param(lambda full: full[:128], id="shorter, a true prefix of whole blocks"),
        pytest.param(lambda full: full[:160] + ids(3, 120), id="edited after 160 tokens"),
    ],
)
async def test_not_a_continuation_is_silently_wrong(cluster: Make, change: Callable[[list[int]], list[int]]) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    prompt = change(full)
    _, at_d = await c.turn(COMPLETIONS, generate(prompt), handle)
    expected = await c.expected(COMPLETIONS, generate(prompt))
    assert tokens(at_d)[0] != tokens(expected)[0]  # wrong from the first token


async def test_a_wrong_read_poisons_both_prefix_caches(cluster: Make) -> None:
    c = await cluster()
    full, handle = await first_turn(c)
    prompt = ids(2, len(full)) + MORE
    assert not await correct(c, prompt, handle)
    for node in (c.p, c.d):
        for later in (prompt, prompt[:150] + ids(7, 50)):
            _, answer = await c.post(node, COMPLETIONS, generate(later))
            assert tokens(answer) != tokens(await c.expected(COMPLETIONS, generate(later)))


async def test_a_second_use_is_right_until_the_blocks_are_recycled(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, num_blocks=65, max_model_len=1024)
    full, handle = await first_turn(c)
    assert await first_token_right(c, full + MORE, handle)
    assert c.d.stats.late_notifications == 0
    assert await first_token_right(c, full + MORE, handle)
    assert c.d.stats.late_notifications == 1
    for seed in range(10, 14):
        await c.post(c.d, COMPLETIONS, generate(ids(seed, 700), 1))
    assert not await first_token_right(c, full + MORE, handle)


async def test_one_token_more_than_held_is_wrong(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    assert not await correct(c, full + MORE, handle, remote_num_tokens=224)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"remote_num_tokens": 223 + 40}, id="40 tokens more than held"),
        pytest.param({"remote_block_ids": "abc"}, id="block ids are a string"),
        pytest.param({"remote_block_ids": [[]]}, id="no blocks in the group"),
        pytest.param({"remote_num_tokens": "many"}, id="count is a string"),
    ],
)
async def test_a_malformed_handle_kills_the_engine_of_p(cluster: Make, changes: Json) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    status, error = await c.prefill(COMPLETIONS, generate(full + MORE), handle, **changes)
    assert (status, error["error"]["type"], error["error"]["code"]) == (500, "InternalServerError", 500)
    assert not c.p.stats.engine_alive
    assert (await c.prefill(COMPLETIONS, generate(ids(5, 20))))[0] == 500
    assert (await c.get(c.p, "/health"))[0] == 503
    c.p.restart()
    assert (await c.prefill(COMPLETIONS, generate(ids(5, 20))))[0] == 200


async def test_block_ids_out_of_range_fail_the_request_only(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    request = c.prefill(COMPLETIONS, generate(full + MORE), handle, remote_block_ids=[list(range(90_000, 90_014))])
    status, error = await c.elapsed(request, 0.015)
    assert status == 500
    assert error == {
        "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    }
    assert await correct(c, ids(6, 50), None)


async def test_tp_size_zero_of_an_unknown_engine_fails_the_request_only(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    assert (await c.prefill(COMPLETIONS, generate(full + MORE), handle, tp_size=0))[0] == 500
    assert c.p.stats.engine_alive


async def test_another_conversations_blocks_are_read_without_asking(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False})
    _, stolen = await first_turn(c, seed=11)
    full, handle = await first_turn(c, seed=12)
    assert not await correct(c, full + MORE, handle, remote_block_ids=stolen["remote_block_ids"])


@pytest.mark.parametrize(("waited", "status"), [(474.9, 200), (475.0, 500), (481.0, 500)])
async def test_reads_are_declined_from_5_s_before_expiry(cluster: Make, waited: float, status: int) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    await c.clock.advance(waited)
    assert (await c.prefill(COMPLETIONS, generate(full + MORE), handle))[0] == status
    assert c.p.stats.expired_reads == (status == 500)


async def test_without_its_expiry_key_an_expired_handle_reads_freed_blocks(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, num_blocks=65, max_model_len=1024)
    full, handle = await first_turn(c)
    await c.clock.advance(481)
    for seed in range(10, 14):
        await c.post(c.d, COMPLETIONS, generate(ids(seed, 700), 1))
    assert not await first_token_right(c, full + MORE, handle, remote_blocks_expiry_time=None)


async def test_a_restarted_decode_node_fails_old_handles_at_once_and_serves_new_ones(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    assert await correct(c, full + MORE, handle)  # P has met D's engine
    full, handle = await first_turn(c)
    c.d.restart()
    assert c.d.stats.pins == 0
    status, _ = await c.elapsed(c.prefill(COMPLETIONS, generate(full + MORE), handle), 0.015)
    assert status == 500
    full, handle = await first_turn(c)
    assert await correct(c, full + MORE, handle)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        pytest.param({"remote_port": 1}, 5.0, id="nobody there"),
        pytest.param({"remote_host": "192.0.2.55"}, 5.0, id="unknown host"),
        pytest.param({"remote_port": "x"}, 5.0, id="no port"),
        pytest.param({"remote_engine_id": "nope"}, 0.3, id="another engine lives there"),
    ],
)
async def test_an_unknown_peer_fails_late(cluster: Make, changes: Json, seconds: float) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    status, _ = await c.elapsed(c.prefill(COMPLETIONS, generate(full + MORE), handle, **changes), seconds)
    assert status == 500
    assert c.p.stats.engine_alive


async def test_a_known_engine_is_found_whatever_address_the_handle_says(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    assert await correct(c, full + MORE, handle)
    full, handle = await first_turn(c)
    assert await correct(c, full + MORE, handle, remote_host="192.0.2.77", remote_port=1)


async def hangs(c: Cluster, request: Coroutine[Any, Any, tuple[int, Json]]) -> None:
    """The request gets no answer; its client leaves; its blocks are lost for good."""
    task = asyncio.create_task(request)
    await c.until(lambda: c.p.stats.hung_requests == 1)
    used = c.p.stats.blocks_used
    await c.clock.advance(1_000)
    assert not task.done()
    task.cancel()
    await c.until(lambda: c.p.stats.hung_requests == 0)
    assert c.p.stats.leaked_blocks == 18  # 284 tokens
    assert c.p.stats.blocks_used == used


async def test_with_policy_recompute_a_failed_read_hangs(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, load_failure_policy="recompute")
    full, handle = await first_turn(c)
    await c.clock.advance(480)
    await hangs(c, c.prefill(COMPLETIONS, generate(full + MORE), handle))


async def test_bidirectional_on_the_decode_node_only_hangs_p(cluster: Make) -> None:
    c = await cluster(p={"bidirectional": False, "prefix_caching": False})
    full, handle = await first_turn(c)
    await hangs(c, c.prefill(COMPLETIONS, generate(full + MORE), handle))


async def test_bidirectional_on_the_prefill_node_only_gives_no_handle(cluster: Make) -> None:
    c = await cluster(d={"bidirectional": False})
    full, handle = await first_turn(c)
    assert handle is None
    assert c.d.stats.blocks_used == 0
    assert await correct(c, full + MORE, None)


async def test_junk_params_of_a_client_pin_blocks_for_the_whole_ttl(cluster: Make) -> None:
    c = await cluster()
    _, answer = await c.post(c.d, COMPLETIONS, generate(ids(1, 200), kv_transfer_params={"x": 1}))
    assert answer["kv_transfer_params"]["remote_num_tokens"] == 223
    await c.clock.advance(479.9)
    assert (c.d.stats.pins, c.d.stats.blocks_pinned) == (1, 14)
    await c.clock.advance(0.2)
    assert (c.d.stats.pins, c.d.stats.blocks_used) == (0, 0)


@pytest.mark.parametrize("params", [None, {}])
async def test_no_params_no_handle(cluster: Make, params: Json | None) -> None:
    c = await cluster()
    _, answer = await c.post(c.d, COMPLETIONS, generate(ids(1, 200), kv_transfer_params=params))
    assert answer["kv_transfer_params"] is None
    assert c.d.stats.blocks_used == 0


async def test_only_a_stop_string_leaves_no_handle(cluster: Make) -> None:
    c = await cluster()
    prompt = ids(1, 200)
    plain = await c.expected(COMPLETIONS, generate(prompt))
    text, eighth = plain["choices"][0]["text"], tokens(plain)[7]
    word = text.split(" ")[5]
    for more, reason, given in (
        ({}, ("length", None), True),
        ({"stop_token_ids": [eighth]}, ("stop", eighth), True),
        ({"ignore_eos": False, "max_tokens": 500}, ("stop", None), True),
        ({"stop": [f" {word}"]}, ("stop", f" {word}"), False),
    ):
        pinned = c.d.stats.pins
        _, answer = await c.turn(COMPLETIONS, generate(prompt) | more)
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == reason
        assert (answer["kv_transfer_params"] is not None) == given
        assert c.d.stats.pins == pinned + given


async def test_a_stop_string_on_the_last_token_leaves_the_handle(cluster: Make) -> None:
    c = await cluster()
    _, answer = await c.prefill(COMPLETIONS, generate(ids(1, 200), stop=["a", "e", "i", "o", "u", "y"]))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (
        answer["choices"][0]["text"] != (await c.expected(COMPLETIONS, generate(ids(1, 200), 1)))["choices"][0]["text"]
    )
    assert answer["kv_transfer_params"]["remote_num_tokens"] == 200


async def test_two_choices_give_one_handle_and_two_pins(cluster: Make) -> None:
    c = await cluster()
    body = generate(ids(1, 200), n=2, temperature=1.0)
    _, answer = await c.turn(COMPLETIONS, body)
    expected = await c.expected(COMPLETIONS, body)
    assert tokens(answer, 0) == tokens(expected, 0)
    assert tokens(answer, 1) == tokens(expected, 1)
    assert tokens(answer, 0) != tokens(answer, 1)
    assert answer["kv_transfer_params"]["remote_num_tokens"] == 223
    assert c.d.stats.pins == 2


async def test_a_ttl_of_5_s_declines_every_read(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False}, decoder_ttl=5.0)
    full, handle = await first_turn(c)
    assert (await c.prefill(COMPLETIONS, generate(full + MORE), handle))[0] == 500


@pytest.mark.parametrize(("count", "read"), [(9, 0), (10, 64)])
async def test_below_the_threshold_nothing_is_read_but_d_is_told_to_free(cluster: Make, count: int, read: int) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c, length=55, count=count)  # 55 + count - 1 tokens are held
    assert c.d.stats.pins == 1
    assert await correct(c, full + MORE, handle)
    assert c.p.stats.read_tokens == read
    await c.until(lambda: c.d.stats.pins == 1)  # that of the second turn


async def test_a_local_hit_of_all_frees_the_peer_without_a_read(cluster: Make) -> None:
    c = await cluster()
    full, handle = await first_turn(c, length=208, count=1)  # 208 tokens are held, 13 whole blocks
    assert await correct(c, full + MORE, handle)
    assert (c.p.stats.read_tokens, c.p.stats.local_tokens) == (0, 208)
    assert c.d.stats.pins == 1


async def test_the_threshold_compares_what_is_missing_locally(cluster: Make) -> None:
    c = await cluster()
    full, handle = await first_turn(c)
    assert await correct(c, full + MORE, handle)
    assert (c.p.stats.local_tokens, c.p.stats.read_tokens) == (192, 0)  # 223 - 192 < 64


async def test_a_missing_count_means_no_read(cluster: Make) -> None:
    c = await cluster(p={"prefix_caching": False})
    full, handle = await first_turn(c)
    assert await correct(c, full + MORE, handle, remote_num_tokens=None)
    assert c.p.stats.read_tokens == 0


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_p_without_the_parser_flags_refuses_tools(cluster: Make, tool_choice: str) -> None:
    c = await cluster(p={"tool_parser": False})
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": tool_choice}
    status, error = await c.prefill("/v1/chat/completions", body)
    assert status == 400
    assert "tool choice requires" in error["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])
@pytest.mark.parametrize("connector", ["stock", "kvreturn"])
async def test_free_verb_a_rejected_request_frees_the_pins_of_d(cluster: Make, path: str, connector: str) -> None:
    c = await cluster(connector=connector)
    _, handle = await first_turn(c)
    assert c.d.stats.pins == 1
    params = {**handle, "do_remote_prefill": True, "do_remote_decode": False}
    message = {"role": "user", "content": "x"}
    body = {"prompt": "x", "messages": [message], "model": "no-such-model", "kv_transfer_params": params}
    status, error = await c.post(c.p, path, body)
    assert (status, error["error"]["type"], error["error"]["param"]) == (404, "NotFoundError", "model")
    await c.until(lambda: c.d.stats.pins == 0)
    assert c.p.stats.read_tokens == 0


async def test_a_rejected_request_without_that_flag_frees_nothing(cluster: Make) -> None:
    c = await cluster()
    _, handle = await first_turn(c)
    body = generate(ids(1, 5), model="no-such-model", kv_transfer_params=handle)
    assert (await c.post(c.p, COMPLETIONS, body))[0] == 404
    await asyncio.sleep(0.02)
    assert c.d.stats.pins == 1


async def test_two_live_requests_with_one_id_kill_the_engine(cluster: Make) -> None:
    """Field report 68."""
    c = await cluster()
    await c.turn(COMPLETIONS, generate(ids(3, 100)))
    c.d.faults.clear()
    body = generate(ids(1, 10), 2000)
    first = asyncio.create_task(c.post(c.d, COMPLETIONS, body, **{"X-Request-Id": "abc"}))
    await c.until(lambda: c.d.stats.running == 1)
    second = await c.post(c.d, COMPLETIONS, body, **{"X-Request-Id": "abc"})
    assert (await first)[0] == second[0] == 500
    assert not c.d.stats.engine_alive


async def test_remote_prefill_without_blocks_kills_the_engine_of_d(cluster: Make) -> None:
    c = await cluster()
    body = generate(ids(1, 50), kv_transfer_params={"do_remote_prefill": True, "do_remote_decode": False})
    assert (await c.post(c.d, COMPLETIONS, body))[0] == 500
    assert not c.d.stats.engine_alive
