"""What stock vLLM answers with another prompt's words, a dead engine or a hang: right here, and in time.

Every row is a misuse of the handle that was measured on stock vLLM 0.32.0 with NIXL. Both nodes run our connector.
"""

import asyncio
import random
import socket
import time
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest

from engine.conftest import JSON, Engine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
COLD: JSON = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PATH = "/v1/completions"
LENGTH, COUNT, HELD = 200, 24, 223
Change = Callable[[JSON], JSON]


def ids(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(300, 2000) for i in range(length)]


def body(prompt: list[int], count: int = COUNT) -> JSON:
    limits = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "tiny", "prompt": prompt, **limits}


async def prefill(engine: Engine, prompt: list[int], params: JSON) -> tuple[JSON, float]:
    begun = time.perf_counter()
    status, answer = await engine.post(engine.p, PATH, body(prompt, 1) | {"kv_transfer_params": {**COLD, **params}})
    assert status == 200, answer
    return answer, time.perf_counter() - begun


async def decode(engine: Engine, prompt: list[int], params: JSON, count: int = COUNT) -> tuple[list[int], JSON | None]:
    status, answer = await engine.post(engine.d, PATH, body(prompt, count) | {"kv_transfer_params": params})
    assert status == 200, answer
    return answer["choices"][0]["token_ids"], answer["kv_transfer_params"]


async def expected(engine: Engine, prompt: list[int], count: int = COUNT) -> list[int]:
    status, answer = await engine.post(engine.single, PATH, body(prompt, count))
    assert status == 200, answer
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


async def first_turn(engine: Engine, seed: int) -> tuple[list[int], JSON]:
    """A turn's prompt with its answer, and D's handle for it."""
    prompt = ids(seed, LENGTH)
    answer, _ = await prefill(engine, prompt, {})
    tokens, handle = await decode(engine, prompt, answer["kv_transfer_params"])
    assert handle
    assert handle["remote_num_tokens"] == HELD
    return prompt + tokens, handle


def sealed(handle: JSON) -> JSON:
    return {"kvreturn": {"v": 1, "handle": handle}}


def stock(handle: JSON) -> JSON:
    return {**handle, "do_remote_decode": True, "do_remote_prefill": False}


async def until(engine: Engine, base: str, name: str, most: float) -> float:
    """Wait until a node's gauge is down to `most`. Returns the seconds that it took."""
    begun = time.perf_counter()
    while await engine.metric(base, name) > most:
        assert time.perf_counter() - begun < 5, f"{name} stays over {most}"
        await asyncio.sleep(0.02)
    return time.perf_counter() - begun


async def check(engine: Engine, prompt: list[int], params: JSON) -> JSON:
    """P and D answer like a plain node, within 2 s of a cold prefill. Returns P's report."""
    answer, seconds = await prefill(engine, prompt, params)
    assert seconds < 2.5, f"P took {seconds:.1f} s"
    want = await expected(engine, prompt)
    assert answer["choices"][0]["token_ids"] == want[:1]
    got, _ = await decode(engine, prompt, answer["kv_transfer_params"])
    assert got == want
    # Nothing was poisoned: the same prompt without a handle is right on both nodes.
    cold, _ = await prefill(engine, prompt, {})
    assert (await decode(engine, prompt, cold["kv_transfer_params"]))[0] == want
    report: JSON = answer["kv_transfer_params"]["kvreturn"]
    return report


PROMPTS: list[tuple[str, Callable[[list[int]], list[int]], int]] = [
    ("continuation", lambda full: full + ids(99, 60), HELD),
    ("another text of the same length", lambda full: ids(98, len(full)), 0),
    ("one token edited at 3", lambda full: [*full[:3], 700, *full[4:], *ids(99, 40)], 0),
    ("a shorter prompt", lambda full: full[:150], 128),
    ("an edit after 160", lambda full: full[:160] + ids(97, 100), 160),
    ("just the prompt again", lambda full: full[:LENGTH], 192),
]


