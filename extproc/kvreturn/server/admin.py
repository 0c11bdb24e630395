"""The admin port: metrics, health, what goes on here, and the end of conversations. For operators and their tools.

Browsers come here too, so no page of another origin may do or read anything: what changes something needs a header that
no form can send, and a port on loopback answers to its own names only, whatever name led there (DNS rebinding).
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from ipaddress import ip_address

from aiohttp import web
from aiohttp.typedefs import Middleware
from yarl import URL

from kvreturn.core.api.base import error_body
from kvreturn.server import view
from kvreturn.server.draining import Draining
from kvreturn.server.page import POLICY, page
from kvreturn.server.sessions import Sessions
from kvreturn.server.world import World

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HEADER = "x-kvreturn"
"""Must be in each request that changes something, with any value."""
_READING = frozenset({"GET", "HEAD"})
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def admin_app(world: World, host: str) -> web.Application:
    """What the admin port serves.

    Args:
        world: of the router that it tells about.
        host: where it listens.
    """
    limit = world.settings.limits.request_bytes
    app = web.Application(middlewares=[_guard(host)], client_max_size=limit)
    app.router.add_get("/metrics", _metrics(world))
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/", _page(world))
    app.router.add_get("/kvreturn/{section}", _section(world))
    Sessions(world).add_to(app)
    Draining(world).add_to(app)
    return app


def _guard(host: str) -> Middleware:
    local = _is_loopback(host)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = None
        if local and not _is_loopback(_host(request)):
            refusal = "this port is on loopback: ask for it as localhost or 127.0.0.1"
        elif request.method not in _READING and HEADER not in request.headers:
            refusal = f"what changes something needs the header {HEADER}, with any value"
        try:
            response = _error(403, refusal) if refusal else await handler(request)
        except web.HTTPException as e:
            response = _error(e.status, e.reason)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return guard


def _error(status: int, text: str) -> web.StreamResponse:
    kind = "PermissionDenied" if status == 403 else "BadRequestError"  # noqa: PLR2004
    return web.json_response(body=error_body(f"kvreturn: {text}", kind, status), status=status)


def _host(request: web.Request) -> str:
    try:
        return URL(f"http://{request.host}").host or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _metrics(world: World) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(body=world.metrics.expose(), content_type="text/plain", charset="utf-8")

    return handler


def _page(world: World) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        del request
        text = page(await view.state(world), view.config(world.settings))
        return web.Response(text=text, content_type="text/html", headers={"content-security-policy": POLICY})

    return handler


def _section(world: World) -> Handler:
    async def sessions(request: web.Request) -> object:
        most = request.query.get("limit", "100")
        if not (most.isascii() and most.isdigit()):
            raise web.HTTPBadRequest(reason="`limit` is a number of sessions")
        clearing = world.lifecycle.clearing
        store = await view.store(world, min(int(most[:9]), view.SESSIONS))
        return {"sessions": store.get("sessions", []), "ending_all": asdict(clearing) if clearing else None}

    sections: dict[str, Callable[[web.Request], Awaitable[object]]] = {
        "state": lambda _: view.state(world),
        "store": lambda _: view.store(world),
        "sessions": sessions,
    }
    plain: dict[str, Callable[[], object]] = {
        "reuse": lambda: view.reuse(world),
        "turns": lambda: view.turns(world),
        "pools": lambda: view.pools(world),
        "returns": lambda: view.returns(world),
        "config": lambda: view.config(world.settings),
        "about": lambda: view.about(world.settings),
    }

    async def handler(request: web.Request) -> web.StreamResponse:
        name = request.match_info["section"]
        if name in plain:
            return web.json_response(plain[name]())
        if name not in sections:
            raise web.HTTPNotFound(reason=f"there is one of {', '.join(sorted({*plain, *sections}))} here")
        return web.json_response(await sections[name](request))

    return handler


async def _healthz(request: web.Request) -> web.StreamResponse:
    del request
    return web.Response(text="ok\n")
