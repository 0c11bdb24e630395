"""Field reports, section C: what vLLM's nodes get to see, where it takes a whole exchange to show it."""

import asyncio
import json
import re
import uuid
from typing import Any

import pytest

from kvreturn.core.ports import Failure, Reply
from support.extproc import ALL_MODES, Request, Response
from support.harness import DECODE, Clock, Harness, harness
from support.nodes import (
    COLD,
    answer,
    carried_handle,
    chat,
    connector,
    decode_body,
    decode_events,
    handle,
    prefill_body,
    prefill_params,
    sent_params,
)
from support.streams import LocalStream

TURN = Request(pieces=[chat("Hi")])
NEXT = Request(pieces=[chat("Hi", "Good morning", "And?")])
END = Response(decode_events(params=handle()), node=DECODE)
NO_HANDLE = Response(decode_events())
JSON = {"content-type": "application/json"}


def asked(router: Harness) -> list[Any]:
    """`kv_transfer_params` of all prefill requests."""
    return [sent_params(ask.body) for ask in router.asks]


async def test_054_a_handle_is_attached_at_most_once() -> None:
    router = harness()
    await router.play(TURN, END)
    await asyncio.gather(*(router.play(NEXT, NO_HANDLE) for _ in range(20)))
    carried = [carried_handle(ask.body) for ask in router.asks[1:]]
    assert len(carried) == 20
    assert [c for c in carried if c] == [handle()]
    assert router.outcomes() == {"first_turn": 1, "hit": 1, "already_taken": 19}


async def test_057_keys_that_are_not_known_yet_are_forwarded() -> None:
    for proof in ("connector", "trusted"):
        router = harness(proof=proof)
        future = handle(x_future={"a": [1]})
        await router.play(TURN, Response(decode_events(params=future), node=DECODE))
        await router.play(NEXT, END)
        assert carried_handle(router.asks[1].body) == future


async def test_058_each_node_gets_the_others_parameters_with_the_right_flags() -> None:
    router = harness(answer(), proof="trusted")
    first = await router.play(TURN, END)
    second = await router.play(NEXT, END)
    assert asked(router) == [COLD, handle(do_remote_decode=True, do_remote_prefill=False)]
    for envoy in (first, second):
        assert sent_params(envoy.upstream.body) == prefill_params(do_remote_decode=False, do_remote_prefill=True)
        assert b"engine-of-d" not in envoy.upstream.body


async def test_059_a_miss_sends_the_cold_parameters() -> None:
    router = harness()
    await router.play(TURN, END)
    assert asked(router) == [
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    ]


async def test_060_the_handle_of_the_turn_before_is_no_fallback() -> None:
    router = harness()
    await router.play(TURN, END)
    await router.play(NEXT, NO_HANDLE)
    assert router.handles == 0
    await router.turn("Hi", "Good morning", "And?", "Good morning", "So?")
    assert [carried_handle(ask.body) for ask in router.asks] == [None, handle(), None]
    assert router.outcomes() == {"first_turn": 1, "hit": 1, "no_handle_from_decode": 1}


async def test_065_a_handle_of_several_choices_is_never_used() -> None:
    router = harness()
    envoy = await router.play(Request(pieces=[chat("Hi", n=3)]), END)
    assert json.loads(router.asks[0].body)["n"] == 1
    assert json.loads(envoy.upstream.body)["n"] == 3
    assert router.handles == 0
    await router.play(NEXT, END)
    assert router.outcomes() == {"first_turn": 1, "multiple_choices": 1}


async def test_067_d_is_told_what_p_had_in_its_cache() -> None:
    """vLLM 0.32.0's P says it, and its D then reports that instead of the blocks it pulled. So it only has to pass."""
    params = prefill_params(remote_prefill_cached_tokens=0)
    envoy = await harness(answer(prefill_body(params))).play(TURN, END)
    assert sent_params(envoy.upstream.body)["remote_prefill_cached_tokens"] == 0
    params = prefill_params(remote_prefill_cached_tokens=96)
    envoy = await harness(answer(prefill_body(params))).play(TURN, END)
    assert sent_params(envoy.upstream.body) == params


async def test_068_no_two_requests_have_one_id() -> None:
    router = harness()
    headers = {**JSON, "x-request-id": "abc"}
    turns = [Request(pieces=[chat("One")], headers=headers), Request(pieces=[chat("Two")], headers=headers)]
    envoys = await asyncio.gather(*(router.play(turn, END) for turn in turns))
    ids = [headers["x-request-id"] for headers in router.stub.headers]
    decode = [(envoy.upstream.headers or {})["x-request-id"] for envoy in envoys]
    assert len({*ids, *decode, "abc"}) == 5
    assert sorted(ids) == sorted(f"{i}-p1" for i in decode)  # one is found in the logs by the other
    assert all(uuid.UUID(i).version == 4 for i in decode)


