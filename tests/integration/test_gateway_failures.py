"""Nodes that are down, hang, err or die, and clients that leave: through real Envoy, in both shipped body modes."""

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web

from support.gateway import CHAT, SHIPPED, Answer, client, front, product, scripted, what_comes
from support.harness import tasks
from support.nodes import (
    COLD,
    FakePrefill,
    Handler,
    Seen,
    carried_handle,
    chat,
    closed_port,
    decode_events,
    dies,
    dies_midway,
    handle,
    hangs,
    prefill_body,
    replies,
    sent_params,
    streams,
)

pytestmark = pytest.mark.parametrize("shipped", SHIPPED)

FIRST = chat("Hi", stream=True)
MESSAGE = chat("Hi", max_tokens=9)
NEXT = chat("Hi", "Good morning", "And?", stream=True)
EVENTS = decode_events(params=handle())
SSE = b"".join(decode_events())
PARAMLESS = json.loads(prefill_body())
del PARAMLESS["kv_transfer_params"]
BAD_PREFILL: dict[str, Handler] = {
    "500": replies(b'{"error": {"message": "EngineCore", "code": 500}}', 500),
    "503": replies(b"busy", 503, {"content-type": "text/plain"}),
    "no JSON": replies(b'{"id": "chatcm'),
    "no params": replies(json.dumps(PARAMLESS).encode()),
    "null params": replies(json.dumps({**PARAMLESS, "kv_transfer_params": None}).encode()),
    "closes": dies,
    "closes midway": dies_midway,
    "hangs": hangs,
}


def error_of(answer: Answer) -> tuple[int, str]:
    """Status and type of an error in OpenAI's shape."""
    assert answer.headers["content-type"] == "application/json"
    (error,) = json.loads(answer.body).values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status
    assert error["message"].startswith("kvreturn: ")
    return answer.status, error["type"]


class TestPrefill:
    async def test_that_fails_is_tried_once_more_cold_then_d_works_alone(self, shipped: str) -> None:
        more = {"prefill": {"timeout": 1}, "breaker": {"failures": 1000}}  # all handles are of one engine
        async with scripted(shipped, streams(*EVENTS), **more) as (there, p, d):
            for name, handler in BAD_PREFILL.items():
                p.handler = replies()
                assert (await there.post(CHAT, chat(name, stream=True))).body == SSE
                p.handler = handler
                request = chat(name, "Good morning", "And?", stream=True)
                begun = time.monotonic()
                answer = await there.post(CHAT, request)
                assert (answer.status, answer.body) == (200, SSE)
                assert time.monotonic() - begun < 2
                assert d.seen[-1].body == request
                assert carried_handle(p.seen[-2].body) == handle()
                assert sent_params(p.seen[-1].body) == COLD
            count = len(BAD_PREFILL)
            assert len(p.seen) == 3 * count
            assert await there.outcomes(2 * count) == {"first_turn": count, "prefill_failed": count}

    async def test_that_fails_is_an_error_where_the_policy_says_so(self, shipped: str) -> None:
        policy = {"timeout": 1, "on_failure": "error"}
        async with scripted(shipped, prefill=policy) as (there, p, d):
            for name, handler in BAD_PREFILL.items():
                p.handler = handler
                begun = time.monotonic()
                expected = (504, "GatewayTimeout") if name == "hangs" else (502, "BadGateway")
                assert error_of(await there.post(CHAT, FIRST)) == expected, name
                assert time.monotonic() - begun < 2
        assert not d.seen

    @pytest.mark.parametrize("policy", ["fallback", "error"])
    async def test_that_is_down_is_noticed_at_once(self, shipped: str, policy: str) -> None:
        with closed_port() as nobody:
            async with (
                FakePrefill(streams(*EVENTS)) as d,
                front(shipped, [nobody], [d.address], prefill={"on_failure": policy}) as there,
            ):
                begun = time.monotonic()
                answer = await there.post(CHAT, FIRST)
                assert time.monotonic() - begun < 2
                if policy == "fallback":
                    assert (answer.status, answer.body, d.seen[0].body) == (200, SSE, FIRST)
                else:
                    assert (error_of(answer), d.seen) == ((502, "BadGateway"), [])

    async def test_that_is_down_does_not_matter_beside_another(self, shipped: str) -> None:
        with closed_port() as nobody:
            async with (
                FakePrefill() as p,
                FakePrefill(streams(*EVENTS)) as d,
                front(shipped, [nobody, p.address], [d.address]) as there,
            ):
                for request in (FIRST, NEXT):
                    assert (await there.post(CHAT, request)).body == SSE
                assert await there.outcomes(2) == {"first_turn": 1, "hit": 1}

    async def test_that_refuses_the_request_has_the_last_word(self, shipped: str) -> None:
        refusal = b'{"error":{"message":"no such template","type":"BadRequestError","param":null,"code":400}}'
        kind = "application/json; charset=utf-8"
        async with scripted(shipped, None, replies(refusal, 400, {"content-type": kind})) as (there, p, d):
            answer = await there.post(CHAT, FIRST)
            assert (answer.status, answer.body, answer.headers["content-type"]) == (
                400,
                refusal,
                kind,
            )
            assert await there.outcomes(1) == {"rejected": 1}
        assert (len(p.seen), d.seen) == (1, [])


