"""How pressed the nodes are, read from their own `/metrics` every few seconds."""

import asyncio
import contextlib
import logging
import math
import random
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

import aiohttp

from kvreturn.core.address import is_ip, split_address, split_seat
from kvreturn.core.choice import Pressure
from kvreturn.envoy.names import NODE_HEADER, UPSTREAM_HEADER

log = logging.getLogger("kvreturn")
_BODY_LIMIT = 4 << 20  # vLLM's is some 100 kB, more with many engines
_TIMEOUT = 1.0  # seconds for one look
_STALE = 3  # intervals
_ADDRESSES = 1024  # that are remembered: those behind a name come and go
_Way = tuple[str, str | None]  # a node, and through what it is asked
_JITTER = 0.2  # of the interval, so that several routers do not ask all at once, forever


class MetricsError(Exception):
    """A node's metrics cannot be had; the message says why."""


class PressureWatch:
    """Asks all nodes, each in its own time. Use as an async context manager; only if a model is on `return: auto`.

    Prefill nodes are asked the way prefill legs go. Decode nodes are asked directly: through Envoy the router does not
    reach them.

    Args:
        prefill: `host:port` of each prefill node.
        decode: `host:port` of each decode node.
        through: address of Envoy's prefill listener; None to connect to prefill nodes directly.
        clock: monotonic seconds.
        interval: seconds between two looks at a node.

    Attributes:
        told: takes every node's news: its address and its state.
    """

    def __init__(
        self,
        prefill: Iterable[str],
        decode: Iterable[str],
        through: str | None,
        *,
        clock: Callable[[], float],
        interval: float = 2.0,
    ) -> None:
        self._through = through
        self._ways: set[_Way] = set()
        self._clock = clock
        self._interval = interval
        self._seen: dict[str, tuple[float, Pressure]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[_Way, asyncio.Task[None]] = {}
        self.watch(prefill, decode)
        self.told: Callable[[str, Pressure], None] = lambda _node, _pressure: None

    async def __aenter__(self) -> Self:
        """Begin."""
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),  # what one client's answer sets is not for another's request
            # A kept one may be closed by the node at just that moment (uvicorn's timeout_keep_alive is 5 s).
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT),
            headers={"accept-encoding": "identity"},  # the node has better things to do than to compress
        )
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._session:
            await self._session.close()

    def watch(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        """These are the nodes from now on."""
        self._ways = {*((node, self._through) for node in prefill), *((node, None) for node in decode)}
        for way in self._tasks.keys() - self._ways:
            self._tasks.pop(way).cancel()
        if self._session:
            self._begin()

    def _begin(self) -> None:
        for way in self._ways - self._tasks.keys():
            self._tasks[way] = asyncio.create_task(self._watch(*way))

    def of(self, node: str | None) -> Pressure | None:
        """The state of a node, by its address in the pool or the one that Envoy tells. None if not known, or stale."""
        when, pressure = self._seen.get(split_seat(node or "")[0], (float("-inf"), None))
        return pressure if self._clock() - when <= _STALE * self._interval else None

    async def _watch(self, node: str, through: str | None) -> None:
        failures, said = 0, False
        while True:
            try:
                await self._look(node, through)
                failures = 0
            except Exception as e:  # noqa: BLE001 - whatever it was, the next look may do better
                failures += 1
                if failures >= _STALE and not said:  # nodes may start later than the router
                    said = True
                    log.warning(
                        "return: auto goes without the metrics of node %s (%s); let the router reach its /metrics",
                        node,
                        str(e) or type(e).__name__,
                    )
            await asyncio.sleep(self._interval * random.uniform(1 - _JITTER, 1 + _JITTER))  # noqa: S311 - no secret

    async def _look(self, node: str, through: str | None) -> None:
        """Ask once."""
        if through:
            self._note(*await self._get(through, {NODE_HEADER: node}))
            return
        host, port = split_address(node)
        addresses = [node] if is_ip(host) else await _resolve(host, port)
        failed: list[Exception] = []
        for address in addresses:
            try:
                _, pressure = await self._get(address, {})
            except (MetricsError, aiohttp.ClientError, OSError, TimeoutError) as e:
                failed.append(e)
                continue
            self._note(address, pressure)
            self._note(node, pressure)
        if len(failed) == len(addresses):
            raise failed[0]

    def _note(self, address: str, pressure: Pressure) -> None:
        self._seen.pop(address, None)
        self._seen[address] = self._clock(), pressure  # in the order of their latest news
        if len(self._seen) > _ADDRESSES:
            self._seen.pop(next(iter(self._seen)))
        self.told(address, pressure)

    async def _get(self, address: str, headers: dict[str, str]) -> tuple[str, Pressure]:
        """Ask at an address. Returns who has answered, if Envoy tells, and the answer."""
        assert self._session
        async with self._session.get(f"http://{address}/metrics", headers=headers, allow_redirects=False) as response:
            if response.status != 200:  # noqa: PLR2004
                raise MetricsError(f"/metrics answers {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _BODY_LIMIT:
                    raise MetricsError("/metrics is longer than 4 MiB")
            return response.headers.get(UPSTREAM_HEADER, address), read_pressure(bytes(body))


async def _resolve(host: str, port: int) -> list[str]:
    """The `ip:port` of all machines behind a name, as Envoy (STRICT_DNS) has them and tells them."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [f"[{info[4][0]}]:{port}" if info[0] == socket.AF_INET6 else f"{info[4][0]}:{port}" for info in found]


def read_pressure(text: bytes) -> Pressure:
    """Read what vLLM 0.32.0 and our connector tell, from the Prometheus text format.

    Of a node with several engines (data parallel) the requests are added up. It is as full as its fullest engine: a
    request cannot move to another one.

    Raises:
        MetricsError: vLLM's gauges are not there.
    """
    usage = [value for _, value in _samples(text, b"vllm:kv_cache_usage_perc")]
    waiting = [value for _, value in _samples(text, b"vllm:num_requests_waiting")]
    running = [value for _, value in _samples(text, b"vllm:num_requests_running")]
    if not (usage and waiting and running):
        raise MetricsError("/metrics has no vllm:kv_cache_usage_perc; does vLLM run with --disable-log-stats?")
    # Requests that wait for a transfer ("deferred") are no sign of pressure, and on D nearly every one does.
    by_reason = _samples(text, b"vllm:num_requests_waiting_by_reason")
    capacity = [value for labels, value in by_reason if b'reason="capacity"' in labels]
    pinned = [value for _, value in _samples(text, b"vllm:kvreturn_pinned_blocks")]
    sizes = [
        int(found[1])
        for labels, _ in _samples(text, b"vllm:cache_config_info")
        if (found := re.search(rb'num_gpu_blocks="(\d+)"', labels))
    ]
    share = max(pinned) / min(sizes) if pinned and sizes and min(sizes) else None
    return Pressure(max(usage), int(sum(capacity or waiting)), int(sum(running)), share)


def _samples(text: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Labels and values of the samples of this name. Most of the text is histograms, so it is not read line by line."""
    line = re.compile(re.escape(name) + rb"(?:\{(.*)\})? +(\S+)")
    at = text.find(name)
    while at >= 0:
        if (at == 0 or text[at - 1 : at] == b"\n") and (found := line.match(text, at)):
            with contextlib.suppress(ValueError):
                if math.isfinite(value := float(found[2])):
                    yield found[1] or b"", value
        at = text.find(name, at + len(name))