@pytest.mark.parametrize("sent", ["x" * 10_240, "a\x01b", "a b", "\u00e4"])
async def test_069_a_request_id_that_is_not_harmless_is_replaced(sent: str) -> None:
    for modes in ALL_MODES:
        router = harness()
        headers = {**JSON, "x-request-id": sent}
        envoy = router.envoy(modes)
        await envoy.request(Request(pieces=TURN.pieces, headers=headers))
        ours = (envoy.upstream.headers or {})["x-request-id"]
        await envoy.respond(Response(END.pieces, headers={"content-type": "text/event-stream", "x-request-id": ours}))
        await envoy.finish()
        assert (envoy.client.headers or {})["x-request-id"] == ours
        assert re.fullmatch(r"[0-9a-f]{32}", ours)
        assert not any(sent in value for headers in router.stub.headers for value in headers.values())


async def test_070_blocks_that_p_keeps_for_nobody_are_counted() -> None:
    for modes in ALL_MODES:
        router = harness()
        envoy = router.envoy(modes)
        await envoy.request(TURN)
        stream = envoy._stream
        assert isinstance(stream, LocalStream)
        stream.cancel()
        await asyncio.wait([stream.task])
        assert router.metric("prefill_blocks_stranded_total") == 1
        assert router.records == 0


async def test_071_what_d_refuses_goes_to_the_client_and_leaves_nothing() -> None:
    error = b'{"error": {"message": "bad template",  "code": 400}}'
    for modes in ALL_MODES:
        router = harness()
        envoy = await router.play(TURN, Response([error[:9], error[9:]], 400, JSON), modes)
        assert (envoy.client.status, envoy.client.body) == (400, error)
        assert router.records == 0
        assert router.metric("turn_errors_total", type="400") == 1


@pytest.mark.parametrize(("policy", "status", "fallbacks"), [("fallback", 200, 1), ("error", 502, 0)])
async def test_073_what_happens_without_prefill_is_a_policy_and_counted(
    policy: str, status: int, fallbacks: int
) -> None:
    down = answer(b"", 500)
    for modes in ALL_MODES:
        router = harness(down, prefill={"via": "direct", "on_failure": policy})
        envoy = await router.play(TURN, END, modes)
        assert envoy.client.status == status
        assert b"kv_transfer_params" not in envoy.upstream.body
        assert router.metric("prefill_fallbacks_total") == fallbacks
        assert router.outcomes() == {"prefill_failed": 1}


async def test_079_port_and_engine_of_a_data_parallel_rank_stay() -> None:
    rank = handle(remote_port=5601, remote_engine_id="abc_dp1")
    router = harness()
    await router.play(TURN, Response(decode_events(params=rank), node=DECODE))
    await router.play(NEXT, END)
    carried = carried_handle(router.asks[1].body)
    assert (carried["remote_port"], carried["remote_engine_id"]) == (5601, "abc_dp1")


HOSTS = [
    ("localhost", "10.0.0.2:8200", "10.0.0.2"),
    ("0.0.0.0", "10.0.0.2:8200", "10.0.0.2"),
    ("10.0.0.7", "10.0.0.2:8200", "10.0.0.7"),
    ("fd00::1", "10.0.0.2:8200", "fd00::1"),
    ("::1", "[fd00::1]:8200", "fd00::1"),
]


@pytest.mark.parametrize(("host", "upstream", "expected"), HOSTS)
async def test_080_a_host_that_names_no_machine_is_replaced(host: str, upstream: str, expected: str) -> None:
    router = harness(pools={"prefill": ["10.0.0.1:8100"], "decode": [DECODE, "[fd00::1]:8200"]})
    await router.play(TURN, Response(decode_events(params=handle(remote_host=host)), node=upstream))
    await router.play(NEXT, END)
    assert carried_handle(router.asks[1].body) == handle(remote_host=expected)


async def fail_reads(router: Harness, clock: Clock, count: int) -> None:
    """So many conversations whose second turn fails on P."""
    for i in range(count):
        await router.turn(f"Talk {i}")
        clock.now += 1
        await router.turn(f"Talk {i}", "Good morning", "And?")


