"""One exchange: the harness as Envoy, between a client, the router and D."""

import asyncio
import json
import random
from dataclasses import dataclass

import aiohttp

from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from kvreturn.core.handle import PARAMS
from property.client import Asked
from property.cluster import Cluster
from property.verdict import Told
from support.contract import Passed
from support.cuts import randomly
from support.extproc import ALL_MODES, Envoy, Modes, Request, Response
from support.messages import body_message, headers_message
from support.streams import LocalStream

JSON = {"content-type": "application/json"}
_PIECES = (1_000_000, 20_000, 3_000, 700, 150, 60)  # mean bytes of what a node's response comes in
_LEASE = 30.0  # seconds; vLLM's `kv_lease_duration`


class HeldStream(LocalStream):
    """A stream on which a message can be held up."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._watch, self._name, self._begun = cluster.watch, name, False
        super().__init__(cluster.router.service)

    async def send(self, message: pb.ProcessingRequest) -> None:
        await self._watch.at("send", self._name)
        self._watch.exchanges += not self._begun
        self._begun = True
        await super().send(message)


class BreakingEnvoy(Envoy):
    """An exchange in which node and client may go away."""

    def __init__(self, stream: LocalStream, modes: Modes) -> None:
        super().__init__(stream, modes)
        self.stream = stream

    async def respond_in_part(self, response: Response) -> None:
        """The response begins, and does not end."""
        side = self._sides["response"]
        headers = {":status": str(response.status), **response.headers}
        side.headers_sent(headers, end=False)
        await self._give(headers_message("response", headers, node=response.node))
        await self._until(lambda: not side.headers_due)
        for data in response.pieces:
            side.body_sent(data, end=False)
            await self._give(body_message("response", data))
        await self._until(lambda: side.settled)

    async def reset(self) -> None:
        """Envoy ends the stream, since there is nobody left to answer."""
        self.stream.cancel()
        await asyncio.gather(self.stream.task, return_exceptions=True)


@dataclass(frozen=True)
class _Answer:
    """D's: no status if the connection broke before there was one."""

    status: int = 0
    kind: str = ""
    body: bytes = b""
    whole: bool = False


class GivenUpError(Exception):
    """D's leg would have begun after P's lease.

    P has given its blocks up by then, and in vLLM 0.32.0 D does not see that. Envoy is not that slow.
    """


async def exchange(cluster: Cluster, name: str, asked: Asked, cut: int = 0) -> Told | None:
    """Have a request answered.

    Args:
        cluster: by whom.
        name: of the turn.
        asked: the request.
        cut: how finely D's response is cut.

    Returns:
        What the client got; None if its connection broke before it got anything.

    Raises:
        GivenUpError: see there.
    """
    cluster.watch.turn.set(name)
    rng = random.Random(cut)
    envoy = BreakingEnvoy(HeldStream(cluster, name), ALL_MODES[cluster.setup.modes])
    try:
        request = Request(asked.path, randomly(rng, asked.body, 2_000), headers={**JSON, **asked.headers})
        if await envoy.request(request):
            answer = await _decode(cluster, name, asked, envoy.upstream)
            if answer.status:
                pieces = randomly(rng, answer.body, _PIECES[cut]) or [b""]
                response = Response(pieces, answer.status, {"content-type": answer.kind}, node=cluster.d.address)
                await (envoy.respond(response) if answer.whole else envoy.respond_in_part(response))
        await (envoy.finish() if envoy.client.ended else envoy.reset())
    except BaseException:
        await envoy.reset()
        raise
    assert not envoy.failed, f"the router failed: {envoy.failed}"
    client = envoy.client
    _check_headers(cluster, client)
    return Told(client.status, client.body, asked.stream, client.ended) if client.headers else None


async def _decode(cluster: Cluster, name: str, asked: Asked, upstream: Passed) -> _Answer:
    """D's leg."""
    assert upstream.node == cluster.d.address
    _check_forwarded(asked, upstream.body)
    begun = cluster.clock.now()
    await cluster.watch.at("between", name)
    if cluster.clock.now() - begun >= _LEASE:
        raise GivenUpError
    answer = await _ask(cluster, asked.path, upstream)
    cluster.watch.events += 1
    return answer


async def _ask(cluster: Cluster, path: str, passed: Passed) -> _Answer:
    headers = {name: value for name, value in (passed.headers or {}).items() if not name.startswith(":")}
    answer, data = _Answer(), bytearray()
    try:
        async with cluster.session.post(cluster.url(cluster.d, path), data=passed.body, headers=headers) as response:
            answer = _Answer(response.status, response.headers["content-type"])
            async for chunk in response.content.iter_any():
                data += chunk
    except aiohttp.ClientError:
        return _Answer(answer.status, answer.kind, bytes(data))
    return _Answer(answer.status, answer.kind, bytes(data), whole=True)


def _check_forwarded(asked: Asked, body: bytes) -> None:
    """D gets what the client sent, and at most transfer parameters of ours, and the wish for token ids."""
    forwarded, plain = json.loads(body), json.loads(asked.plain)
    forwarded.pop(PARAMS, None)
    if "return_token_ids" not in plain:
        forwarded.pop("return_token_ids", None)
    assert forwarded == plain, f"{forwarded} was made of {asked.body!r}"


def _check_headers(cluster: Cluster, client: Passed) -> None:
    """Nothing of ours is in what the client gets."""
    for header in (client.headers or {}).items():
        assert not any(secret in text for text in header for secret in ("kvreturn", cluster.d.address)), header
