"""`DELETE /kvreturn/sessions`: whoever owns a conversation says that it is over, and D frees what it left."""

from collections.abc import Mapping
from dataclasses import asdict

from aiohttp import web

from kvreturn.core.api import Chat
from kvreturn.core.api.base import BadRequestError, error_body
from kvreturn.core.jsontext import JSONTextError
from kvreturn.server.intake import refused, turn_api
from kvreturn.server.lifecycle import Ended
from kvreturn.server.record import CREDENTIALS
from kvreturn.server.world import World
from kvreturn.store.errors import StoreError


class Sessions:
    """The handlers.

    Args:
        world: of the router that is told.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def add_to(self, app: web.Application) -> None:
        """Register them."""
        app.router.add_delete("/kvreturn/sessions", self.delete)
        app.router.add_delete("/kvreturn/sessions/{id:.+}", self.delete)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """End one conversation, by its id or its last request; or all of them."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        if request.query.get("all") == "true" and "id" not in request.match_info:
            clearing = self._world.lifecycle.end_all(_credentials(headers))
            return web.json_response(asdict(clearing), status=202)
        refusal = refused(headers, self._world.settings, error_body, ours=True)
        if refusal:
            return web.json_response(body=refusal.body, status=refusal.status)
        try:
            ended = await self._end(request, headers)
        except (JSONTextError, BadRequestError) as e:
            return _error(400, f"kvreturn: {e}", "BadRequestError")
        except StoreError:
            return _error(503, "kvreturn: the session store does not answer; try again", "ServiceUnavailable")
        if not ended.records:
            return _error(404, "kvreturn: nothing is known of this conversation; it may be over", "NotFoundError")
        return web.json_response(asdict(ended))

    async def _end(self, request: web.Request, headers: Mapping[str, str]) -> Ended:
        lifecycle, credentials = self._world.lifecycle, _credentials(headers)
        name = request.match_info.get("id")
        if name is not None:
            return await lifecycle.end_session(self._world.scope(headers), name, credentials)
        api = turn_api({":method": "POST", ":path": request.query.get("path", Chat.path)})
        if api is None:
            raise BadRequestError("`path` must be the path that the turn was sent to, such as /v1/messages")
        body = await request.read()
        if not body:
            raise BadRequestError("name the session in the path, or send the body of the conversation's last request")
        return await lifecycle.end_turn(api, body, headers, credentials)


def _credentials(headers: Mapping[str, str]) -> Mapping[str, str]:
    return {h: headers[h] for h in CREDENTIALS if h in headers}


def _error(status: int, text: str, kind: str) -> web.Response:
    return web.json_response(body=error_body(text, kind, status), status=status)
