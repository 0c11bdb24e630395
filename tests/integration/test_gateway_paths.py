"""What is no turn passes real Envoy and the router untouched, but for a client's own transfer parameters."""

import json
import random

import aiohttp
import pytest
from aiohttp import web

from support.gateway import BODY_MODES, CHAT, Answer, product, scripted
from support.h2 import h2_request
from support.nodes import (
    COLD,
    Seen,
    chat,
    decode_events,
    handle,
    replies,
    sent_params,
    streams,
)

pytestmark = pytest.mark.parametrize("shipped", BODY_MODES)

# What a hop may set anew (RFC 9110, 7.6), and the time.
_OWN = {"date", "connection", "keep-alive", "transfer-encoding", "content-length"}


async def test_what_has_no_body_gets_the_nodes_own_answer(shipped: str) -> None:
    async with product(shipped) as there:
        node = f"http://{there.front.settings.pools.sources['decode'].static[0]}"
        async with aiohttp.ClientSession(node) as session:
            for method, path in [
                *(("GET", p) for p in ("/v1/models", "/health", "/version", "/metrics", "/v1/none?x=%20y")),
                *(("HEAD", p) for p in ("/v1/models", "/health")),
                *(("OPTIONS", p) for p in (CHAT, "/v1/models")),
                ("GET", CHAT),
            ]:
                async with session.request(method, path) as response:
                    headers = {k.lower(): v for k, v in response.headers.items()}
                    direct = Answer(response.status, headers, await response.read())
                through = await there.front.request(method, path)
                assert (through.status, through.body) == (direct.status, direct.body), (method, path)
                for name in direct.headers.keys() - _OWN:
                    assert through.headers[name] == direct.headers[name], (method, path)
        assert not [r for r in there.p[0].requests if r.path != "/health"]
        assert there.front.metric("live_streams") == 0


async def test_an_upload_and_its_answer_pass_byte_for_byte(shipped: str) -> None:
    upload, made = random.Random(3).randbytes(3_000_000), random.Random(4).randbytes(1_000_000)
    body = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\n' + upload + b"\r\n--x--\r\n"
    kind = "multipart/form-data; boundary=x"
    headers = {"content-type": "audio/wav", "x-anything": "1"}
    async with scripted(shipped, replies(made, 201, headers)) as (there, p, d):
        answer = await there.post("/v1/audio/transcriptions?language=de", body, content_type=kind, x_custom="2")
    assert (answer.status, answer.body, answer.headers["x-anything"]) == (201, made, "1")
    (seen,) = d.seen
    assert (seen.body == body, seen.request.raw_path) == (True, "/v1/audio/transcriptions?language=de")
    assert (seen.headers["content-type"], seen.headers["x-custom"]) == (kind, "2")
    assert not p.seen


async def test_a_websocket_speaks_both_ways(shipped: str) -> None:
    async def echo(seen: Seen) -> web.WebSocketResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(seen.request)
        async for message in ws:
            await (
                ws.send_bytes(message.data) if message.type == aiohttp.WSMsgType.BINARY else ws.send_str(message.data)
            )
        return ws

    async with scripted(shipped, echo) as (there, _, d):
        async with there.client.ws_connect("/v1/realtime") as ws:
            for size in (1, 70_000):
                await ws.send_bytes(bytes(size))
                assert await ws.receive_bytes() == bytes(size)
            await ws.send_str('{"kv": "你好"}')
            assert await ws.receive_str() == '{"kv": "你好"}'
        assert d.seen[0].path == "/v1/realtime"


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/messages/count_tokens", "/v1/responses/", "/tokenize", "/v1/chat/completions/"]
)
async def test_json_passes_byte_for_byte_less_transfer_parameters(shipped: str, path: str) -> None:
    body = b'{ "model":"m",  "input" :"\\u4f60\\/ 1.0e2" , "n": 1.00,"kv_transfer_params":{"a":[1]},"x":{"y":null} }'
    made = json.dumps({"object": "response", "kv": "你"}, ensure_ascii=False).encode()
    async with scripted(shipped, replies(made)) as (there, p, d):
        answer = await there.post(path, body)
        assert (answer.status, answer.body) == (200, made)
        assert await there.outcomes(0) == {}
    assert d.seen[0].body == body.replace(b',"kv_transfer_params":{"a":[1]}', b"")
    assert not p.seen


async def test_error_answers_of_the_node_pass_as_they_are(shipped: str) -> None:
    refusal = b'{"error": {"message": "no", "type": "NotFoundError", "param": null, "code": 404}}\n'
    async with scripted(shipped, replies(refusal, 404)) as (there, _, _):
        for path in (CHAT, "/v1/responses", "/v1/embeddings"):
            answer = await there.post(path, chat("Hi", prompt="Hi", input="Hi"))
            assert (answer.status, answer.body) == (404, refusal)


@pytest.mark.parametrize("trailers", [None, {"x-checksum": "7"}], ids=["plain", "trailers"])
class TestHTTP2:
    """With prior knowledge, as other proxies speak it; trailers may end the request."""

    async def test_a_turn(self, shipped: str, trailers: dict[str, str] | None) -> None:
        body = chat("x" * 40_000, stream=True)
        async with scripted(shipped, streams(*decode_events(params=handle()))) as (there, p, d):
            answer = await h2_request(there.tap.address, self._headers(there.tap.address, CHAT), body, trailers)
            assert (answer.status, answer.body) == (200, b"".join(decode_events()))
            assert await there.outcomes(1) == {"first_turn": 1}
        assert sent_params(p.seen[0].body) == COLD
        assert json.loads(d.seen[0].body)["messages"] == json.loads(body)["messages"]

    async def test_an_upload(self, shipped: str, trailers: dict[str, str] | None) -> None:
        body = random.Random(3).randbytes(50_000)
        async with scripted(shipped, replies(body)) as (there, _, d):
            headers = {
                **self._headers(there.tap.address, "/v1/files"),
                "content-type": "multipart/form-data; boundary=x",
            }
            answer = await h2_request(there.tap.address, headers, body, trailers)
        assert (answer.status, answer.body == body, d.seen[0].body == body) == (200, True, True)

    def _headers(self, authority: str, path: str, kind: str = "application/json") -> dict[str, str]:
        pseudo = {":method": "POST", ":scheme": "http", ":path": path, ":authority": authority}
        return {**pseudo, "content-type": kind}
