"""Faults that tests switch on: the next requests to a path go wrong."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from aiohttp import web

from kvreturn.sim import serving
from kvreturn.sim.errors import ApiError
from kvreturn.sim.serving import NODE

FaultKind = Literal["status", "malformed", "drop", "hang", "omit_params", "delay"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request.

    Attributes:
        kind: `status`: an error of that status. `malformed`: 200 and a body that is no JSON. `drop`: the connection
            breaks before an answer. `hang`: no answer until the client leaves. `omit_params`: answered without
            `kv_transfer_params`. `delay`: answered `seconds` later, by the node's clock.
        status: for `status`.
        seconds: for `delay`.
    """

    kind: FaultKind
    status: int = 500
    seconds: float = 0.0


class Faults:
    """What is to go wrong, by path; in the order in which it was added."""

    def __init__(self) -> None:
        self._queues: defaultdict[str, deque[Fault]] = defaultdict(deque)

    def add(
        self,
        path: str,
        kind: FaultKind,
        *,
        times: int = 1,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        seconds: float = 0.0,
    ) -> None:
        """Make the next `times` requests to `path` fail; see `Fault`."""
        self._queues[path].extend([Fault(kind, status, seconds)] * times)

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        self._queues.clear()

    def take(self, path: str) -> Fault | None:
        """The fault for a request that arrives now."""
        queue = self._queues.get(path)
        return queue.popleft() if queue else None


@web.middleware
async def inject(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Apply the next fault, if there is one for this path."""
    node = request.app[NODE]
    fault = node.faults.take(request.path)
    if fault is None:
        return await handler(request)
    match fault.kind:
        case "status":
            status = HTTPStatus(fault.status)
            return serving.json_response(ApiError("injected fault", status).body(), status)
        case "malformed":
            return web.Response(body=b'{"id":"cmpl-', content_type="application/json")
        case "drop":
            return serving.cut(request)
        case "hang":
            await asyncio.get_running_loop().create_future()
        case "omit_params":
            serving.omit_params.set(True)
        case "delay":
            await node.clock.sleep(fault.seconds)
    return await handler(request)
