"""What becomes of D's responses: stripped, decoded, passed on at once, stored in time."""

import gzip
import json
import zlib
from collections.abc import Callable

import pytest

from support.extproc import ALL_MODES, Mode, Modes, Request, Response, body_message, headers_message
from support.harness import DECODE, harness
from support.nodes import carried_handle, chat, decode_body, decode_events, handle, prefill_params

TURN = Request(pieces=[chat("Hi", stream=True)])
EVENTS = decode_events(params=handle())
PLAIN = b"".join(decode_events())
SSE = "text/event-stream; charset=utf-8"
ERROR = b'{"error":{"message":"bad template","type":"BadRequestError","param":null,"code":400}}'


def odd_pieces(data: bytes) -> list[bytes]:
    """In three pieces of odd lengths."""
    third = len(data) // 3 | 1
    return [data[:third], data[third : 2 * third], data[2 * third :]]


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
}
BODIES = [
    (200, SSE, b"".join(EVENTS), PLAIN),
    (200, "application/json", decode_body(params=handle()), None),
    (400, "application/json", ERROR, ERROR),
    (500, "text/plain", b"Internal Server Error", b"Internal Server Error"),
]


@pytest.mark.parametrize("encoding", ENCODERS)
@pytest.mark.parametrize(("status", "content_type", "body", "expected"), BODIES, ids=["sse", "json", "400", "500"])
async def test_a_response_that_is_compressed_all_the_same_is_decoded(
    encoding: str, status: int, content_type: str, body: bytes, expected: bytes | None
) -> None:
    """ai-gateway#682, #1189, #2553: one decoder for the whole response, and a header that says what the body is."""
    for modes in [*ALL_MODES, Modes(Mode.BUFFERED, Mode.BUFFERED)]:
        headers = {"content-type": content_type, "content-encoding": encoding}
        response = Response(odd_pieces(ENCODERS[encoding](body)), status, headers, node=DECODE)
        router = harness()
        envoy = await router.play(TURN, response, modes)
        assert envoy.client.status == status
        assert envoy.client.headers
        assert envoy.client.headers.get("content-encoding", encoding) == "identity" or (
            "content-encoding" not in envoy.client.headers
        )
        if expected is None:
            assert json.loads(envoy.client.body) == json.loads(decode_body())
        else:
            assert envoy.client.body == expected
        assert envoy.client.ended
        assert router.handles == (status == 200)


async def test_gzip_of_several_members_is_one_body() -> None:
    body = b"".join(gzip.compress(event) for event in EVENTS)
    headers = {"content-type": SSE, "content-encoding": "gzip"}
    for pieces in ([body], odd_pieces(body), [gzip.compress(event) for event in EVENTS]):
        envoy = await harness().play(TURN, Response(pieces, headers=headers))
        assert envoy.client.body == PLAIN


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, br"])
async def test_an_encoding_that_cannot_be_read_is_a_gateway_error(encoding: str, status: int) -> None:
    """Passed on unread, it could hold a handle."""
    for modes in ALL_MODES:
        router = harness()
        headers = {"content-type": SSE, "content-encoding": encoding}
        envoy = await router.play(TURN, Response([b"\x0b\x00\x80"], status, headers), modes)
        assert envoy.client.status == 502
        message = json.loads(envoy.client.body)["error"]["message"]
        assert f"content-encoding {encoding}" in message
        assert router.records == 0
        assert router.metric("prefill_retries_total") == 0


