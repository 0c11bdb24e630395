"""The way from an agent to the nodes: the router's own service, with a few lines in place of Envoy."""

import asyncio
import json
import math

import aiohttp

from closed_loop.agents import TOOLS, Message, Turn
from kvreturn.server.service import ExternalProcessor
from property.verdict import Told
from support.extproc import Envoy, Modes, Request
from support.messages import body_message, headers_message
from support.streams import LocalStream

_PATH = "/v1/chat/completions"


class _Envoy(Envoy):
    """Passes on an answer while it comes; the router may take as long as it likes before that."""

    silence = math.inf

    async def relay(self, response: aiohttp.ClientResponse, node: str) -> float:
        """Take a node's response to the client. Returns at which of the loop's time its first byte was there.

        What follows the first piece goes on in one: its time of arrival is of no interest, and most of the work.
        """
        side = self._sides["response"]
        headers = {":status": str(response.status), "content-type": response.headers["content-type"]}
        side.headers_sent(headers, end=False)
        await self._give(headers_message("response", headers, node=node))
        await self._until(lambda: not side.headers_due)
        await self._body(await response.content.readany(), end=False)
        first = asyncio.get_running_loop().time()
        await self._body(await response.read(), end=True)
        return first

    async def _body(self, data: bytes, *, end: bool) -> None:
        side = self._sides["response"]
        side.body_sent(data, end=end)
        await self._give(body_message("response", data, end=end))
        await self._until(lambda: side.settled)


class Gateway:
    """Answers agents.

    Args:
        service: the router's.
        session: to the decode node.
        decode: `host:port` of it.
    """

    def __init__(self, service: ExternalProcessor, session: aiohttp.ClientSession, decode: str) -> None:
        self._service = service
        self._session = session
        self._decode = decode

    async def ask(self, agent: int, messages: list[Message], **members: object) -> Turn:
        """One turn, see `closed_loop.agents.Ask`; `members` are further ones of the request."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"model": "sim", "messages": messages, "tools": TOOLS, **options, **members}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer agent-{agent}"}
        stream = LocalStream(self._service)
        envoy, first = _Envoy(stream, Modes()), None
        try:
            if await envoy.request(Request(_PATH, [body], headers=headers)):
                up = {k: v for k, v in (envoy.upstream.headers or {}).items() if not k.startswith(":")}
                url = f"http://{self._decode}{_PATH}"
                async with self._session.post(url, data=envoy.upstream.body, headers=up) as response:
                    first = await envoy.relay(response, self._decode)
            await envoy.finish()
        except asyncio.CancelledError:
            stream.cancel()
            await asyncio.gather(stream.task, return_exceptions=True)
            raise
        told = Told(envoy.client.status, envoy.client.body, stream=True, whole=envoy.client.ended)
        message = told.answer(0).message if told.complete else None
        failure = "" if message else str(told.status) if told.status != 200 else "incomplete"  # noqa: PLR2004
        usages = [o["usage"] for o in told.objects if o.get("usage")] if message else []
        tokens = (usages[-1]["prompt_tokens"], usages[-1]["completion_tokens"]) if usages else (0, 0)
        return Turn(asked, (loop.time() if first is None else first) - asked, loop.time(), message, failure, tokens)
