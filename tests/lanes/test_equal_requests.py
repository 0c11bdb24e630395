"""Both lanes send nodes the same requests, and refuse the same: one by ext_proc's messages, the other by its script."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from kvreturn.core.ports import Refuse
from kvreturn.server.called import read_head, reply
from support.asked import Asked
from support.extproc import Envoy, Mode, Modes, Request
from support.harness import Harness, settings
from support.lanes import ours
from support.nodes import chat

JSON = {"content-type": "application/json"}
FORM = {"content-type": "application/x-www-form-urlencoded"}
PARAMS = b'"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil.example"}'
# Headers that are other ones each time, or Envoy's own business.
_APART = {"x-request-id", "traceparent", "content-length", "transfer-encoding"}
_LIMITS = {"limits": {"request_bytes": 2000, "header_bytes": 1024}}
Sent = tuple[list[tuple[str, str]], bytes, str | None]
Refused = tuple[int, dict[str, str], bytes]

MESSAGES = b'{"model":"m","max_tokens":9,"stream":true,"messages":[{"role":"user","content":"Hi"}]}'
RESPONSES = b'{"model":"m","input":"Hi","store":false}'
CASES: dict[str, tuple[Request, dict[str, Any]]] = {
    "a chat": (Request(pieces=[chat("Hi", stream=True)]), {}),
    "in pieces": (Request(pieces=[chat("Hi")[:9], chat("Hi")[9:], b""]), {}),
    "a completion": (Request("/v1/completions", [b'{"model":"m","prompt":"Hi"}']), {}),
    "a message": (Request("/v1/messages?beta=true", [MESSAGES]), {}),
    "a response": (Request("/v1/responses", [RESPONSES]), {}),
    "a response that goes on": (Request("/v1/responses", [RESPONSES[:-1] + b',"previous_response_id":"resp_1"}']), {}),
    "in disguise": (Request("/v1/%63hat/completions", [chat("Hi")], headers={"content-type": "text/plain"}), {}),
    "with parameters": (Request(pieces=[chat("Hi")[:-1] + b"," + PARAMS + b"}"]), {}),
    "with hidden ones": (Request(pieces=[chat("Hi")[:-1] + b',"vllm_xargs":{' + PARAMS + b',"a":1}}']), {}),
    "with escaped ones": (Request(pieces=[chat("Hi")[:-1] + b',"\\u006bv_transfer_params":{}}']), {}),
    "for a tenant": (Request(pieces=[chat("Hi")], headers=JSON | {"x-t": "a"}), {"tenant_header": "x-t"}),
    "for nobody": (Request(pieces=[chat("Hi")]), {"tenant_header": "x-t"}),
    "for nobody, as a message": (Request("/v1/messages", [MESSAGES]), {"tenant_header": "x-t"}),
    "steered": (Request(pieces=[chat("Hi")], headers=JSON | {"x-kvreturn-turn": "a", "x-prefiller-url": "b"}), {}),
    "to a rank": (
        Request(pieces=[chat("Hi")], headers=JSON | {"x-data-parallel-rank": "1"}),
        {"pools": {"prefill": ["10.0.0.1:8100"], "decode": {"static": ["10.0.0.2:8200"], "ranks": 2}}},
    ),
    "that may be compressed": (Request(pieces=[chat("Hi")], headers=JSON | {"accept-encoding": "gzip"}), {}),
    "that is compressed": (Request(pieces=[b"\x1f\x8b"], headers=JSON | {"content-encoding": "gzip"}), {}),
    "with bytes in its headers": (Request(pieces=[chat("Hi")], headers=JSON | {"x-name": "\xc3\xa9\xff"}), {}),
    "with an id": (Request(pieces=[chat("Hi")], headers=JSON | {"x-request-id": "mine"}), {}),
    "no JSON": (Request(pieces=[b"{"]), {}),
    "no UTF-8": (Request(pieces=[b'{"model":"\xff"}']), {}),
    "an empty body": (Request(pieces=[b""]), {}),
    "no body": (Request(), {}),
    "too large": (Request(pieces=[chat("x" * 2000)]), _LIMITS),
    "large headers": (Request(pieces=[chat("Hi")], headers=JSON | {"x-a": "x" * 1000}), _LIMITS),
    "embeddings": (Request("/v1/embeddings", [b'{"input":"Hi"}'], headers=JSON | {"target-pod": "a"}), {}),
    "embeddings with parameters": (Request("/v1/embeddings", [b'{"input":"Hi",' + PARAMS + b"}"]), {}),
    "a form": (Request("/v1/audio/translations", [b"a=1&b=2"], headers=FORM), {}),
    "a form with parameters": (Request("/v1/audio/translations", [b"a=kv_transfer%5fparams"], headers=FORM), {}),
    "a text": (Request("/v1/files", [b"{", PARAMS], headers={"content-type": "text/plain", "target-pod": "a"}), {}),
    "a compressed text": (
        Request("/v1/files", [b"a"], headers={"content-type": "text/plain", "content-encoding": "br"}),
        {},
    ),
    "a stored response": (Request("/v1/responses/resp_1", method="GET", headers={"accept-encoding": "br"}), {}),
    "the end of one": (Request("/v1/responses/resp_1/cancel", [b"x"], headers={"content-type": "text/plain"}), {}),
}


def compared(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those that both lanes must agree on."""
    return sorted(field for field in headers if field[0] not in _APART)


