"""Which requests are turns, which are scrubbed, which are none of our business; and what their headers become."""

import json

import pytest

from support.extproc import (
    ALL_MODES,
    Mode,
    Modes,
    Request,
    Response,
    body_message,
    headers_message,
    request_headers,
    trailers_message,
)
from support.harness import harness
from support.nodes import chat, decode_events, handle, sent_params
from support.streams import LocalStream

EVIL = {"do_remote_prefill": True, "remote_host": "evil.example", "remote_block_ids": [[1]]}
SSE = Response(decode_events(params=handle()))
PLAIN = b"".join(decode_events())
UPLOAD = "multipart/form-data; boundary=x"

UNTOUCHED = [
    ("GET", "/v1/models", {}, []),
    ("HEAD", "/health", {}, []),
    ("OPTIONS", "/v1/chat/completions", {"origin": "https://app.example"}, []),
    ("GET", "/v1/realtime", {"upgrade": "websocket", "connection": "Upgrade"}, [b"\x81\x02hi", b"\x81\x02ho"]),
    ("POST", "/v1/audio/transcriptions", {"content-type": UPLOAD}, [b"--x\r\n", b"\x00\xff" * 50_000, b"--x--\r\n"]),
    ("POST", "/v1/chat/completions", {"content-length": "0"}, []),
    ("PUT", "/v1/files/7", {"content-type": "text/plain"}, [b'{"kv_transfer_params": {}}']),
]


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
@pytest.mark.parametrize(
    ("method", "path", "headers", "pieces"), UNTOUCHED, ids=[f"{m} {p}" for m, p, _, _ in UNTOUCHED]
)
async def test_what_is_no_turn_passes_untouched(
    modes: Modes, method: str, path: str, headers: dict[str, str], pieces: list[bytes]
) -> None:
    """Both ways, at once, and without a prefill leg; even a handle in the answer is not looked for."""
    router = harness()
    envoy = await router.play(Request(path, pieces, method, headers), SSE, modes)
    assert envoy.upstream.body == b"".join(pieces)
    assert envoy.upstream.headers
    assert {":method", ":path", *headers} - {"content-length"} <= set(envoy.upstream.headers)
    assert envoy.client.body == b"".join(SSE.pieces)
    assert envoy.client.ended
    assert (router.asks, router.records, router.outcomes()) == ([], 0, {})


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_a_request_without_a_body_is_answered_at_once(modes: Modes) -> None:
    """envoy#42507: no body message will come, so waiting for one would hang."""
    router = harness()
    stream = LocalStream(router.service)
    await stream.send(request_headers(Request("/v1/models", method="GET"), modes=modes))
    answer = await stream.receive()
    assert answer
    assert answer.WhichOneof("response") == "request_headers"
    stream.cancel()


