"""The admin port: metrics and health, for operators and their tools."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from kvreturn.server.world import World

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def admin_app(world: World) -> web.Application:
    """What the admin port serves.

    Args:
        world: of the router that it tells about.
    """
    app = web.Application()
    app.router.add_get("/metrics", _metrics(world))
    app.router.add_get("/healthz", _healthz)
    return app


def _metrics(world: World) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(body=world.metrics.expose(), content_type="text/plain", charset="utf-8")

    return handler


async def _healthz(request: web.Request) -> web.StreamResponse:
    del request
    return web.Response(text="ok\n")