def router(lane: str, changes: dict[str, Any]) -> Harness:
    return Harness(settings(envoy={"lane": lane}, **changes))


async def portable(request: Request, changes: dict[str, Any]) -> tuple[Sent | Refused, list[bytes]]:
    """What becomes of a request, and what P was asked."""
    there = router("portable", changes)
    envoy: Envoy = there.envoy(Modes(request=Mode.BUFFERED, response=Mode.STREAMED))
    went = await envoy.request(request)
    await envoy.finish()
    asked = [a.body for a in there.asks]
    if went:
        passed = envoy.upstream
        return (compared([*(passed.headers or {}).items()]), passed.body, passed.node), asked
    headers = dict(envoy.client.headers or {})
    return (int(headers.pop(":status")), headers, envoy.client.body), asked


async def fast(request: Request, changes: dict[str, Any]) -> tuple[Sent | Refused, list[bytes]]:
    """The same through the script, and the router that it calls."""
    there = router("fast", changes)
    fields = [(":method", request.method), (":path", request.path), (":scheme", "http"), (":authority", "llm.example")]
    fields += request.headers.items()
    body = request.pieces or None
    (call,) = Asked(fields, body).calls
    _, kind, head = call.headers["x-kvreturn-head"].split(" ")
    exchange = there.service.fast.exchange()
    told = await exchange.request(read_head(base64.b64decode(head)), call.body if kind == "whole" else None)
    exchange.finish()
    asked = Asked(fields, body, lambda _: ours(reply(told, call.body)))
    assert asked.errors == []
    assert (asked.response is not None) == isinstance(told, Refuse)
    if asked.response:
        return asked.response, [a.body for a in there.asks]
    node = asked.exchange.override[0] if asked.exchange.override else None
    return (compared(asked.sent), asked.passed, node), [a.body for a in there.asks]


@pytest.mark.parametrize(("request_", "changes"), CASES.values(), ids=CASES)
async def test_requests_become_the_same_in_both_lanes(request_: Request, changes: dict[str, Any]) -> None:
    assert await fast(request_, changes) == await portable(request_, changes)


_FRAGMENTS = [
    *(
        b'{"model":"m"',
        b',"messages":[{"role":"user","content":"Hi"}]',
        b',"prompt":"Hi"',
        b',"input":"Hi"',
        b"}",
        b"{",
    ),
    *(
        b"," + PARAMS,
        b',"vllm_xargs":{' + PARAMS + b"}",
        b',"a":"' + b"x" * 90 + b'"',
        b" ",
        b"\n\n",
        b',"cache_salt":"c"',
    ),
    *(
        b',"\\u006bv_transfer_params":1',
        b'"extra_body":',
        b"null",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b"\xff",
        b"\xc3\xa9",
    ),
]


@how(max_examples=25)
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/responses", "/v1/embeddings"]),
    body=st.lists(st.sampled_from(_FRAGMENTS), max_size=8).map(b"".join),
)
def test_whatever_the_body_is_both_lanes_make_the_same_of_it(path: str, body: bytes) -> None:
    async def both() -> None:
        for text in (body, b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"input":"Hi"' + body + b"}"):
            await test_requests_become_the_same_in_both_lanes(Request(path, [text]), {})

    asyncio.run(both())