SCRUBBED = [
    ("/v1/embeddings", "application/json"),
    ("/v1/embeddings", None),  # FastAPI takes a body without a content-type for JSON
    ("/v1/messages/count_tokens", "application/json; charset=utf-8"),
    ("/v1/embeddings", "application/vnd.api+json"),
    ("/v1/embeddings", "application/a,b c+json; charset=utf-8"),
    ("/v1/chat/completions/", "application/json"),
    ("/v1/embeddings", "Application/JSON"),  # vLLM compares without case
    ("/v1/embeddings", ""),
    ("/tokenize", "application/json"),
]


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
@pytest.mark.parametrize(("path", "content_type"), SCRUBBED)
async def test_json_to_other_paths_is_scrubbed(modes: Modes, path: str, content_type: str | None) -> None:
    router = harness()
    headers = {} if content_type is None else {"content-type": content_type}
    body = json.dumps({"model": "m", "input": "Hi", "kv_transfer_params": EVIL}).encode()
    envoy = await router.play(Request(path, [body[:30], body[30:]], headers=headers), SSE, modes)
    assert envoy.upstream.body == b'{"model": "m", "input": "Hi"}'
    assert envoy.client.body == b"".join(SSE.pieces)
    assert (router.asks, router.outcomes()) == ([], {})


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
async def test_json_is_scrubbed_whatever_the_method(method: str) -> None:
    request = Request("/v1/chat/completions", [b'{"a": 1, "kv_transfer_params": {}}'], method)
    envoy = await harness().play(request, SSE)
    assert envoy.upstream.body == b'{"a": 1}'


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
@pytest.mark.parametrize(("path", "outcomes"), [("/v1/chat/completions", {"rejected": 1}), ("/v1/embeddings", {})])
@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity", "unheard-of"])
async def test_a_compressed_body_cannot_be_read_and_is_refused(
    modes: Modes, path: str, outcomes: dict[str, int], encoding: str
) -> None:
    router = harness()
    headers = {"content-type": "application/json", "content-encoding": encoding}
    envoy = await router.play(Request(path, [b"\x1f\x8b\x08"], headers=headers), SSE, modes)
    assert envoy.client.status == 415
    error = json.loads(envoy.client.body)["error"]
    assert (error["type"], error["code"]) == ("UnsupportedMediaType", 415)
    assert encoding.lower() in error["message"]
    assert envoy.client.headers
    assert envoy.client.headers["accept-encoding"] == "identity"
    assert envoy.upstream.headers is None
    assert (router.asks, router.outcomes()) == ([], outcomes)


@pytest.mark.parametrize("encoding", ["identity", "", " Identity "])
async def test_a_body_that_is_not_compressed_may_say_so(encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    router = harness()
    await router.play(Request(pieces=[chat("Hi")], headers=headers), SSE)
    assert len(router.asks) == 1


async def test_a_compressed_upload_cannot_be_looked_into_and_is_refused() -> None:
    headers = {"content-type": UPLOAD, "content-encoding": "gzip"}
    envoy = await harness().play(Request("/v1/audio/transcriptions", [b"\x1f\x8b\x08"], headers=headers), SSE)
    assert (envoy.client.status, envoy.upstream.body) == (415, b"")


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_json_that_holds_no_parameters_passes_even_if_it_is_malformed(modes: Modes) -> None:
    """What is wrong with it is for the node to say."""
    envoy = await harness().play(Request("/v1/embeddings", [b'{"input": ']), SSE, modes)
    assert envoy.upstream.body == b'{"input": '


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_json_that_hides_parameters_and_cannot_be_read_is_refused(modes: Modes) -> None:
    envoy = await harness().play(Request("/v1/embeddings", [b'{"kv_transfer_params": {']), SSE, modes)
    assert envoy.client.status == 400
    assert json.loads(envoy.client.body)["error"]["type"] == "BadRequestError"
    assert envoy.client.headers
    assert envoy.client.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions?api-version=1", "/v1/%63hat/completions", "/v1/chat%2Fcompletions"]
)
async def test_a_path_is_the_one_that_vllm_will_see(path: str) -> None:
    """uvicorn cuts the query off and decodes the rest before it matches."""
    router = harness()
    await router.play(Request(path, [chat("Hi")]), SSE)
    assert len(router.asks) == 1


