"""`POST /v1/completions`."""

from asyncio import CancelledError
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from kvreturn.sim import serving
from kvreturn.sim.config import NodeConfig
from kvreturn.sim.engine import Engine
from kvreturn.sim.errors import ApiError
from kvreturn.sim.grammar import Manner
from kvreturn.sim.protocol import CompletionRequest, parse_json, validate
from kvreturn.sim.sequence import Step
from kvreturn.sim.serving import NODE, Json, Turn
from kvreturn.sim.template import Prompt
from kvreturn.sim.tokenizer import VOCAB_SIZE, decode, encode

_DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    """Handle one request."""
    engine = request.app[NODE].engine_for(request.headers)
    body = validate(CompletionRequest, parse_json(await request.read()))
    body.check()
    try:
        engine.check_alive()
        turn = _prepare(request, engine.config, body)
        if not body.stream:
            return serving.json_response(await _whole(engine, turn))
    except (ApiError, CancelledError):
        engine.reject(body.kv_transfer_params)
        raise
    return await serving.stream(request, _chunks(engine, turn))


def _prepare(request: web.Request, config: NodeConfig, body: CompletionRequest) -> Turn:
    serving.adapter_of(config, body.model)
    limit = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if _only_echo(body):
        limit = 1
    prompts = []
    for prompt in _prompts(body):
        budget = serving.output_budget(config, prompt, limit, "max_tokens")
        prompts.append((prompt, budget))
    manner = Manner(tokenizer=config.tokenizer)
    return serving.make_turn(request, config, body, prefix="cmpl", prompts=prompts, manner=manner, parse_tools=False)


def _only_echo(body: CompletionRequest) -> bool:
    return bool(body.echo) and body.max_tokens == 0


def _prompts(body: CompletionRequest) -> list[Prompt]:
    given = body.prompt
    many = isinstance(given, list) and not isinstance(given[0], int)
    out = []
    for item in given if many else [given]:  # type: ignore[union-attr]
        tokens = encode(item) if isinstance(item, str) else list(item)  # type: ignore[arg-type]
        if not tokens:
            raise ApiError("The prompt must not be empty", param="prompt")
        if not 0 <= min(tokens) <= max(tokens) < VOCAB_SIZE:
            raise ApiError(f"Token id {max(tokens)} is out of vocabulary", param="prompt")
        out.append(Prompt(tokens))
    return out


async def _whole(engine: Engine, turn: Turn) -> Json:
    body = turn.body
    assert isinstance(body, CompletionRequest)
    steps = await serving.run(engine, turn)
    choices = []
    for i, (step, transcript) in enumerate(zip(steps, turn.transcripts, strict=True)):
        prompt = turn.jobs[i].prompt.tokens
        text = "" if _only_echo(body) else transcript.text
        tokens = [] if _only_echo(body) else transcript.tokens
        if body.echo:
            text, tokens = _echo(body, prompt) + text, prompt + tokens
        choices.append(
            {
                "index": i,
                "text": text,
                "logprobs": None if body.logprobs is None else _logprobs(tokens, 0),
                "finish_reason": step.finish_reason,
                "stop_reason": step.stop_reason,
                "token_ids": transcript.tokens if body.return_token_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": prompt if body.return_token_ids else None,
                "routed_experts": None,
            }
        )
    return {
        "id": turn.id,
        "object": "text_completion",
        "created": turn.created,
        "model": turn.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": serving.FINGERPRINT,
        "usage": _usage(turn)
        | {
            "prompt_tokens_details": _cache_usage(
                engine, steps[-1], {"created_cache_tokens": None, "multimodal_tokens": None}
            ),
            "completion_tokens_details": None,
        },
        "kv_transfer_params": turn.handle,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _echo(body: CompletionRequest, prompt: list[int]) -> str:
    # vLLM returns no prompt text together with token ids.
    return "" if body.return_token_ids else decode(prompt)


def _usage(turn: Turn) -> Json:
    prompt, completion = turn.prompt_tokens, turn.completion_tokens
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def _cache_usage(engine: Engine, step: Step, rest: Json) -> Json | None:
    return {"cached_tokens": step.sequence.cached_tokens()} | rest if engine.config.prompt_tokens_details else None


def _logprobs(tokens: list[int], offset: int) -> Json:
    texts = [decode([token]) for token in tokens]
    values = [serving.logprob(token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top = [{text: value} for text, value in zip(texts, values, strict=True)]
    return {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": top}


async def _chunks(engine: Engine, turn: Turn) -> AsyncGenerator[Json, None]:
    body = turn.body
    assert isinstance(body, CompletionRequest)
    head = {"id": turn.id, "object": "text_completion", "created": turn.created, "model": turn.model}
    produced, offsets = [0] * len(turn.jobs), [0] * len(turn.jobs)
    cache: Json | None = None
    async with aclosing(serving.steps_of(engine, turn)) as steps:
        async for step in steps:
            i = step.job
            prompt = turn.jobs[i].prompt.tokens
            first = produced[i] == 0
            cache = cache or _cache_usage(engine, step, {})
            produced[i] += 1
            text = "".join(delta.text for delta in step.heard.deltas)
            tokens = [step.token]
            if _only_echo(body):
                text, tokens = "", []
            if first and body.echo:
                text, tokens = _echo(body, prompt) + text, prompt + tokens
            logprobs = None if body.logprobs is None else _logprobs(tokens, offsets[i])
            offsets[i] += len(decode(tokens)) if logprobs else 0
            choice = {
                "index": i,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": step.finish_reason,
                "stop_reason": step.stop_reason,
                "prompt_token_ids": prompt if first and (body.echo or body.return_token_ids) else None,
                "token_ids": [step.token] if body.return_token_ids else None,
            }
            out = head | {"choices": [choice]}
            if body.continuous_usage:
                out["usage"] = {
                    "prompt_tokens": len(prompt),
                    "total_tokens": len(prompt) + produced[i],
                    "completion_tokens": produced[i],
                }
            if step.finish_reason is not None:
                out |= serving.terminal_members(engine, turn)
            yield out
    if body.include_usage:
        usage = _usage(turn) | ({"prompt_tokens_details": cache} if cache else {})
        yield head | {"choices": [], "usage": usage, "system_fingerprint": serving.FINGERPRINT}
