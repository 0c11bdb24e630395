"""The prefill leg's HTTP client: through Envoy's loopback listener, or straight to the node."""

import asyncio
import io
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import aiohttp

from kvreturn.core.address import RANK_HEADER, split_seat
from kvreturn.core.ports import Ask, Failure, Reply
from kvreturn.envoy.names import NODE_HEADER, ONLY_HEADER, UPSTREAM_HEADER
from kvreturn.upstream.pool import Pool

_TOLD = ("retry-after", "www-authenticate")  # what a refusal of the node tells the client besides its body
_FIRST_SHARE = 0.5  # of the time for the leg: what is left is for the cold retry
_CONNECT = 2.0  # seconds for the TCP handshake
_BODY_LIMIT = 64 << 20
_IN_ONE_PIECE = 1 << 20  # larger request bodies are written bit by bit, so that other streams get their turn
_OK, _FAILURE = 200, 500
_EVENT_END = b"\n\n"
# vLLM's server drops idle connections after 5 s (uvicorn's timeout_keep_alive): let go of ours before.
_KEEPALIVE = 4.0
# How Envoy says that it could not reach the node (access log flags UF, UH, URX): no answer of the node's own.
ENVOY_LOCAL = (b"upstream connect error", b"no healthy upstream")


class PrefillClient:
    """Sends requests to prefill nodes. Use as an async context manager.

    Args:
        pool: the prefill nodes.
        through: address of Envoy's prefill listener; None to connect to the nodes directly.
    """

    def __init__(self, pool: Pool, through: str | None) -> None:
        self._pool = pool
        self._through = through
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the connection pool."""
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),  # what one client's answer sets is not for another's request
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT),
            auto_decompress=True,
            raise_for_status=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        if self._session:
            await self._session.close()

    async def ask(self, ask: Ask, headers: Mapping[str, str], seconds: float) -> Reply:
        """Send a request.

        Args:
            ask: what to send.
            headers: to send with it.
            seconds: how long the whole leg may still take; another try keeps half of it unless `ask.last`.

        Returns:
            The answer. Failures to get one are answers too; only cancellation is raised, and closes the connection,
            which makes vLLM abort the request.
        """
        node = ask.prefer if ask.only else self._pool.choose(ask.prefer, ask.avoid, ask.slack)
        if node is None:
            return Reply(None, failure=Failure.CONNECT)
        self._pool.started(node, ask.tokens)
        try:
            share = seconds if ask.last else seconds * _FIRST_SHARE
            async with asyncio.timeout(share if ask.within is None else min(share, ask.within)):
                reply = await self._post(node, ask, headers)
        except aiohttp.ConnectionTimeoutError:
            self._missed(node, ask)
            return Reply(node, failure=Failure.CONNECT)
        except TimeoutError:
            # Without outstanding tokens a node that hangs would look like the idlest one, turn after turn.
            self._missed(node, ask)
            return Reply(node, failure=Failure.TIMEOUT)
        except (aiohttp.ClientError, OSError) as e:
            if not (self._through and isinstance(e, aiohttp.ClientConnectorError)):  # else it is Envoy that is away
                self._missed(node, ask)
            return Reply(node, failure=Failure.CONNECT)
        finally:
            self._pool.finished(node, ask.tokens)
        if self._through and reply.status == 503 and reply.body.startswith(ENVOY_LOCAL):  # noqa: PLR2004
            self._missed(node, ask)
            return Reply(node, failure=Failure.CONNECT)
        # A refusal is as good an answer as any. Envoy may have chosen another node, and tells which; but by its
        # address, by which a pool of names does not know it.
        answered = reply.node if reply.node and self._pool.has(reply.node) else node
        (self._pool.failed if reply.status >= _FAILURE else self._pool.reachable)(answered)
        return reply

    def _missed(self, node: str, ask: Ask) -> None:
        """The node did not answer. What goes on behind the turns (`only`) does not take it from them."""
        if not ask.only:
            self._pool.unreachable(node)

    async def _post(self, node: str, ask: Ask, headers: Mapping[str, str]) -> Reply:
        assert self._session
        send = {**headers, "content-type": "application/json"}
        address, rank = split_seat(node)
        if rank is not None:
            send[RANK_HEADER] = str(rank)
        if self._through:
            send[NODE_HEADER] = address
            if ask.only:
                send[ONLY_HEADER] = "1"
        url = f"http://{self._through or address}{ask.path}"
        data = io.BytesIO(ask.body) if len(ask.body) > _IN_ONE_PIECE else ask.body
        async with self._session.post(url, data=data, headers=send, allow_redirects=False) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if ask.first and response.status == _OK and _EVENT_END in body:
                    response.close()
                    break
                if len(body) > _BODY_LIMIT:
                    raise aiohttp.ClientPayloadError("answer of a prefill node is over 64 MiB")
            # Envoy may have chosen another node than the one we asked for, if that one is down.
            upstream = response.headers.get(UPSTREAM_HEADER, address) if self._through else address
            content_type = response.headers.get("content-type", "application/octet-stream")
            told = {h: response.headers[h] for h in _TOLD if h in response.headers}
            return Reply(self._pool.seat(upstream, rank), response.status, bytes(body), content_type, headers=told)