class TestDecode:
    async def test_that_is_down_is_a_503_in_time(self, shipped: str) -> None:
        with closed_port() as nobody:
            async with FakePrefill() as p, front(shipped, [p.address], [nobody]) as there:
                begun = time.monotonic()
                answer = await there.post(CHAT, FIRST)
                assert time.monotonic() - begun < 2
                assert (answer.status, answer.headers["content-type"]) == (503, "application/json")
                error = json.loads(answer.body)["error"]
                assert (error["code"], error["type"], error["param"]) == (503, "ServiceUnavailableError", None)
                assert error["message"].startswith("kvreturn: a decode node did not answer (UF); try again")
                assert answer.headers["retry-after"] == "1"
                assert "127.0.0.1" not in error["message"]
                await there.outcomes(1)
                anthropic = json.loads((await there.post("/v1/messages", MESSAGE)).body)
                assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "api_error")
                assert len(there.store) == 0

    async def test_that_dies_in_mid_stream_leaves_nothing(self, shipped: str) -> None:
        async def cut_off(seen: Seen) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(seen.request)
            await response.write(b"".join(EVENTS[:2]) + EVENTS[-2][:-200])  # the handle's event up to its middle
            await asyncio.sleep(0.05)
            return await dies(seen)

        async with scripted(shipped, cut_off) as (there, p, d):
            async with there.client.post(CHAT, data=FIRST) as answer:
                assert await what_comes(answer) == (b"".join(EVENTS[:2]), False)
            await there.outcomes(1)
            assert len(there.store) == 0
            assert there.metric("turns_incomplete_total") == 1
            d.handler = streams(*EVENTS)
            assert (await there.post(CHAT, NEXT)).body == SSE
            assert sent_params(p.seen[1].body) == COLD
            assert await there.outcomes(2) == {"first_turn": 1, "not_a_continuation": 1}

    async def test_that_held_the_conversation_is_replaced_and_the_answer_is_right(self, shipped: str) -> None:
        texts = [" ".join(f"line {turn}.{i} of the story." for i in range(40)) for turn in range(2)]
        async with product(shipped, decodes=2) as there, client(there.front.url) as sdk, client(there.oracle) as plain:
            messages: list[Any] = [{"role": "user", "content": texts[0]}]
            request: Any = {"model": "sim", "messages": messages, "max_tokens": 30}
            said = (await sdk.chat.completions.create(**request)).choices[0].message.content
            (holder,) = [node for node in there.d if there.asked(node, CHAT)]
            await holder.stop()
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": texts[1]}]
            body = json.dumps(request).encode()
            answer = await there.front.post(CHAT, body)
            if answer.status == 503:  # the one request that finds it refusing; then Envoy knows
                answer = await there.front.post(CHAT, body)
            expected = (await plain.chat.completions.create(**request)).choices[0].message.content
            assert json.loads(answer.body)["choices"][0]["message"]["content"] == expected


class TestClientsThatLeave:
    async def test_during_the_prefill_leg_take_p_with_them(self, shipped: str) -> None:
        async with scripted(shipped, None, hangs) as (there, p, d):
            before = len(tasks())
            asking = asyncio.create_task(there.post(CHAT, FIRST))
            await asyncio.wait_for(p.arrived.wait(), 5)
            asking.cancel()
            await asyncio.wait_for(p.left.wait(), 1)
            assert await there.outcomes(1) == {"cancelled": 1}
            assert (len(p.seen), d.seen, len(there.store)) == (1, [], 0)
            assert there.metric("live_streams") == 0
            async with asyncio.timeout(2):
                while len(tasks()) > before:  # noqa: ASYNC110 - connections close in their own time
                    await asyncio.sleep(0.01)

    async def test_in_mid_answer_leave_no_handle(self, shipped: str) -> None:
        gone = asyncio.Event()

        async def endless(seen: Seen) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(seen.request)
            try:
                while True:
                    await response.write(EVENTS[1])
                    await asyncio.sleep(0.005)
            finally:
                gone.set()

        async with scripted(shipped, endless) as (there, _, _):
            async with there.client.post(CHAT, data=FIRST) as answer:
                await answer.content.readexactly(len(EVENTS[1]))
                answer.close()
            await asyncio.wait_for(gone.wait(), 1)
            await there.outcomes(1)
            assert len(there.store) == 0
            assert there.metric("live_streams") == 0
