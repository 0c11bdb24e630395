"""Who is in the pools, where that is asked for: host names, and Kubernetes EndpointSlices."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from kvreturn.config import Settings
from kvreturn.core.address import is_ip, split_address
from kvreturn.settings.pools import Source
from kvreturn.telemetry.nodes import NodeMetrics
from kvreturn.upstream.members import Members
from kvreturn.upstream.pool import Pool
from kvreturn.upstream.slices import SliceWatch

Resolve = Callable[[str, int], Awaitable[list[str]]]
_FIRST = 5.0  # seconds in which the first answers are waited for at the start
_RESOLVE = 5.0  # seconds for one name
_NOTHING = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


async def resolve(host: str, port: int) -> list[str]:
    """The `ip:port` of all machines behind a name, by the system's resolver.

    Of a name with addresses of both families these are the IPv4 ones, as Envoy (V4_PREFERRED) has them: a pod with two
    addresses is one node.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family = min((info[0] for info in found), default=socket.AF_INET)
    hosts = [str(info[4][0]) for info in found if info[0] == family]
    return [f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}" for host in hosts]


class NameWatch:
    """Resolves host names again and again.

    Args:
        nodes: `host:port` of each; addresses among them just stay.
        interval: seconds between two looks.
        members: gets what is found.
        ask: resolves one name.
        known: what names have led to, for those that lead to nothing now; gets what is found.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        interval: float,
        members: Members,
        ask: Resolve = resolve,
        known: dict[str, list[str]] | None = None,
    ) -> None:
        self._fixed = {n for n in nodes if is_ip(split_address(n)[0])}
        self._names = [n for n in dict.fromkeys(nodes) if n not in self._fixed]
        self._known = {} if known is None else known
        self._interval = interval
        self._members = members
        self._ask = ask

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval)

    async def look(self) -> None:
        """Look once."""
        await asyncio.gather(*map(self._look, self._names))
        found = (address for name in self._names for address in self._known.get(name, ()))
        if all_found := self._fixed.union(found):
            self._members.are(all_found)

    async def _look(self, name: str) -> None:
        try:
            async with asyncio.timeout(_RESOLVE):
                found = await self._ask(*split_address(name))
        except socket.gaierror as e:
            self._members.unknown("empty" if e.errno in _NOTHING else "failed", name, e.strerror or str(e))
        except (OSError, TimeoutError, UnicodeError) as e:
            self._members.unknown("failed", name, str(e) or "no answer in time")
        else:
            if found:
                self._known[name] = found
                self._members.well(name)
            else:
                self._members.unknown("empty", name, "it has no addresses")


class Discovery:
    """Keeps the pools of one router up to date. Use as an async context manager.

    Args:
        settings: the router's.
        pools: its pools.
        metrics: of pools.
        ask: resolves one name.
    """

    def __init__(self, settings: Settings, pools: Sequence[Pool], metrics: NodeMetrics, ask: Resolve = resolve) -> None:
        self._settings = settings
        self._pools = pools
        self._metrics = metrics
        self._ask = ask
        self._known: dict[str, list[str]] = {}
        self._tasks: dict[Pool, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        """Begin, and wait a while for the first answers."""
        begun = [self._begin(pool) for pool in self._pools]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST):
                await asyncio.gather(*(members.known.wait() for members in begun if members))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def apply(self, settings: Settings) -> None:
        """Ask by other settings from now on. Until they answer, the pools stay as they are."""
        before, self._settings = self._settings, settings
        for pool in self._pools:
            old, new = (s.pools.sources[pool.kind] for s in (before, settings))
            if old == new:
                continue
            if task := self._tasks.pop(pool, None):
                task.cancel()
            pool.ranks = new.ranks
            if not self._begin(pool):
                pool.update(new.static)

    def _begin(self, pool: Pool) -> Members | None:
        """Ask who is in a pool, if that is asked for."""
        source, members = self._settings.pools.sources[pool.kind], Members(pool, self._metrics)
        watch: NameWatch | SliceWatch
        if source.endpoint_slices:
            watch = SliceWatch(source.endpoint_slices, members)
        elif names := asked_for(source, self._settings):
            watch = NameWatch(names, source.interval, members, self._ask, self._known)
        else:
            return None
        self._tasks[pool] = asyncio.create_task(watch.run())
        return members


def asked_for(source: Source, settings: Settings) -> list[str]:
    """The nodes of which names are resolved; none where there are only addresses, or where Envoy resolves names."""
    if source.dns:
        return [source.dns]
    named = any(not is_ip(split_address(n)[0]) for n in source.static)
    return source.static if named and settings.endpoints == "router" else []