BAD_BODIES = [
    (b"", "the body is not a JSON object"),
    (b"[]", "the body is not a JSON object"),
    (b'{"model": "m"', "not JSON"),
    (b'{"model": "m"}', "`messages` must be a list"),
    (b'{"model": 1, "messages": [{"role": "user"}]}', "`model` must be a string"),
    (b'{"model": "\xff"}', "not JSON"),
]


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
@pytest.mark.parametrize(("body", "message"), BAD_BODIES)
async def test_a_turn_that_cannot_be_read_is_refused_before_the_prefill_leg(
    modes: Modes, body: bytes, message: str
) -> None:
    router = harness()
    envoy = await router.play(Request(pieces=[body]), SSE, modes)
    assert envoy.client.status == 400
    error = json.loads(envoy.client.body)["error"]
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert not router.asks
    assert router.outcomes() == {"rejected": 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_a_body_over_the_limit_is_refused_while_it_grows(modes: Modes, path: str) -> None:
    router = harness(limits={"request_bytes": 1000})
    envoy = await router.play(Request(path, [b"x" * 400] * 10), SSE, modes)
    assert envoy.client.status == 413
    error = json.loads(envoy.client.body)["error"]
    assert error["message"] == "kvreturn: the request body is over 1000 bytes (limits.request_bytes)"
    assert not router.asks
    seen = [a.WhichOneof("response") for a in envoy.answers]
    assert seen.count("request_body") <= 2


async def test_a_body_at_the_limit_passes() -> None:
    body = chat("Hi")
    envoy = await harness(limits={"request_bytes": len(body)}).play(Request(pieces=[body]), SSE)
    assert envoy.client.status == 200


async def test_nothing_that_steers_routing_comes_from_a_client() -> None:
    router = harness()
    sent = {
        "content-type": "application/json",
        "x-kvreturn-node": "evil.example:80",
        "x-kvreturn-upstream": "evil.example:80",
        "x-prefiller-host-port": "evil.example:80",
        "x-gateway-destination-endpoint": "evil.example:80",
        "x-custom": "stays",
        "accept-encoding": "gzip, br",
    }
    for modes in ALL_MODES:
        envoy = await router.play(Request(pieces=[chat("Hi")], headers=sent), SSE, modes)
        assert envoy.upstream.headers
        assert {n for n in envoy.upstream.headers if n.startswith("x-")} == {"x-custom", "x-request-id"}
        assert "accept-encoding" not in envoy.upstream.headers
        assert envoy.upstream.node == "10.0.0.2:8200"
    for path in ("/v1/models", "/v1/embeddings"):
        envoy = await router.play(Request(path, [b"{}"], headers=sent), SSE)
        assert envoy.upstream.headers
        assert {n for n in envoy.upstream.headers if n.startswith("x-")} == {"x-custom"}
    assert not any("evil" in value for headers in router.stub.headers for value in headers.values())


async def test_headers_are_read_in_both_forms_and_whatever_bytes_they_hold() -> None:
    """Old Envoys send `value`, newer ones `raw_value`, which need not be UTF-8 (envoy#31555)."""
    router = harness()
    message = request_headers(Request(pieces=[b"{}"]), authorization="Bearer s\u00ffcret")
    for header in message.request_headers.headers.headers:
        if header.key in {":path", ":method"}:
            header.value, header.raw_value = header.raw_value.decode(), b""
    stream = LocalStream(router.service)
    await stream.send(message)
    assert (await stream.receive()) is not None
    await stream.send(body_message("request", chat("Hi"), end=True))
    assert (await stream.receive()) is not None
    assert router.stub.headers[0]["authorization"] == "Bearer s\u00ffcret"
    stream.cancel()


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_a_second_end_of_stream_is_ignored(modes: Modes) -> None:
    """envoy#46237: for bodies over about 1 MB another body message with end_of_stream may come."""
    router = harness()
    stream = LocalStream(router.service)
    await stream.send(request_headers(modes=modes))
    await stream.send(body_message("request", chat("Hi"), end=True))
    await stream.send(body_message("request", b"d", end=True))
    await stream.half_close()
    answers = [a async for a in _all(stream)]
    ends = [a for a in answers if a.request_body.response.body_mutation.streamed_response.end_of_stream]
    assert len(ends) == (modes.request == Mode.FULL_DUPLEX_STREAMED)
    assert not any(a.request_body.response.body_mutation.body == b"d" for a in answers)
    assert len(router.asks) == 1


# --- a filter that is configured so that the router cannot do its work ---

SETUPS = [
    Modes(Mode.NONE, Mode.STREAMED),
    Modes(Mode.BUFFERED_PARTIAL, Mode.STREAMED),
    Modes(Mode.BUFFERED, Mode.NONE),
]


@pytest.mark.parametrize("modes", SETUPS, ids=["no request body", "partial request body", "no response body"])
async def test_a_filter_that_hides_bodies_is_an_error_that_says_what_to_do(modes: Modes) -> None:
    router = harness()
    stream = LocalStream(router.service)
    await stream.send(request_headers(modes=modes))
    answer = await stream.receive()
    assert answer
    assert answer.immediate_response.status.code == 500
    assert "kvreturn envoy-config" in json.loads(answer.immediate_response.body)["error"]["message"]
    assert await stream.receive() is None
    assert router.outcomes() == {}


async def test_a_filter_that_hides_request_headers_lets_no_body_through() -> None:
    """`request_header_mode: SKIP`: a body whose path nobody knows could bring a client's own parameters."""
    stream = LocalStream(harness().service)
    message = body_message("request", json.dumps({"kv_transfer_params": EVIL}).encode(), end=True)
    message.protocol_config.CopyFrom(Modes().config())
    await stream.send(message)
    answer = await stream.receive()
    assert answer
    assert answer.immediate_response.status.code == 500


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_a_filter_that_hides_response_headers_lets_no_handle_through(modes: Modes) -> None:
    """`response_header_mode: SKIP`: nobody knows how to read such a body."""
    router = harness()
    envoy = router.envoy(modes)
    assert await envoy.request(Request(pieces=[chat("Hi")]))
    stream = envoy._stream
    for piece in decode_events(params=handle()):
        await stream.send(body_message("response", piece))
    await stream.half_close()
    answers = [a async for a in _all(stream)]  # type: ignore[arg-type]
    assert not any(b"engine-of-d" in a.SerializeToString() for a in answers)
    assert answers[0].HasField("immediate_response")


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_a_local_reply_of_another_filter_passes(modes: Modes) -> None:
    """Envoy shows a refusal by a filter before ours as a response without a request.

    So it was before Envoy 1.34, and is with `skip_ext_proc_on_local_reply` off.
    """
    stream = LocalStream(harness().service)
    await stream.send(headers_message("response", {":status": "401"}, modes=modes))
    await stream.send(body_message("response", b"no token", end=True))
    await stream.half_close()
    headers, body = [a async for a in _all(stream)]
    assert headers.WhichOneof("response") == "response_headers"
    assert body.WhichOneof("response") == "response_body"
    streamed = body.response_body.response.body_mutation.streamed_response
    assert streamed.body == (b"no token" if modes.response == Mode.FULL_DUPLEX_STREAMED else b"")


async def test_a_message_that_is_newer_than_our_protos_gets_no_answer() -> None:
    router = harness()
    stream = LocalStream(router.service)
    await stream.send(request_headers())
    await stream.receive()
    await stream._sent.put(type(request_headers()).FromString(b"\xfa\x01\x02\x08\x01"))  # field 31
    await stream.send(body_message("request", chat("Hi"), end=True))
    answer = await stream.receive()
    assert answer
    assert sent_params(answer.request_body.response.body_mutation.body)
    stream.cancel()


async def test_observability_mode_asks_for_no_answers() -> None:
    stream = LocalStream(harness().service)
    message = request_headers()
    message.observability_mode = True
    await stream.send(message)
    await stream.half_close()
    assert await stream.receive() is None


@pytest.mark.parametrize("modes", ALL_MODES, ids=str)
async def test_trailers_after_the_end_of_the_body_are_let_go(modes: Modes) -> None:
    router = harness()
    envoy = router.envoy(modes)
    assert await envoy.request(Request(pieces=[chat("Hi")]))
    stream = envoy._stream
    await stream.send(trailers_message("request"))
    answer = await stream.receive()
    assert answer
    assert answer.WhichOneof("response") == "request_trailers"
    stream.cancel()


async def _all(stream: LocalStream):  # type: ignore[no-untyped-def] # noqa: ANN202
    while (answer := await stream.receive()) is not None:
        yield answer
