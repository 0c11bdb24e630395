"""What all checks share: the settings, a bounded HTTP client, what is known of the nodes."""

import asyncio
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvreturn.config import Settings
from kvreturn.core.jsontext import JSONTextError, loads
from kvreturn.doctor.flags import Connector, Flags, Side

_BODY_LIMIT = 16 << 20
OK = 200
SILENCE = "no answer within"
"""How the error of whatever does not answer in time begins."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer, or why there is none.

    Attributes:
        status: 0 if there is none.
        headers: names in lower case.
        body: whole.
        error: in words; empty if there was an answer.
        seconds: that it took.
        began: Unix time at which the request was sent.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str = ""
    seconds: float = 0.0
    began: float = 0.0

    def json(self) -> Any:  # noqa: ANN401 - JSON
        """The body as JSON; None if it is none."""
        try:
            return loads(self.body)
        except JSONTextError:
            return None

    @property
    def what(self) -> str:
        """What to tell of an answer that is not the expected one."""
        return self.error or f"HTTP {self.status}: {self.body[:200].decode(errors='replace').strip() or 'no body'}"


@dataclass(slots=True)
class Node:
    """What is known of one running node.

    Attributes:
        address: `host:port`.
        side: which pool it is in.
        models: names that it serves; empty if it does not answer.
        connector: which KV connector it runs; None if that is not known.
        version: vLLM's.
        flags: what is known of its flags.
        skew: seconds that its clock is ahead of ours, None if that is not known.
        skew_error: how exact that is.
    """

    address: str
    side: Side
    models: tuple[str, ...] = ()
    connector: Connector | None = None
    version: str | None = None
    flags: Flags | None = None
    skew: float | None = None
    skew_error: float = 0.0


def pools(settings: Settings) -> dict[Side, list[str]]:
    """The addresses of the nodes, by pool, as far as the settings name them."""
    sources = settings.pools.sources
    return {"prefill": sources["prefill"].listed, "decode": sources["decode"].listed}


@dataclass(slots=True)
class Context:
    """One run.

    Attributes:
        settings: the router's.
        session: for all requests.
        environ: of this process.
        seconds: that one request or one check may take.
        headers: that gateway and nodes get: credentials, for example.
        gateway: base URL of the gateway.
        nodes: known of them so far.
        router_scope: digest of the running router's secret; None if it was not told.
    """

    settings: Settings
    session: aiohttp.ClientSession
    environ: Mapping[str, str]
    seconds: float
    headers: Mapping[str, str]
    gateway: str
    nodes: list[Node] = field(default_factory=list)
    router_scope: str | None = None

    async def get(self, url: str) -> Answer:
        """GET."""
        return await self._request("GET", url, None, {}, self.seconds)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str] | None = None, *, times: int = 1) -> Answer:
        """POST of JSON, which may take so many times as long."""
        named = {"content-type": "application/json", **(headers or {})}
        return await self._request("POST", url, body, named, self.seconds * times)

    async def _request(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], seconds: float
    ) -> Answer:
        began, start = time.time(), time.monotonic()
        try:
            async with (
                asyncio.timeout(seconds),
                self.session.request(
                    method, url, data=body, headers={**self.headers, **headers}, allow_redirects=False
                ) as response,
            ):
                got = await response.content.read(_BODY_LIMIT)
                while not response.content.at_eof() and len(got) < _BODY_LIMIT:
                    got += await response.content.read(_BODY_LIMIT - len(got))
        except TimeoutError:
            return Answer(error=f"{SILENCE} {seconds:g} s", seconds=time.monotonic() - start, began=began)
        except (aiohttp.ClientError, OSError, ValueError) as e:
            return Answer(error=reason(e), seconds=time.monotonic() - start, began=began)
        told = {k.lower(): v for k, v in response.headers.items()}
        return Answer(response.status, told, got, "", time.monotonic() - start, began)

    async def connects(self, host: str, port: int) -> str:
        """Whether somebody accepts TCP connections there: empty if so, else why not."""
        try:
            async with asyncio.timeout(self.seconds):
                _, writer = await asyncio.open_connection(host, port)
        except TimeoutError:
            return f"{SILENCE} {self.seconds:g} s"
        except (OSError, ValueError) as e:
            return reason(e)
        writer.close()
        return ""


def reason(error: BaseException) -> str:
    """Why a connection failed, in a few words."""
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(inner, ConnectionRefusedError):
        return "connection refused"
    if isinstance(inner, socket.gaierror | aiohttp.ClientConnectorDNSError):
        return "the name cannot be resolved"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror.lower()
    return str(inner) or type(inner).__name__