@pytest.mark.parametrize("form", [sealed, stock])
@pytest.mark.parametrize(("change", "proven"), [p[1:] for p in PROMPTS], ids=[p[0] for p in PROMPTS])
async def test_only_the_proven_prefix_is_read(
    engine: Engine, form: Change, change: Callable[[list[int]], list[int]], proven: int
) -> None:
    full, handle = await first_turn(engine, crc32(f"{form.__name__}{proven}".encode()))
    report = await check(engine, change(full), form(handle))
    assert (report["proven"], report["read"]) == (proven, proven)


def changed(**members: Any) -> Change:  # noqa: ANN401 - JSON
    return lambda handle: {**handle, **members}


HANDLES: list[tuple[str, Change, str, int]] = [
    ("one token too many", lambda h: {**h, "remote_num_tokens": h["remote_num_tokens"] + 1}, "mac", 192),
    ("40 tokens too many", lambda h: {**h, "remote_num_tokens": h["remote_num_tokens"] + 40}, "malformed", 0),
    ("block ids that are none", changed(remote_block_ids="abc"), "malformed", 0),
    ("block ids out of range", changed(remote_block_ids=[[10**6 + i for i in range(7)]]), "mac", HELD),
    ("another conversation's block ids", changed(remote_block_ids=[[1, 2, 3, 4, 5, 6, 7]]), "mac", HELD),
    ("tp_size 0", changed(tp_size=0), "malformed", 0),
    ("another engine id", changed(remote_engine_id="00000000-0000"), "mac", HELD),
    ("another request id", changed(remote_request_id="cmpl-nobody-0"), "used", HELD),
    ("no digests", changed(kvreturn=None), "no_digests", 0),
    ("a newer format", changed(kvreturn={"v": 2}), "version", 0),
    ("a public address", changed(remote_host="8.8.8.8"), "peer", 0),
    ("a name", changed(remote_host="evil.example"), "peer", 0),
    ("nobody listens there", changed(remote_port=1), "node_gone", HELD),
    ("a black hole", changed(remote_host="10.255.255.1"), "node_gone", HELD),
]


@pytest.mark.parametrize(("change", "reason", "proven"), [h[1:] for h in HANDLES], ids=[h[0] for h in HANDLES])
async def test_a_handle_that_was_tampered_with_is_not_read(
    engine: Engine, change: Change, reason: str, proven: int
) -> None:
    full, handle = await first_turn(engine, crc32(reason.encode()))
    report = await check(engine, full + ids(96, 60), stock(change(handle)))
    assert (report["read"], report["reason"], report["proven"]) == (0, reason, proven)