async def test_083_handles_of_an_engine_whose_reads_fail_are_left_out() -> None:
    def fails(body: bytes) -> Reply:
        return Reply("10.0.0.1:8100", 500, b"") if carried_handle(body) else connector(body)

    clock = Clock()
    router = harness(fails, clock)
    await fail_reads(router, clock, 6)
    assert [bool(carried_handle(ask.body)) for ask in router.asks if "chat" in ask.path].count(True) == 5
    assert router.outcomes() == {"first_turn": 6, "read_failed": 5, "breaker_open": 1}
    assert router.metric("breakers_open") == 1
    clock.now += 60
    assert router.metric("breakers_open") == 0
    await router.turn("Talk 9")
    await router.turn("Talk 9", "Good morning", "And?")
    assert router.outcomes()["read_failed"] == 6


async def test_083_prefill_nodes_that_are_down_say_nothing_of_an_engine() -> None:
    """They never saw the handle."""

    def refuses(body: bytes) -> Reply:
        return Reply("10.0.0.1:8100", failure=Failure.CONNECT) if carried_handle(body) else connector(body)

    clock = Clock()
    router = harness(refuses, clock)
    await fail_reads(router, clock, 6)
    assert router.metric("breakers_open") == 0
    assert router.outcomes() == {"first_turn": 6, "read_failed": 6}


EVIL = {"do_remote_prefill": True, "remote_host": "evil", "remote_block_ids": [[1]], "prompt_token_ids": [666]}
PLACES: dict[str, dict[str, Any]] = {
    "top level": {"kv_transfer_params": EVIL},
    "encoder cache": {"ec_transfer_params": EVIL},
    "vllm_xargs": {"vllm_xargs": {"kv_transfer_params": EVIL, "keep": 1}},
    "extra_args": {"extra_args": {"kv_transfer_params": EVIL}},
    "sampling_params": {"sampling_params": {"extra_args": {"kv_transfer_params": EVIL}}},
    "extra_body": {"extra_body": {"kv_transfer_params": EVIL}},
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("place", PLACES)
async def test_085_parameters_of_clients_reach_no_node(place: str, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi"}
    plain = json.dumps({"model": "m", **prompt, **PLACES[place]}).encode()
    escaped = plain.replace(b"_transfer_params", b"_transfer\\u005fparams")
    twice = b"{" + json.dumps(PLACES[place]).encode()[1:-1] + b"," + plain[1:]
    for body in (plain, escaped, twice):
        for modes in ALL_MODES:
            router = harness()
            envoy = await router.play(Request(path, [body]), END, modes)
            seen = [envoy.upstream.body, *(ask.body for ask in router.asks)]
            assert not any(b"evil" in body or b"666" in body for body in seen)
            assert envoy.client.status == 200
            assert (b'"keep"' in envoy.upstream.body) == (place == "vllm_xargs")
            # A prompt too short to be found again leaves a handle that is freed at once (by a prompt of ours).
            assert len([ask for ask in router.asks if b'"prompt":[1]' not in ask.body]) == 1


async def test_088_headers_that_steer_routing_are_the_routers_own() -> None:
    names = ["x-prefiller-host-port", "x-prefiller-url", "x-kvreturn-node", "x-kvreturn-upstream", "x-kvreturn-"]
    headers = {**JSON, **dict.fromkeys(names, "evil:80")}
    for modes in ALL_MODES:
        for request in (
            Request(pieces=TURN.pieces, headers=headers),
            Request("/v1/responses", [b"{}"], headers=headers),
            Request("/v1/models", method="GET", headers=headers),
        ):
            router = harness()
            envoy = await router.play(request, END, modes)
            assert not {n for n in envoy.upstream.headers or {} if n in names}
            assert envoy.upstream.node in {DECODE, None}
            assert not any("evil:80" in h.values() for h in router.stub.headers)


async def test_091_a_client_that_leaves_in_mid_answer_causes_no_more_requests() -> None:
    """That D sees it is Envoy's part; ours is to try nothing again."""
    for modes in ALL_MODES:
        router = harness()
        envoy = router.envoy(modes)
        await envoy.request(TURN)
        stream = envoy._stream
        assert isinstance(stream, LocalStream)
        await envoy.respond(Response(decode_events(params=handle(), done=False)[:2]))
        stream.cancel()
        await asyncio.wait([stream.task])
        await asyncio.sleep(0)
        assert len(router.asks) == 1
        assert router.metric("prefill_retries_total") == 0


async def test_091_an_answer_in_one_piece_is_kept_back_no_longer_than_it_takes() -> None:
    for modes in ALL_MODES:
        router = harness()
        body = decode_body(params=handle())
        envoy = await router.play(TURN, Response([body[:50], body[50:]], headers=JSON, node=DECODE), modes)
        assert json.loads(envoy.client.body) == json.loads(decode_body())
        assert router.handles == 1
