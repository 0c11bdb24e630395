"""Taking nodes out of use by the admin port, and back in: they get no new requests, and end what they have."""

from aiohttp import web

from kvreturn.server.world import World

_PATH = "/kvreturn/pools/{kind:prefill|decode}/{address}/drain"


class Draining:
    """Answers requests to drain nodes.

    Args:
        world: of the router; another router is asked itself.
    """

    def __init__(self, world: World) -> None:
        self._pools = {"prefill": world.prefill, "decode": world.decode}

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_post(_PATH, self.drain)
        app.router.add_delete(_PATH, self.undrain)

    async def drain(self, request: web.Request) -> web.Response:
        """Drain a node, until it is taken back or leaves the pool. Again is no error."""
        return self._set(request, drained=True)

    async def undrain(self, request: web.Request) -> web.Response:
        """Take that back. One that is being taken away by whoever runs it still drains."""
        return self._set(request, drained=False)

    def _set(self, request: web.Request, *, drained: bool) -> web.Response:
        pool, address = self._pools[request.match_info["kind"]], request.match_info["address"]
        if not (pool.drain(address) if drained else pool.undrain(address)):
            raise web.HTTPNotFound(reason=f"there is no such {pool.kind} node")
        (view,) = (view for view in pool.snapshot() if view.address == address)
        return web.json_response({"address": address, "state": view.state, "load": view.load})