async def test_a_socket_that_never_answers_costs_a_second(engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        full, handle = await first_turn(engine, 31)
        report = await check(engine, full + ids(95, 60), stock({**handle, "remote_port": silent.getsockname()[1]}))
    assert (report["read"], report["reason"]) == (0, "node_gone")


async def test_a_handle_is_good_for_one_read(engine: Engine) -> None:
    full, handle = await first_turn(engine, 32)
    prompt = full + ids(94, 60)
    assert (await check(engine, prompt, sealed(handle)))["read"] == HELD
    second = await check(engine, prompt, sealed(handle))
    assert (second["read"], second["reason"]) == (0, "used")


async def test_two_readers_at_once_get_one_read(engine: Engine) -> None:
    full, handle = await first_turn(engine, 33)
    prompt = full + ids(93, 60)
    answers = await asyncio.gather(*[prefill(engine, prompt, sealed(handle)) for _ in range(4)])
    want = await expected(engine, prompt)
    assert [a["choices"][0]["token_ids"] for a, _ in answers] == [want[:1]] * 4
    assert sorted(a["kv_transfer_params"]["kvreturn"]["read"] for a, _ in answers) == [0, 0, 0, HELD]


@pytest.mark.parametrize("junk", [{"x": 1}, {"do_remote_prefill": True}, "text", {"do_remote_prefill": True, **COLD}])
async def test_what_a_client_sends_to_d_pins_nothing(engine: Engine, junk: Any) -> None:  # noqa: ANN401 - JSON
    prompt = ids(34, LENGTH)
    before = await engine.metric(engine.d, "kvreturn_pins")
    status, answer = await engine.post(engine.d, PATH, body(prompt) | {"kv_transfer_params": junk})
    if status == 200:
        assert answer["kv_transfer_params"] is None
        assert answer["choices"][0]["token_ids"] == await expected(engine, prompt)
    else:
        assert status == 400, answer
    assert await engine.metric(engine.d, "kvreturn_pins") <= before


async def test_all_choices_of_a_request_share_one_read(engine: Engine) -> None:
    """On stock vLLM every choice reads, the later ones from blocks that P has freed after the first read."""
    late = await engine.metric(engine.p, "nixl_num_notifications_after_expiry_total")

    async def choices(base: str, seed: int) -> list[list[int]]:
        asked = body(ids(seed, LENGTH)) | {"n": 2, "temperature": 1, "seed": 5}
        status, answer = await engine.post(base, PATH, asked)
        assert status == 200, answer
        return [choice["token_ids"] for choice in answer["choices"]]

    seeds = range(500, 520)
    got = await asyncio.gather(*[choices(engine.gateway, seed) for seed in seeds])
    want = await asyncio.gather(*[choices(engine.single, seed) for seed in seeds])
    assert got == want
    assert await engine.metric(engine.p, "nixl_num_notifications_after_expiry_total") == late


@pytest.mark.parametrize(("late", "read"), [(0, LENGTH), (21, 0)])
async def test_what_ps_lease_may_not_cover_any_more_is_computed(engine: Engine, late: int, read: int) -> None:
    """P's lease lasts 30 s. A request that waits on D renews it within 5 s; vLLM's own margin is another 5 s."""
    prompt = ids(600 + late, LENGTH)
    answer, _ = await prefill(engine, prompt, {})
    params = answer["kv_transfer_params"]
    assert params["remote_blocks_expiry_time"] is None  # a stock D would take it as fixed, and fail the request
    params["kvreturn"]["expires"] -= late
    before = await engine.sources(engine.d)
    tokens, _ = await decode(engine, prompt, params)
    after = await engine.sources(engine.d)
    assert tokens == await expected(engine, prompt)
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == read


async def test_nothing_proven_frees_ds_blocks_at_once(engine: Engine) -> None:
    before = await engine.metric(engine.d, "kvreturn_pins")
    _, handle = await first_turn(engine, 35)
    await prefill(engine, ids(36, 260), sealed(handle))
    await until(engine, engine.d, "kvreturn_pins", before)


@pytest.mark.parametrize("node", ["p", "d"])
async def test_a_handle_is_freed_without_a_read(engine: Engine, node: str) -> None:
    pins, sources = await engine.metric(engine.d, "kvreturn_pins"), await engine.sources()
    full, handle = await first_turn(engine, crc32(node.encode()))
    free = {**COLD, "kvreturn": {"v": 1, "handle": handle, "free": True}}
    for reason in ("freed", "used"):
        begun = time.perf_counter()
        status, answer = await engine.post(getattr(engine, node), PATH, body([1], 1) | {"kv_transfer_params": free})
        print(f"{reason} after {(time.perf_counter() - begun) * 1000:.0f} ms")
        assert status == 200, answer
        assert answer["kv_transfer_params"].keys() == {"kvreturn"}
        report = answer["kv_transfer_params"]["kvreturn"]
        assert (report["reason"], report["read"]) == (reason, 0)
        await until(engine, engine.d, "kvreturn_pins", pins)
    assert (await engine.sources())["external_kv_transfer"] == sources["external_kv_transfer"]
    answer, _ = await prefill(engine, full + ids(73, 60), sealed(handle))
    assert answer["kv_transfer_params"]["kvreturn"]["reason"] == "used"


async def test_freeing_needs_the_whole_handle(engine: Engine) -> None:
    full, handle = await first_turn(engine, 74)
    forged = {**handle, "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]]}
    answer, _ = await prefill(engine, [1], {"kvreturn": {"v": 1, "handle": forged, "free": True}})
    assert answer["kv_transfer_params"]["kvreturn"]["reason"] == "used"
    answer, _ = await prefill(engine, full + ids(75, 60), sealed(handle))
    assert answer["kv_transfer_params"]["kvreturn"]["read"] == HELD


async def test_all_engines_live(engine: Engine) -> None:
    for base in (engine.p, engine.d):
        async with engine.session.get(f"{base}/health") as answer:
            assert answer.status == 200