async def test_what_is_no_gzip_cuts_the_response_and_stores_nothing() -> None:
    for modes in ALL_MODES:
        router = harness()
        headers = {"content-type": SSE, "content-encoding": "gzip"}
        envoy = router.envoy(modes)
        await envoy.request(TURN)
        await envoy.respond(Response([b"data: "], headers=headers))
        assert envoy.failed is not None
        assert not envoy.client.ended
        assert router.records == 0


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_an_event_goes_on_before_the_next_one_comes(modes: Modes) -> None:
    router = harness()
    envoy = router.envoy(modes)
    await envoy.request(TURN)
    stream = envoy._stream
    await stream.send(headers_message("response", {":status": "200", "content-type": SSE}))
    await stream.receive()
    for event in EVENTS[:-2]:
        await stream.send(body_message("response", event))
        answer = await stream.receive()
        assert answer
        mutation = answer.response_body.response.body_mutation
        if modes.response == Mode.FULL_DUPLEX_STREAMED:
            assert mutation.streamed_response.body == event
        else:
            assert not mutation.WhichOneof("mutation")
    stream.cancel()


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_the_handle_is_stored_before_the_client_can_ask_again(modes: Modes) -> None:
    router = harness()
    envoy = router.envoy(modes)
    await envoy.request(TURN)
    stream = envoy._stream
    await stream.send(headers_message("response", {":status": "200", "content-type": SSE}))
    await stream.receive()
    await stream.send(body_message("response", b"".join(EVENTS[:-1])))
    await stream.receive()
    assert router.handles == 1
    stream.cancel()


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_a_huge_handle_is_taken_out_however_it_is_cut(modes: Modes) -> None:
    """25,000 block ids: about 150 KB in one event, so several body messages."""
    huge = handle(remote_block_ids=[list(range(25_000))], remote_num_tokens=400_000, kvreturn=None)
    data = b"".join(decode_events(params=huge))
    pieces = [data[i : i + 16_384] for i in range(0, len(data), 16_384)]
    router = harness(proof="trusted")
    envoy = await router.play(TURN, Response(pieces, node=DECODE), modes)
    assert envoy.client.body == PLAIN
    await router.turn("Hi", "Good morning", "And?", stream=True, modes=modes)
    assert carried_handle(router.asks[1].body) == huge


UNSTORED = [
    ("error status", Response([ERROR], 400, {"content-type": "application/json"}), "400"),
    ("in-band error", Response([b'data: {"error":{"code":500,"message":"x"}}\n\n', b"data: [DONE]\n\n"]), "500"),
    ("in-band error without a code", Response([b'data: {"error":{"message":"x","type":"Oops"}}\n\n']), "in_band"),
    ("cut off", Response(decode_events(params=handle())[:2]), "incomplete"),
    ("204", Response(status=204), None),
]


@pytest.mark.parametrize(("response", "error"), [u[1:] for u in UNSTORED], ids=[u[0] for u in UNSTORED])
async def test_a_turn_that_failed_leaves_nothing(response: Response, error: str | None) -> None:
    for modes in ALL_MODES:
        router = harness()
        envoy = router.envoy(modes)
        await envoy.request(TURN)
        if error == "incomplete":
            stream = envoy._stream
            await stream.send(headers_message("response", {":status": "200", "content-type": SSE}))
            for piece in response.pieces:
                await stream.send(body_message("response", piece))
            await stream.half_close()
            while await stream.receive():
                pass
        else:
            await envoy.respond(response)
            await envoy.finish()
            assert envoy.client.body == b"".join(response.pieces)
        assert router.records == 0
        if error:
            assert router.metric("turn_errors_total", type=error) == 1


@pytest.mark.parametrize(
    ("sent", "echoed", "expected"),
    [
        ("req-1.A_b", True, "req-1.A_b"),
        ("x" * 128, True, "x" * 128),
        ("x" * 129, True, None),
        ("two words", True, None),
        ("", True, None),
        ("req-1", False, None),
    ],
)
async def test_the_clients_own_request_id_comes_back_if_it_is_harmless(
    sent: str, *, echoed: bool, expected: str | None
) -> None:
    """vLLM echoes the id that it got, which was ours (field reports 68, 69)."""
    router = harness()
    request = Request(pieces=TURN.pieces, headers={"content-type": "application/json", "x-request-id": sent})
    envoy = router.envoy()
    await envoy.request(request)
    assert envoy.upstream.headers
    ours = envoy.upstream.headers["x-request-id"]
    assert ours != sent
    headers = {"content-type": SSE, **({"x-request-id": ours} if echoed else {})}
    await envoy.respond(Response(EVENTS, headers=headers))
    await envoy.finish()
    assert envoy.client.headers
    assert envoy.client.headers.get("x-request-id") == (expected or (ours if echoed else None))


async def test_our_own_headers_never_reach_a_client() -> None:
    router = harness()
    headers = {"content-type": SSE, "x-kvreturn-upstream": "10.0.0.2:8200", "x-other": "stays"}
    envoy = await router.play(TURN, Response(EVENTS, headers=headers))
    assert envoy.client.headers == {":status": "200", "content-type": SSE, "x-other": "stays"}


