"""One conversation through every combination of body modes; `support.extproc.Envoy` fails on any breach of contract."""

import asyncio
import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.extproc import ALL_MODES, ContractError, Mode, Modes, Request, Response
from support.harness import DECODE, Harness, harness
from support.nodes import (
    COLD,
    carried_handle,
    chat,
    decode_body,
    decode_events,
    handle,
    prefill_params,
    sent_params,
)

TURN_1 = chat("Good day. Is the harbour open?", stream=True)
TURN_2 = chat("Good day. Is the harbour open?", "Good morning", "Thank you. Until when?", stream=True)
EVENTS = b"".join(decode_events(params=handle()))
PLAIN_EVENTS = b"".join(decode_events())  # what vLLM would have sent without the handle
JSON_BODY = decode_body(params=handle())
PLAIN_JSON_BODY = decode_body()
JSON_HEADERS = {"content-type": "application/json"}
BUFFERED_RESPONSE = Modes(Mode.BUFFERED, Mode.BUFFERED)
EVERY_MODE = [*ALL_MODES, BUFFERED_RESPONSE]


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    """`data` in pieces, cut at these offsets modulo its length; equal offsets make empty pieces."""
    offsets = [0, *sorted(i % (len(data) + 1) for i in at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(offsets)]


def can_end_by_trailers(modes: Modes) -> bool:
    """Whether a request's trailers can be told to the server before it must have answered the body.

    STREAMED without waiting is out altogether: Envoy holds trailers until the headers are answered, the server holds
    that answer until it has the body.
    """
    return modes.request != Mode.STREAMED


async def converse(
    router: Harness,
    modes: Modes,
    request_cuts: Sequence[int],
    response_cuts: Sequence[int],
    *,
    trailers: bool,
    sse: bool,
) -> None:
    """Two turns of one conversation, the second one reading back what the first one left."""
    raw, plain = (EVENTS, PLAIN_EVENTS) if sse else (JSON_BODY, PLAIN_JSON_BODY)
    headers = {"content-type": "text/event-stream; charset=utf-8"} if sse else JSON_HEADERS
    ends = trailers and can_end_by_trailers(modes)
    for body in (TURN_1, TURN_2):
        response = Response(cut(raw, response_cuts), headers=headers, trailers=trailers, node=DECODE)
        envoy = await router.play(Request(pieces=cut(body, request_cuts), trailers=ends), response, modes)
        assert envoy.failed is None
        assert json.loads(envoy.upstream.body) == {
            **json.loads(body),
            "kv_transfer_params": sent_params(router.stub.script(router.asks[-1].body).body),
        }
        assert envoy.upstream.body.startswith(body[:-1])  # spliced, not written anew
        assert envoy.upstream.ended
        assert envoy.upstream.trailers == ends
        assert envoy.upstream.node == DECODE
        assert envoy.client.status == 200
        if sse:
            assert envoy.client.body == plain
        else:
            assert json.loads(envoy.client.body) == json.loads(plain)
        assert envoy.client.ended
        assert envoy.client.trailers == trailers
        assert not envoy.upstream.bypassed
        assert not envoy.client.bypassed
    assert [carried_handle(ask.body) for ask in router.asks] == [None, handle()]
    assert router.outcomes() == {"first_turn": 1, "hit": 1}
    assert router.handles == 1


@pytest.mark.parametrize("sse", [True, False], ids=["sse", "json"])
@pytest.mark.parametrize("trailers", [True, False], ids=["trailers", "end_of_stream"])
@pytest.mark.parametrize("modes", EVERY_MODE, ids=str)
async def test_a_conversation_is_the_same_in_every_mode(modes: Modes, *, trailers: bool, sse: bool) -> None:
    await converse(harness(), modes, [20, 55], [100, 101, 600], trailers=trailers, sse=sse)


cuts = st.lists(st.integers(0, 1 << 16), max_size=6)


@settings(max_examples=120, deadline=None)
@given(
    modes=st.sampled_from(EVERY_MODE), request_cuts=cuts, response_cuts=cuts, trailers=st.booleans(), sse=st.booleans()
)
def test_cuts_make_no_difference(
    *, modes: Modes, request_cuts: list[int], response_cuts: list[int], trailers: bool, sse: bool
) -> None:
    asyncio.run(converse(harness(), modes, request_cuts, response_cuts, trailers=trailers, sse=sse))


@pytest.mark.parametrize("modes", [m for m in ALL_MODES if m.request == Mode.STREAMED and not m.early], ids=str)
async def test_trailers_that_end_a_streamed_request_body_are_refused(modes: Modes) -> None:
    """Its last message is answered by then, so that no message is left that could carry the rewritten body."""
    router = harness()
    envoy = await router.play(Request(pieces=[TURN_1], trailers=True), Response(), modes)
    assert envoy.client.status == 400
    assert json.loads(envoy.client.body)["error"]["message"] == (
        "kvreturn: requests with trailers need request_body_mode BUFFERED or FULL_DUPLEX_STREAMED"
    )
    assert not router.asks
    assert router.outcomes() == {"rejected": 1}


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_an_empty_body_ends_a_response(modes: Modes) -> None:
    router = harness()
    envoy = await router.play(Request(pieces=[TURN_1]), Response([b""]), modes)
    assert (envoy.client.body, envoy.client.ended) == (b"", True)


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_a_response_without_a_body_is_over_with_its_headers(modes: Modes) -> None:
    router = harness()
    envoy = await router.play(Request(pieces=[TURN_1]), Response(status=204), modes)
    assert (envoy.client.status, envoy.client.body, envoy.client.ended) == (204, b"", True)


@pytest.mark.parametrize("modes", [m for m in ALL_MODES if m.response == Mode.STREAMED], ids=str)
async def test_a_response_whose_trailers_envoy_does_not_send_is_complete(modes: Modes) -> None:
    """`response_trailer_mode: SKIP`: the server is told the last bytes, and never that they were the last."""
    modes = Modes(modes.request, modes.response, modes.early, trailers=False)
    router = harness()
    response = Response(decode_events(params=handle()), trailers=True, node=DECODE)
    envoy = await router.play(Request(pieces=[TURN_1]), response, modes)
    assert envoy.client.body == PLAIN_EVENTS
    assert router.handles == 1


@pytest.mark.parametrize("size", [61_999, 62_000, 62_001, 64 << 10, 200_000])
@pytest.mark.parametrize("modes", [m for m in ALL_MODES if m.duplex], ids=str)
async def test_large_bodies_go_in_answers_that_envoy_can_take(modes: Modes, size: int) -> None:
    router = harness()
    request = chat("x" * size)
    text = json.dumps({"choices": [{"index": 0, "message": {"content": "y" * size}, "finish_reason": "stop"}]}).encode()
    envoy = await router.play(Request(pieces=[request]), Response([text], headers=JSON_HEADERS), modes)
    assert json.loads(envoy.upstream.body) == {**json.loads(request), "kv_transfer_params": prefill_params()}
    assert envoy.client.body == text


async def test_the_cold_dict_goes_to_a_stock_prefill_node_in_the_published_form() -> None:
    router = harness()
    await router.turn("Hello")
    assert sent_params(router.asks[0].body) == COLD


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_the_kit_itself_sees_a_breach(modes: Modes) -> None:
    """One answer too many: what Envoy calls spurious."""
    router = harness()
    envoy = router.envoy(modes)
    assert await envoy.request(Request(pieces=[TURN_1]))
    stream = envoy._stream
    spurious = next(a for a in envoy.answers if a.WhichOneof("response") == "request_body")
    await stream.write(spurious)  # type: ignore[attr-defined]
    with pytest.raises(ContractError):
        await envoy.respond(Response([b"data: [DONE]\n\n"]))
    stream.cancel()
