"""What the chat and completions APIs share: from a checked request to jobs, and from steps to JSON."""

import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvreturn.sim.config import NodeConfig
from kvreturn.sim.engine import Engine
from kvreturn.sim.errors import ApiError
from kvreturn.sim.grammar import Manner
from kvreturn.sim.output import Transcript
from kvreturn.sim.protocol import ChatRequest, CompletionRequest
from kvreturn.sim.sequence import Job, Sampling, Step
from kvreturn.sim.template import Prompt

if TYPE_CHECKING:
    from kvreturn.sim.node import SimNode

NODE: web.AppKey["SimNode"] = web.AppKey("node")
omit_params: ContextVar[bool] = ContextVar("omit_params", default=False)
"""Set for a request that an injected fault wants answered without its handle."""
FINGERPRINT = "vllm-0.32.0-kvreturn-sim"
REQUEST_ID_HEADER = "X-Request-Id"
PRIORITY_HEADER = "X-Vllm-Priority"
RANK_HEADER = "X-data-parallel-rank"

Json = dict[str, Any]


@dataclass(slots=True)
class Turn:
    """One request on its way through the engine.

    Attributes:
        id: id of the response.
        created: Unix time.
        body: the checked request.
        model: name to answer with.
        jobs: one per choice.
        transcripts: one per choice.
        omit_params: leave the handle out of the answer (an injected fault).
        handle: the response's `kv_transfer_params`, once there is one.
    """

    id: str
    created: int
    body: ChatRequest | CompletionRequest
    model: str
    jobs: list[Job]
    transcripts: list[Transcript]
    omit_params: bool
    handle: Json | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; choices of one prompt count once."""
        return sum(len(job.prompt.tokens) for job in self.jobs if job.choice == 0)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(transcript.tokens) for transcript in self.transcripts)


def adapter_of(config: NodeConfig, model: str | None) -> str:
    """The LoRA adapter that a model name means, empty for the base model.

    Raises:
        ApiError: (404) no such model.
    """
    if not model or model in (config.model, *config.aliases):
        return ""
    if model in config.adapters:
        return model
    raise ApiError(
        f"The model `{model}` does not exist. Valid aliases: {config.model}.", HTTPStatus.NOT_FOUND, param="model"
    )


def output_budget(config: NodeConfig, prompt: Prompt, limit: int | None, param: str) -> int:
    """How many tokens may be generated.

    Raises:
        ApiError: (400) prompt and output do not fit into the context.
    """
    length, room = len(prompt.tokens), config.max_model_len
    if limit is not None and limit > room:
        raise ApiError(f"{param}={limit} cannot be greater than max_model_len={room}.", param=param)
    if length >= room or length + (limit or 0) > room:
        raise ApiError(
            f"This model's maximum context length is {room} tokens. However, you requested {limit or 0} output tokens "
            f"and your prompt contains {length} input tokens. Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    return room - length if limit is None else limit


def make_turn(  # noqa: PLR0913 - they all differ between the two APIs
    request: web.Request,
    config: NodeConfig,
    body: ChatRequest | CompletionRequest,
    *,
    prefix: str,
    prompts: list[tuple[Prompt, int]],
    manner: Manner,
    parse_tools: bool,
) -> Turn:
    """Make the jobs of a request.

    Args:
        request: for its id.
        config: the node's settings.
        body: the checked request.
        prefix: of the response's id.
        prompts: with the number of tokens that may follow each.
        manner: how the model may answer.
        parse_tools: tell tool calls from text.

    Raises:
        ApiError: (400, 404) the request cannot be run.
    """
    choices = body.n or 1
    jobs, transcripts = [], []
    for prompt, max_tokens in prompts:
        body.check_sampling(max_tokens)
        sampling = Sampling(max_tokens, body.min_tokens, body.ignore_eos, frozenset(body.stop_token_ids or ()))
        for choice in range(choices):
            transcript = Transcript(
                stops=body.stops,
                include_stop=body.include_stop_str_in_output,
                min_tokens=body.min_tokens,
                thinking=manner.thinks,
                tools=parse_tools,
            )
            transcripts.append(transcript)
            jobs.append(
                Job(
                    prompt=prompt,
                    manner=manner,
                    sampling=sampling,
                    listen=transcript.listen,
                    params=dict(body.kv_transfer_params) if body.kv_transfer_params else None,
                    adapter=adapter_of(config, body.model),
                    salt=body.cache_salt or "",
                    choice=choice,
                    choices=choices,
                    priority=_priority(request, body),
                )
            )
    base = request.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex[:16]
    name = body.model or config.model
    return Turn(f"{prefix}-{base}", int(time.time()), body, name, jobs, transcripts, omit_params.get())


def _priority(request: web.Request, body: ChatRequest | CompletionRequest) -> int:
    """A header counts before the body; one that is no number does not count."""
    try:
        return int(request.headers[PRIORITY_HEADER])
    except (KeyError, ValueError):
        return body.priority


async def steps_of(engine: Engine, turn: Turn) -> AsyncGenerator[Step, None]:
    """The engine's steps; closing the generator aborts the request."""
    async with aclosing(engine.generate(turn.id, turn.jobs)) as steps:
        async for step in steps:
            # A response has one handle. With several choices it is that of the first prompt's choice that ends last.
            if step.finish_reason is not None and step.job < step.sequence.job.choices and not turn.omit_params:
                turn.handle = step.params
            yield step


async def run(engine: Engine, turn: Turn) -> list[Step]:
    """Run to the end.

    Returns:
        The last step of every job.
    """
    last: dict[int, Step] = {}
    async with aclosing(steps_of(engine, turn)) as steps:
        async for step in steps:
            last[step.job] = step
    return [last[i] for i in range(len(turn.jobs))]


def terminal_members(engine: Engine, turn: Turn) -> Json:
    """What a stream's chunk with a `finish_reason` has besides its choice.

    vLLM never sends the handle in streams; kvreturn's plugin adds it, but not where several choices would share it.
    """
    members: Json = {} if turn.body.include_usage else {"system_fingerprint": FINGERPRINT}
    if engine.plugin and len(turn.jobs) == 1 and turn.handle is not None:
        members["kv_transfer_params"] = turn.handle
    return members


# --- JSON ---


def dumps(value: object) -> bytes:
    """JSON as vLLM writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(value: object, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=dumps(value), status=status, content_type="application/json")


def logprob(token: int) -> float:
    """An invented log probability; it depends on the token alone, so that it never differs between nodes."""
    return -(token % 997 + 1) / 1000


def cut(request: web.Request) -> web.Response:
    """Break the connection; nobody will see the answer that is returned."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def stream(request: web.Request, events: AsyncGenerator[Json, None]) -> web.StreamResponse:
    """Answer with a `text/event-stream`; an error after the first byte becomes an event."""
    response = await _begin_stream(request)
    try:
        async with aclosing(events):
            async for event in events:
                await response.write(b"data: " + dumps(event) + b"\n\n")
    except ApiError as error:
        # vLLM writes these with the spaces of json.dumps's defaults.
        await response.write(f"data: {json.dumps(error.body())}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def stream_named(request: web.Request, events: AsyncGenerator[Json, None]) -> web.StreamResponse:
    """The same for events that have names, their types. They end without a mark, and an error breaks them off."""
    response = await _begin_stream(request)
    try:
        async with aclosing(events):
            async for event in events:
                await response.write(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dumps(event)))
    except ApiError:
        return cut(request)
    await response.write_eof()
    return response


async def _begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response