@pytest.mark.parametrize(
    ("host", "upstream", "expected"),
    [
        ("localhost", "10.0.0.9:8200", "10.0.0.9"),
        ("127.0.0.1", "[fd00::9]:8200", "fd00::9"),
        ("0.0.0.0", "not an address", "10.0.0.2"),  # then the node that we named
        ("10.0.0.7", "10.0.0.9:8200", "10.0.0.7"),
    ],
)
async def test_a_handle_names_the_node_that_really_answered(host: str, upstream: str, expected: str) -> None:
    decode = [DECODE, "10.0.0.9:8200", "[fd00::9]:8200"]
    router = harness(pools={"prefill": ["10.0.0.1:8100"], "decode": decode})
    await router.play(TURN, Response(decode_events(params=handle(remote_host=host)), node=upstream))
    await router.turn("Hi", "Good morning", "And?", stream=True)
    assert carried_handle(router.asks[1].body) == handle(remote_host=expected)


async def test_the_next_turn_goes_to_the_node_that_holds_the_conversation() -> None:
    decode = ["10.0.0.8:8200", "10.0.0.9:8200", DECODE]
    router = harness(pools={"prefill": ["10.0.0.1:8100"], "decode": decode})
    first = await router.play(TURN, Response(EVENTS, node=DECODE))
    assert first.upstream.node == "10.0.0.8:8200"  # the first one, where all are idle
    second = await router.turn("Hi", "Good morning", "And?", stream=True)
    assert second.upstream.node == DECODE


async def test_reuse_does_not_depend_on_how_the_pool_names_its_nodes() -> None:
    """Envoy tells the address that it connected to, and not the name that it had for it."""
    router = harness(pools={"prefill": ["prefill-0:8100"], "decode": ["decode-0.vllm:8200", "decode-1.vllm:8200"]})
    await router.play(TURN, Response(EVENTS, node=DECODE))
    await router.turn("Hi", "Good morning", "And?", stream=True)
    assert router.outcomes() == {"first_turn": 1, "hit": 1}


async def test_a_handle_of_a_node_that_left_the_pool_is_not_attached() -> None:
    router = harness()
    await router.play(TURN, Response(EVENTS, node="10.0.0.99:8200"))
    await router.turn("Hi", "Good morning", "And?", stream=True)
    assert router.outcomes() == {"first_turn": 1, "node_gone": 1}


async def test_load_is_given_back_when_the_stream_ends() -> None:
    router = harness(pools={"prefill": ["10.0.0.1:8100"], "decode": ["10.0.0.8:8200", "10.0.0.9:8200"]})
    one, two = router.envoy(), router.envoy()
    await one.request(TURN)
    await two.request(TURN)
    assert [one.upstream.node, two.upstream.node] == ["10.0.0.8:8200", "10.0.0.9:8200"]
    await two.finish()
    three = router.envoy()
    await three.request(TURN)
    assert three.upstream.node == "10.0.0.9:8200"
    await one.finish()
    await three.finish()


async def test_an_answer_before_the_request_is_whole_passes() -> None:
    """D may refuse a STREAMED request early; then no turn was made."""
    for response_mode in (Mode.STREAMED, Mode.FULL_DUPLEX_STREAMED):
        router = harness()
        envoy = router.envoy(Modes(Mode.STREAMED, response_mode))
        stream = envoy._stream
        await stream.send(headers_message("request", {":method": "POST", ":path": TURN.path}, modes=envoy.modes))
        assert await stream.receive()
        await stream.send(body_message("request", b'{"model'))
        assert await stream.receive()
        await envoy.respond(Response([ERROR], 400, {"content-type": "application/json"}))
        await envoy.finish()
        assert (envoy.client.status, envoy.client.body) == (400, ERROR)
        assert router.outcomes() == {"rejected": 1}
        assert not router.asks


async def test_the_prefill_nodes_parameters_go_to_d_whole() -> None:
    router = harness()
    envoy = await router.turn("Hi")
    assert json.loads(envoy.upstream.body)["kv_transfer_params"] == prefill_params()
