"""Active health checks: each node is asked every few seconds, and at once when its time out is over."""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import aiohttp

from kvreturn.envoy.names import NODE_HEADER, ONLY_HEADER
from kvreturn.settings.nodes import Health
from kvreturn.upstream.client import ENVOY_LOCAL
from kvreturn.upstream.node import UNSEEN
from kvreturn.upstream.pool import Pool

log = logging.getLogger("kvreturn.pool")
_TICK = 0.2  # seconds between looks at what is due
_JITTER = 0.2  # of the interval, so that several routers do not ask all at once, forever
_OK = 200
_USER_AGENT = "kvreturn/HC"  # Envoy calls its own ones Envoy/HC


class HealthWatch:
    """Checks the nodes of pools. Use as an async context manager.

    A node whose check never went well is left alone: perhaps the router just cannot reach it, as decode nodes need not
    be reachable for it. Its requests then tell.

    Args:
        pools: each with the way to its nodes: Envoy's prefill listener, or None for straight to the node.
        settings: how to check.
        clock: monotonic seconds.

    Attributes:
        settings: as given; others may take their place.
    """

    def __init__(self, pools: Mapping[Pool, str | None], settings: Health, clock: Callable[[], float]) -> None:
        self._pools = pools
        self.settings = settings
        self._clock = clock
        self._due: dict[tuple[Pool, str], float] = {}
        self._running: dict[tuple[Pool, str], asyncio.Task[None]] = {}
        self._failures: dict[tuple[Pool, str], int] = {}
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin."""
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            # A kept one may be closed by the node at just that moment, which would look like a failure.
            headers={"user-agent": _USER_AGENT},
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._loop = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        tasks = [*self._running.values(), *([self._loop] if self._loop else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session:
            await self._session.close()

    async def _run(self) -> None:
        while True:
            now = self._clock()
            wanted = {(pool, address): state for pool in self._pools for address, state in pool.states().items()}
            for gone in self._due.keys() - wanted.keys():
                self._due.pop(gone)
                self._failures.pop(gone, None)
            for key, state in wanted.items():
                if key not in self._running and (state == "probing" or self._due.get(key, now) <= now):
                    self._due[key] = now + self.settings.interval * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret
                    task = self._running[key] = asyncio.create_task(self._check(*key))
                    task.add_done_callback(lambda _, key=key: self._running.pop(key))  # type: ignore[misc]
            await asyncio.sleep(_TICK)

    async def _check(self, pool: Pool, address: str) -> None:
        through, key = self._pools[pool], (pool, address)
        try:
            why = await self._ask(address, through)
        except aiohttp.ClientConnectorError as e:
            if through:
                return  # Envoy cannot be reached, which is not the node's fault
            why = e.strerror or str(e)
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            why = str(e) or type(e).__name__
        pool.checked(address, well=why is None)
        self._failures[key] = 0 if why is None else self._failures.get(key, 0) + 1
        if self._failures[key] == UNSEEN and not pool.known(address):
            log.warning(
                "no health check of %s node %s has gone well yet (%s): it does not run, or the router cannot reach its "
                "%s; until one does, only requests tell whether it is well",
                pool.kind,
                address,
                why,
                self.settings.path,
            )

    async def _ask(self, address: str, through: str | None) -> str | None:
        """Ask once. Returns what is wrong, if anything is."""
        assert self._session
        headers = {NODE_HEADER: address, ONLY_HEADER: "1"} if through else {}
        within = aiohttp.ClientTimeout(total=self.settings.timeout)
        url = f"http://{through or address}{self.settings.path}"
        async with self._session.get(url, headers=headers, timeout=within, allow_redirects=False) as response:
            if response.status == _OK:
                return None
            text = await response.content.read(256) if through else b""
            return "Envoy cannot reach it" if text.startswith(ENVOY_LOCAL) else f"it answers {response.status}"
