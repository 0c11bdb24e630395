"""The node's HTTP server: routes, errors in vLLM's shape, and the memory of what was asked."""

import logging
from http import HTTPStatus
from typing import Any

from aiohttp import web

from kvreturn.sim import serving
from kvreturn.sim.about import VLLM
from kvreturn.sim.chat import chat, options_of, render_chat
from kvreturn.sim.completions import completions
from kvreturn.sim.engine import DroppedError
from kvreturn.sim.errors import ApiError
from kvreturn.sim.faults import Handler, inject
from kvreturn.sim.messages import messages
from kvreturn.sim.metrics import exposition
from kvreturn.sim.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    parse_json,
    validate,
)
from kvreturn.sim.responses import cancel, responses, retrieve
from kvreturn.sim.serving import NODE
from kvreturn.sim.tokenizer import decode, encode

_MAX_BODY = 256 << 20
_log = logging.getLogger(__name__)


def application() -> web.Application:
    """The app; set `app[NODE]` before it starts."""
    app = web.Application(client_max_size=_MAX_BODY, middlewares=[_errors, _remember, inject])
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat),
            web.post("/v1/completions", completions),
            web.post("/v1/messages", messages),
            web.post("/v1/responses", responses),
            web.get("/v1/responses/{id}", retrieve),
            web.post("/v1/responses/{id}/cancel", cancel),
            web.post("/tokenize", _tokenize),
            web.post("/detokenize", _detokenize),
            web.get("/v1/models", _models),
            web.get("/health", _health),
            web.get("/version", _version),
            web.get("/metrics", _metrics),
            web.post("/reset_prefix_cache", _reset_prefix_cache),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return serving.json_response(error.body(), error.status)
    except web.HTTPException as error:  # unknown paths and methods
        status = HTTPStatus(error.status)
        return serving.json_response(ApiError(status.phrase, status, kind=status.phrase).body(), status)
    except (DroppedError, ConnectionResetError):  # the node went away, or the client did
        return serving.cut(request)
    except Exception:  # noqa: BLE001 - logged and answered, as every server does
        _log.exception("error in the simulated node")
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        return serving.json_response(ApiError("Internal server error", status).body(), status)


@web.middleware
async def _remember(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[NODE].remember(request.path, request.headers, await request.read())
    return await handler(request)


async def _tokenize(request: web.Request) -> web.Response:
    engine = request.app[NODE].engine
    body = parse_json(await request.read())
    form: TokenizeChatRequest | TokenizeCompletionRequest
    if isinstance(body, dict) and "messages" in body:
        form = validate(TokenizeChatRequest, body)
        serving.adapter_of(engine.config, form.model)
        tokens = render_chat(engine, form, options_of(form)).tokens
    else:
        form = validate(TokenizeCompletionRequest, body)
        serving.adapter_of(engine.config, form.model)
        tokens = encode(form.prompt)
    return serving.json_response(
        {
            "count": len(tokens),
            "max_model_len": engine.config.max_model_len,
            "tokens": tokens,
            "token_strs": [decode([token]) for token in tokens] if form.return_token_strs else None,
        }
    )


async def _detokenize(request: web.Request) -> web.Response:
    engine = request.app[NODE].engine
    body = validate(DetokenizeRequest, parse_json(await request.read()))
    serving.adapter_of(engine.config, body.model)
    try:
        return serving.json_response({"prompt": decode(body.tokens)})
    except ValueError as error:
        raise ApiError(str(error), param="tokens") from error


async def _reset_prefix_cache(request: web.Request) -> web.Response:
    """Real nodes have this in vLLM's development mode only."""
    done = [rank.engine.pool.forget() for rank in request.app[NODE].ranks]
    return serving.json_response({"success": all(done)})


async def _models(request: web.Request) -> web.Response:
    node = request.app[NODE]
    config = node.config

    def card(name: str, parent: str | None, length: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": node.created,
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": length,
            "permission": [],
        }

    cards = [card(name, None, config.max_model_len) for name in (config.model, *config.aliases)]
    cards += [card(name, config.model, None) for name in config.adapters]
    return serving.json_response({"object": "list", "data": cards})


async def _health(request: web.Request) -> web.Response:
    alive = all(rank.engine.stats().engine_alive for rank in request.app[NODE].ranks)
    return web.Response(status=HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE)


async def _version(_request: web.Request) -> web.Response:
    return serving.json_response({"version": VLLM})


async def _metrics(request: web.Request) -> web.Response:
    engines = [rank.engine for rank in request.app[NODE].ranks]
    text = "".join(exposition(e.config, e.stats(), e.block_use(), str(i)) for i, e in enumerate(engines))
    return web.Response(text=text, content_type="text/plain")
