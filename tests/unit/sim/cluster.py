"""A prefill node, a decode node and a plain node as oracle, driven by hand as a router would drive them."""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvreturn.sim import ManualClock, SimNode

Json = dict[str, Any]
COLD: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Cluster:
    p: SimNode
    d: SimNode
    oracle: SimNode
    clock: ManualClock
    session: aiohttp.ClientSession
    urls: dict[int, str] = field(default_factory=dict)

    async def post(self, node: SimNode, path: str, body: object, **headers: str) -> tuple[int, Json]:
        async with self.session.post(self.urls[id(node)] + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def get(self, node: SimNode, path: str) -> tuple[int, str]:
        async with self.session.get(self.urls[id(node)] + path) as answer:
            return answer.status, await answer.text()

    async def stream(self, node: SimNode, path: str, body: Json) -> list[str]:
        async with self.session.post(self.urls[id(node)] + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            text = await answer.text()
        assert text.endswith("\n\n")
        return [line.removeprefix("data: ") for line in text[:-2].split("\n\n")]

    async def open_stream(self, node: SimNode, path: str, body: Json) -> aiohttp.ClientResponse:
        """A stream after its first chunk; `close()` is the client that leaves."""
        answer = await self.session.post(self.urls[id(node)] + path, json={**body, "stream": True})
        try:
            assert (await answer.content.readuntil(b"\n\n")).startswith(b"data: {")
        except BaseException:
            answer.close()
            raise
        return answer

    async def prefill(self, path: str, body: Json, handle: Json | None = None, **changes: object) -> tuple[int, Json]:
        """The P leg; `changes` tamper with the handle."""
        params = COLD if handle is None else {**handle, "do_remote_decode": True, "do_remote_prefill": False}
        leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {**params, **changes}}
        return await self.post(self.p, path, {k: v for k, v in leg.items() if k not in ("stream_options", "n")})

    async def turn(self, path: str, body: Json, handle: Json | None = None, **changes: object) -> tuple[Json, Json]:
        """Both legs; P's and D's answers."""
        status, at_p = await self.prefill(path, body, handle, **changes)
        assert status == 200, at_p
        status, at_d = await self.post(self.d, path, {**body, "kv_transfer_params": at_p["kv_transfer_params"]})
        assert status == 200, at_d
        return at_p, at_d

    async def expected(self, path: str, body: Json) -> Json:
        status, answer = await self.post(self.oracle, path, body)
        assert status == 200, answer
        return answer

    async def elapsed(self, work: Coroutine[Any, Any, tuple[int, Json]], seconds: float) -> tuple[int, Json]:
        """The result of `work`, which must take just `seconds` of the clock."""
        sleeping = self.clock.sleeping  # holds wait for their deadlines
        task = asyncio.create_task(work)
        early = seconds * 0.999
        await self.until(lambda: self.clock.sleeping > sleeping)
        await self.clock.advance(early)
        await asyncio.sleep(0.02)  # let sockets deliver
        assert not task.done(), f"done before {early} s"
        await self.clock.advance(seconds - early + 1e-6)
        return await asyncio.wait_for(task, 2)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(2):
            while not condition():  # noqa: ASYNC110 - nodes have no events for tests
                await asyncio.sleep(0.001)


Make = Callable[..., Coroutine[Any, Any, Cluster]]


def ids(seed: int, count: int) -> list[int]:
    """A prompt of ordinary tokens."""
    source = random.Random(seed)
    return [source.randrange(288, 1_900) for _ in range(count)]


def generate(prompt: list[int], count: int = 24, **more: object) -> Json:
    """A completions request whose answer has exactly `count` tokens."""
    return {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True, **more}


def tokens(answer: Json, choice: int = 0) -> list[int]:
    found: list[int] = answer["choices"][choice]["token_ids"]
    return found


def chunks(events: list[str]) -> list[Json]:
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
