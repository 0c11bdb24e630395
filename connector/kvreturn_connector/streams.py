"""Puts the handle on streamed responses, which released vLLM does not (its pull request 40186 would).

vLLM's stream generators turn engine outputs into text. We watch what goes in, and when the handle has come by, we add
it to the chunk that ends the turn, on its way out. Never as a chunk of its own: clients read `choices[0]` of each.
"""

import functools
import inspect
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

KEY = "kv_transfer_params"
_MARK = "_kvreturn"


class Handle:
    """The handle of one response, once it has come by."""

    def __init__(self) -> None:
        self.params: Any = None

    def take(self) -> Any:
        """Give it away, once."""
        params, self.params = self.params, None
        return params


def add_to_chunk(chunk: str, params: Any) -> str | None:
    """A chat or completion chunk with the handle, None if it is not the one that ends the turn."""
    if not chunk.startswith("data: {"):
        return None
    body = json.loads(chunk[len("data: ") :])
    if not any(choice.get("finish_reason") is not None for choice in body.get("choices") or ()):
        return None
    text = chunk.rstrip("\n")
    # The member is appended to the text: every other byte stays what vLLM wrote.
    return f"{text[:-1]},{_member(params)}}}{chunk[len(text) :]}"


def add_to_message_stop(event: str, params: Any) -> str | None:
    """An Anthropic event with the handle, None if it is not `message_stop`."""
    if not event.startswith("event: message_stop\n"):
        return None
    text = event.rstrip("\n")
    return f"{text[:-1]},{_member(params)}}}{event[len(text) :]}"


def _member(params: Any) -> str:
    return f'"{KEY}":{json.dumps(params, separators=(",", ":"), ensure_ascii=False)}'


async def _watch(items: AsyncIterator[Any], handle: Handle, find: Callable[[Any], Any]) -> AsyncIterator[Any]:
    async for item in items:
        params = find(item)
        if params is not None:
            handle.params = params
        yield item


async def _decorate(
    chunks: AsyncIterator[str], handle: Handle, add: Callable[[str, Any], str | None]
) -> AsyncIterator[str]:
    """Chunks go on as they are, until the handle is there; then the next one that can carry it does."""
    async for chunk in chunks:
        if handle.params is not None:
            carrying = add(chunk, handle.params)
            if carrying is not None:
                handle.take()
                yield carrying
                continue
        yield chunk


def _wrap(
    owner: type, name: str, argument: str, find: Callable[[Any], Any], add: Callable[[str, Any], str | None]
) -> None:
    """Wrap the async generator method `owner.name`, whose `argument` is the stream that it reads."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> AsyncIterator[str]:
        bound = signature.bind(*args, **kwargs)
        request = bound.arguments.get("request")
        if (getattr(request, "n", None) or 1) > 1:
            # vLLM keeps the parameters of one of the choices: they may belong to any of them.
            return original(*args, **kwargs)
        handle = Handle()
        bound.arguments[argument] = _watch(bound.arguments[argument], handle, find)
        return _decorate(original(*bound.args, **bound.kwargs), handle, add)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _of_output(output: Any) -> Any:
    return getattr(output, KEY, None)


def _of_numbered_output(item: Any) -> Any:
    return getattr(item[1], KEY, None)


def _of_chunk(chunk: str) -> Any:
    if f'"{KEY}":{{' not in chunk:
        return None
    return json.loads(chunk[len("data: ") :]).get(KEY)


def install() -> None:
    """Wrap vLLM's generators in this process.

    Not those of `/v1/responses`: a streamed one ends with the object that a whole answer is, handle and all.

    Raises:
        compat.ShapeError: this vLLM has another shape than the one we know.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # noqa: PLC0415 - only in API servers
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse  # noqa: PLC0415
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat  # noqa: PLC0415
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion  # noqa: PLC0415

    from kvreturn_connector.compat import check_generator  # noqa: PLC0415

    if KEY in ChatCompletionStreamResponse.model_fields:
        return  # this vLLM does it itself
    places = [
        (OpenAIServingChat, "chat_completion_stream_generator", "result_generator", _of_output, add_to_chunk),
        (OpenAIServingCompletion, "completion_stream_generator", "result_generator", _of_numbered_output, add_to_chunk),
        (AnthropicServingMessages, "message_stream_converter", "generator", _of_chunk, add_to_message_stop),
    ]
    for owner, name, argument, _, _ in places:
        check_generator(owner, name, argument)
    for place in places:
        _wrap(*place)
