"""`/v1/responses`: as in vLLM, a chat prompt underneath. Responses are kept if the node is configured to."""

from asyncio import CancelledError
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web
from pydantic import BaseModel, ConfigDict

from kvreturn.sim import serving
from kvreturn.sim.chat import cache_usage, prepare
from kvreturn.sim.engine import Engine
from kvreturn.sim.errors import ApiError
from kvreturn.sim.items import chat_messages, chat_tools, history_of, new_id, output_items
from kvreturn.sim.itemstream import ItemStream
from kvreturn.sim.protocol import ChatRequest, parse_json, validate
from kvreturn.sim.sequence import Step
from kvreturn.sim.serving import NODE, Json, Turn


class ResponsesRequest(BaseModel):
    """The members that do something here, or stand in the answer. Whatever else a client sends is ignored."""

    model_config = ConfigDict(extra="ignore")

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include_reasoning: bool = True
    background: bool | None = False
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool | None = True
    truncation: str | None = "disabled"
    user: str | None = None
    request_id: str | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True)
class _Kept:
    """A response that can be asked for, and the chat messages that led to it."""

    response: Json
    messages: list[Json]


_kept: WeakKeyDictionary[Engine, dict[str, _Kept]] = WeakKeyDictionary()  # vLLM has it in memory: a restart forgets


async def responses(request: web.Request) -> web.StreamResponse:
    """Handle one request."""
    engine = request.app[NODE].engine
    asked = validate(ResponsesRequest, parse_json(await request.read()))
    try:
        engine.check_alive()
        messages = _messages(engine, asked)
        turn = _prepare(request, engine, asked, messages)
        answer = _Answer(engine, asked, turn, messages)
        if asked.background:
            engine.spawn(answer.run_apart())
            return serving.json_response(answer.keep(answer.response("queued")))
        if not asked.stream:
            return serving.json_response(await answer.run())
    except (ApiError, CancelledError):
        engine.reject(asked.kv_transfer_params)
        raise
    return await serving.stream_named(request, answer.events())


async def retrieve(request: web.Request) -> web.Response:
    """Handle `GET /v1/responses/{id}`."""
    return serving.json_response(_find(request.app[NODE].engine, request.match_info["id"]).response)


async def cancel(request: web.Request) -> web.Response:
    """Handle `POST /v1/responses/{id}/cancel`. A background response here is over before anybody can cancel it."""
    _find(request.app[NODE].engine, request.match_info["id"])
    raise ApiError("Cannot cancel a synchronous response.", param="response_id", kind="invalid_request_error")


def _find(engine: Engine, name: str) -> _Kept:
    kept = _kept.get(engine, {}).get(name)
    if kept is None:
        text = f"Response with id '{name}' not found."
        raise ApiError(text, HTTPStatus.NOT_FOUND, param="response_id", kind="invalid_request_error")
    return kept


def _messages(engine: Engine, asked: ResponsesRequest) -> list[Json]:
    history: list[Json] = []
    if asked.prompt:
        raise ApiError("prompt template is not supported (parameter=prompt)", param="prompt")
    if asked.background and not engine.config.store_responses:
        text = (
            "This vLLM engine does not support `store=True` and therefore does not support the background mode. To "
            "enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching "
            "the vLLM server."
        )
        raise ApiError(text, param="background", kind="invalid_request_error")
    if asked.background and asked.stream:
        raise ApiError("background streams are not simulated", HTTPStatus.NOT_IMPLEMENTED)
    if asked.previous_response_id is not None:
        before = _find(engine, asked.previous_response_id)
        history = history_of(before.messages, before.response["output"])
    return chat_messages(asked.instructions, history, asked.input)


def _prepare(request: web.Request, engine: Engine, asked: ResponsesRequest, messages: list[Json]) -> Turn:
    choice: Any = asked.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    body: Json = {
        "messages": messages,
        "max_completion_tokens": asked.max_output_tokens,
        "reasoning_effort": (asked.reasoning or {}).get("effort"),
    }
    if asked.tools:
        body |= {"tools": chat_tools(asked.tools), "tool_choice": choice}
    same = ("model", "stream", "temperature", "top_p", "stop", "parallel_tool_calls")
    body |= {name: getattr(asked, name) for name in (*same, "chat_template_kwargs", "cache_salt", "kv_transfer_params")}
    chat = validate(ChatRequest, body)
    chat.check()
    turn = prepare(request, engine, chat)
    turn.id = asked.request_id or new_id("resp")
    return turn


class _Answer:
    """One response on its way.

    Args:
        engine: computes it.
        asked: the request.
        turn: made of the request.
        messages: the chat messages of its prompt.
    """

    def __init__(self, engine: Engine, asked: ResponsesRequest, turn: Turn, messages: list[Json]) -> None:
        self._engine = engine
        self._asked = asked
        self._turn = turn
        self._said = messages

    async def run(self) -> Json:
        """Run to the end; the response in one piece."""
        (step,) = await serving.run(self._engine, self._turn)
        return self._end(step, output_items(self._turn.transcripts[0], reasoning=self._asked.include_reasoning))

    async def run_apart(self) -> None:
        """Run, with nobody waiting: who wants the response asks for it."""
        await self.run()

    async def events(self) -> AsyncGenerator[Json, None]:
        """Run; the response as events."""
        items = ItemStream(self._turn.transcripts[0], reasoning=self._asked.include_reasoning)
        begun = self.response("in_progress")
        yield items.event("created", response=begun)
        yield items.event("in_progress", response=begun)
        last: Step | None = None
        async with aclosing(serving.steps_of(self._engine, self._turn)) as steps:
            async for step in steps:
                last = step
                for event in items.deltas(step.heard.deltas):
                    yield event
        for event in items.close():
            yield event
        assert last is not None
        # vLLM calls the last event so however the response ended.
        yield items.event("completed", response=self._end(last, items.output))

    def _end(self, step: Step, output: list[Json]) -> Json:
        status = "incomplete" if step.finish_reason == "length" else "completed"
        return self.keep(self.response(status, output, self._usage(step), self._turn.handle))

    def keep(self, response: Json) -> Json:
        """Keep the response, if the client and the node want that."""
        if self._asked.store and self._engine.config.store_responses:
            _kept.setdefault(self._engine, {})[response["id"]] = _Kept(response, self._said)
        return response

    def _usage(self, step: Step) -> Json:
        turn = self._turn
        cached = cache_usage(self._engine, step) or {"cached_tokens": 0, "created_cache_tokens": 0}
        return {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": cached["cached_tokens"],
                "cache_write_tokens": cached["created_cache_tokens"],
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": turn.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": turn.transcripts[0].reasoning_tokens,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        }

    def response(
        self, status: str, output: list[Json] | None = None, usage: Json | None = None, handle: Json | None = None
    ) -> Json:
        """The response object, members in vLLM's order."""
        asked, turn = self._asked, self._turn
        choice = asked.tool_choice if asked.tools else "none"
        return {
            "id": turn.id,
            "created_at": turn.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "metadata": asked.metadata,
            "model": turn.model,
            "object": "response",
            "output": output or [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "tool_choice": dict(sorted(choice.items())) if isinstance(choice, dict) else choice,
            "tools": asked.tools,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "background": bool(asked.background),
            "max_output_tokens": turn.jobs[0].sampling.max_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "prompt": None,
            "reasoning": asked.reasoning,
            "service_tier": "auto",
            "status": status,
            "text": asked.text,
            "top_logprobs": None,
            "truncation": asked.truncation,
            "usage": usage,
            "user": asked.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": handle,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }
