"""`POST /v1/chat/completions`."""

from asyncio import CancelledError
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from kvreturn.sim import serving
from kvreturn.sim.config import NodeConfig
from kvreturn.sim.engine import Engine
from kvreturn.sim.errors import ApiError
from kvreturn.sim.grammar import Manner, Tool
from kvreturn.sim.output import Delta, Transcript
from kvreturn.sim.protocol import ChatRequest, NamedToolChoice, TokenizeChatRequest, parse_json, validate
from kvreturn.sim.sequence import Step
from kvreturn.sim.serving import NODE, Json, Turn
from kvreturn.sim.template import TEMPLATES, Options, Prompt, has_media, render, will_think
from kvreturn.sim.tokenizer import VOCAB_SIZE, decode


async def chat(request: web.Request) -> web.StreamResponse:
    """Handle one request."""
    node = request.app[NODE]
    engine = node.engine_for(request.headers)
    body = validate(ChatRequest, parse_json(await request.read()))
    body.check()
    try:
        engine.check_alive()
        turn = prepare(request, engine, body)
        if not body.stream:
            return serving.json_response(await whole(engine, turn))
    except (ApiError, CancelledError):
        engine.reject(body.kv_transfer_params)
        raise
    return await serving.stream(request, chunks(engine, turn))


def render_chat(engine: Engine, body: ChatRequest | TokenizeChatRequest, options: Options) -> Prompt:
    """The prompt of a conversation, as this node renders it now."""
    template = TEMPLATES[engine.config.template]
    return render(template, body.messages, body.tools or (), options, engine.clock.wall())


def options_of(body: ChatRequest | TokenizeChatRequest) -> Options:
    """What the template may read besides the messages."""
    kwargs = body.chat_template_kwargs or {}
    thinks = kwargs.get("enable_thinking", getattr(body, "reasoning_effort", None) != "none")
    return Options(body.add_generation_prompt, body.continue_final_message, bool(thinks))


def prepare(request: web.Request, engine: Engine, body: ChatRequest) -> Turn:
    """Make a turn of a checked request.

    Raises:
        ApiError: (400, 404) it cannot be run.
    """
    config = engine.config
    serving.adapter_of(config, body.model)
    if body.choice_of_tool in ("auto", "required") and not config.tool_parser:
        raise ApiError(
            f'"{body.choice_of_tool}" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    options = options_of(body)
    prompt = _forwarded_prompt(config, body, options) or render_chat(engine, body, options)
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    budget = serving.output_budget(config, prompt, body.limit, param)
    return serving.make_turn(
        request,
        config,
        body,
        prefix="chatcmpl",
        prompts=[(prompt, budget)],
        manner=_manner(config, body, prompt),
        parse_tools=config.tool_parser and body.choice_of_tool != "none",
    )


def _manner(config: NodeConfig, body: ChatRequest, prompt: Prompt) -> Manner:
    tools = body.definitions() if body.choice_of_tool != "none" else []
    if isinstance(body.tool_choice, NamedToolChoice):
        tools = [tool for tool in tools if tool.name == body.tool_choice.function.name]
    return Manner(
        tokenizer=config.tokenizer,
        thinks=prompt.thinks,
        tools=tuple(Tool(tool.name, (tool.parameters or {}).get("properties") or {}) for tool in tools),
        must_call=body.choice_of_tool in ("required", "named"),
        parallel=body.parallel_tool_calls is not False and body.choice_of_tool != "named",
    )


def _forwarded_prompt(config: NodeConfig, body: ChatRequest, options: Options) -> Prompt | None:
    """P's token ids, where the router passed them on to spare D the tokenizing."""
    params = body.kv_transfer_params or {}
    tokens = params.pop("prompt_token_ids", None)
    if tokens is None or body.echo or has_media(body.messages):
        return None
    param = "kv_transfer_params.prompt_token_ids"
    if not isinstance(tokens, list) or not tokens or any(type(t) is not int or t < 0 for t in tokens):
        raise ApiError(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.", param=param
        )
    if max(tokens) >= VOCAB_SIZE:
        raise ApiError(f"Token id {max(tokens)} is out of vocabulary", param=param)
    return Prompt(tokens, thinks=will_think(TEMPLATES[config.template], options))


# --- answers ---


def _reasons(engine: Engine) -> bool:
    return TEMPLATES[engine.config.template].thinking != "none"


def _finish_reason(body: ChatRequest, transcript: Transcript, finish: str | None) -> str | None:
    """OpenAI's: `tool_calls`, but `stop` where the function was named."""
    called = transcript.calls and not transcript.broken_call
    return "tool_calls" if finish == "stop" and called and body.choice_of_tool != "named" else finish


def _usage(engine: Engine, turn: Turn) -> Json:
    prompt, completion = turn.prompt_tokens, turn.completion_tokens
    details = {"reasoning_tokens": sum(t.reasoning_tokens for t in turn.transcripts)} if _reasons(engine) else None
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "completion_tokens_details": details,
    }


def cache_usage(engine: Engine, step: Step) -> Json | None:
    """What was cached of the prompt; None if the node does not tell (`--enable-prompt-tokens-details`)."""
    if not engine.config.prompt_tokens_details:
        return None
    seq, caching = step.sequence, engine.config.prefix_caching
    created = seq.created_tokens(engine.config.block_size) if caching else 0
    images = len(seq.job.prompt.images)
    return {
        "cached_tokens": seq.cached_tokens(),
        "created_cache_tokens": created,
        "multimodal_tokens": {"image": images} if images else None,
    }


async def whole(engine: Engine, turn: Turn) -> Json:
    """Run a turn to its end; the answer in one piece."""
    body = turn.body
    assert isinstance(body, ChatRequest)
    steps = await serving.run(engine, turn)
    usage = _usage(engine, turn) | {"prompt_tokens_details": cache_usage(engine, steps[0])}
    choices = []
    for step, transcript in zip(steps, turn.transcripts, strict=True):
        choices.append(
            {
                "index": step.job,
                "message": _message(body, transcript),
                "logprobs": {"content": [_logprob(t) for t in transcript.tokens]} if body.logprobs else None,
                "finish_reason": _finish_reason(body, transcript, step.finish_reason),
                "stop_reason": step.stop_reason,
                "token_ids": transcript.tokens if body.return_token_ids else None,
                "routed_experts": None,
            }
        )
    return {
        "id": turn.id,
        "object": "chat.completion",
        "created": turn.created,
        "model": turn.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": serving.FINGERPRINT,
        "usage": usage,
        "prompt_logprobs": None,
        "prompt_token_ids": turn.jobs[0].prompt.tokens if body.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": turn.handle,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _message(body: ChatRequest, transcript: Transcript) -> Json:
    calls = [] if transcript.broken_call else transcript.calls
    content: str | None = transcript.raw_content if transcript.broken_call else transcript.content
    if not content and body.choice_of_tool in ("none", "auto") and (calls or transcript.reasoning):
        content = None
    message: Json = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message | {"reasoning": (transcript.reasoning or None) if body.include_reasoning else None}


def _logprob(token: int) -> Json:
    text = decode([token])
    return {"token": text, "logprob": serving.logprob(token), "bytes": list(text.encode()), "top_logprobs": []}


# --- streams ---


async def chunks(engine: Engine, turn: Turn) -> AsyncGenerator[Json, None]:
    """Run a turn; the answer in chunks."""
    body = turn.body
    assert isinstance(body, ChatRequest)
    head = {"id": turn.id, "object": "chat.completion.chunk", "created": turn.created, "model": turn.model}
    produced = [0] * len(turn.jobs)
    cache: Json | None = None
    started = False
    async with aclosing(serving.steps_of(engine, turn)) as steps:
        async for step in steps:
            if not started:
                started = True
                cache = cache_usage(engine, step)
                for chunk in _role_chunks(engine, turn, head):
                    yield chunk
            produced[step.job] += 1
            choice = _chunk(body, turn.transcripts[step.job], step)
            if choice is None:
                continue
            out = head | {"choices": [choice]}
            if body.continuous_usage:
                out["usage"] = _running_usage(engine, turn, produced[step.job])
            if step.finish_reason is not None:
                out |= serving.terminal_members(engine, turn)
            yield out
    if body.include_usage:
        usage = _usage(engine, turn) | {"prompt_tokens_details": cache and _without_none(cache)}
        yield head | {"choices": [], "usage": _without_none(usage), "system_fingerprint": serving.FINGERPRINT}


def _role_chunks(engine: Engine, turn: Turn, head: Json) -> list[Json]:
    """What every choice begins with: its role."""
    body = turn.body
    assert isinstance(body, ChatRequest)
    out = []
    for i in range(len(turn.jobs)):
        delta = {"role": "assistant", "content": ""}
        chunk = head | {"choices": [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}]}
        if body.continuous_usage:
            chunk["usage"] = _running_usage(engine, turn, 0)
        tokens = turn.jobs[0].prompt.tokens if body.return_token_ids else None
        out.append(chunk | {"prompt_token_ids": tokens, "prompt_text": None})
    return out


def _chunk(body: ChatRequest, transcript: Transcript, step: Step) -> Json | None:
    """The choice of one chunk, or None where there is nothing to say."""
    delta = _delta(body, step.heard.deltas, transcript)
    quiet = not body.logprobs and not body.return_token_ids
    if not delta and quiet and step.finish_reason is None:
        return None
    chunk: Json = {
        "index": step.job,
        "delta": delta,
        "logprobs": {"content": [_logprob(step.token)]} if body.logprobs else None,
        "finish_reason": None,
    }
    if step.finish_reason is not None:
        chunk["finish_reason"] = _finish_reason(body, transcript, step.finish_reason)
        chunk["stop_reason"] = step.stop_reason
    chunk["token_ids"] = [step.token] if body.return_token_ids else None
    return chunk


def _delta(body: ChatRequest, deltas: tuple[Delta, ...], transcript: Transcript) -> Json:
    out: Json = {}
    for delta in deltas:
        if delta.kind == "content":
            out["content"] = (out.get("content") or "") + delta.text
        elif delta.kind == "reasoning":
            if body.include_reasoning:
                out["reasoning"] = out.get("reasoning", "") + delta.text
        else:
            out.setdefault("content", None)
            call: Json = {"index": delta.call, "function": {delta.kind: delta.text}}
            if delta.kind == "name":
                call = {"id": transcript.calls[delta.call].id, "type": "function"} | call
            out.setdefault("tool_calls", []).append(call)
    return out


def _running_usage(engine: Engine, turn: Turn, completion: int) -> Json:
    prompt = turn.prompt_tokens
    usage: Json = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    reasoning = sum(transcript.reasoning_tokens for transcript in turn.transcripts)
    return usage | {"completion_tokens_details": {"reasoning_tokens": reasoning} if _reasons(engine) else None}


def _without_none(value: Json) -> Json:
    return {key: item for key, item in value.items() if item is not None}
