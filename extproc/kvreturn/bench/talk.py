"""Asking one question over HTTP, in any of the APIs, and timing the answer."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvreturn.bench.conversation import Words
from kvreturn.core.api import APIS, Answer
from kvreturn.core.jsontext import JSONTextError, loads
from kvreturn.core.sse import SSEDecoder, split_events

APIS_BY_NAME = {api.name: api for api in APIS}
_PROBES = (200, 1_200)  # words
_MOST_WORDS = 10  # per token. Tokenizers have about one; from a count that means nothing, texts would grow without end
_TOLD = 300  # characters of an error
Said = tuple[str, str]
"""Role and text of a message."""


class TalkError(Exception):
    """A request that got no answer, or an error for one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        text: what the model said, without its reasoning.
        prompt_tokens: as the node counts them.
        output_tokens: likewise.
        chunks: pieces that the answer came in.
        ttft: seconds from sending the request to the first piece.
        latency: seconds to the answer's end.
    """

    text: str
    prompt_tokens: int
    output_tokens: int
    chunks: int
    ttft: float
    latency: float


@dataclass(frozen=True, slots=True)
class Talk:
    """A way to ask.

    Attributes:
        session: that sends the requests.
        url: base URL of the API, ending in `/v1` as clients have it.
        model: name of the model.
        api: one of `APIS_BY_NAME`.
        stream: whether answers are streamed.
        timeout: seconds for one answer.
        headers: of every request: a key, a tenant.
    """

    session: aiohttp.ClientSession
    url: str
    model: str
    api: str = "chat"
    stream: bool = True
    timeout: float = 300.0
    headers: Mapping[str, str] | None = None

    async def ask(self, said: Sequence[Said], max_tokens: int, salt: str) -> Reply:
        """Send a request, and take the answer in.

        Args:
            said: the conversation up to and with the question.
            max_tokens: how long the answer is; models that may stop before are asked not to, where an API can.
            salt: keeps P's prefix cache from knowing prompts with another one.

        Raises:
            TalkError: there is no answer, or no counts of its tokens.
        """
        api = APIS_BY_NAME[self.api]
        body = {"model": self.model, "stream": self.stream, "temperature": 0, "cache_salt": salt}
        body |= _members(self.api, said, max_tokens)
        if self.stream and self.api in {"chat", "completions"}:
            body["stream_options"] = {"include_usage": True}
        answer, text = api.answer(), list[str]()
        first: float | None = None
        chunks = 0
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout):
                async for obj in self._objects(api.path.removeprefix("/v1"), body):
                    answer.read(obj, stream=self.stream)
                    content, reasoning = _piece(self.api, obj) if self.stream else (_whole(self.api, obj), "")
                    text.append(content)
                    if content or reasoning:
                        first = first or time.perf_counter()
                        chunks += 1
                ended = time.perf_counter()
        except TimeoutError:
            raise TalkError(f"no whole answer within {self.timeout:g} s") from None
        except aiohttp.ClientError as e:
            raise TalkError(f"{type(e).__name__}: {e}") from None
        _check(answer)
        return Reply(
            text="".join(text),
            prompt_tokens=answer.usage.prompt or 0,
            output_tokens=answer.usage.completion or 0,
            chunks=chunks,
            ttft=(first or ended) - begun,
            latency=ended - begun,
        )

    async def words(self, salt: str) -> Words:
        """Find out how many words make a token here, by two prompts of known numbers of words.

        Raises:
            TalkError: the deployment does not answer, or counts nonsense.
        """
        plain = Words()
        short, long = [
            await self.ask([("user", plain.text(random.Random(0), words))], 1, salt)  # noqa: S311 - no secret
            for words in _PROBES
        ]
        tokens = long.prompt_tokens - short.prompt_tokens
        if tokens * _MOST_WORDS < _PROBES[1] - _PROBES[0]:
            raise TalkError(f"{_PROBES[1]} words count {long.prompt_tokens} tokens, {_PROBES[0]} {short.prompt_tokens}")
        return Words((_PROBES[1] - _PROBES[0]) / tokens)

    async def _objects(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The answer's JSON objects, as they arrive."""
        async with self.session.post(self.url + path, json=body, headers=self.headers) as response:
            if response.status != 200:  # noqa: PLR2004 - the status of answers
                raise TalkError(f"HTTP {response.status}: {(await response.text())[:_TOLD]}")
            if not self.stream:
                yield _object(await response.read())
                return
            decoder = SSEDecoder()
            async for data in response.content.iter_any():
                for event in split_events(decoder.decode(data)):
                    if event.data and event.data != b"[DONE]":
                        yield _object(event.data)


def _check(answer: Answer) -> None:
    if answer.error:
        raise TalkError(f"an error inside the answer: {answer.error}")
    if not answer.finish_reasons:
        raise TalkError("the answer broke off")
    if answer.usage.prompt is None or answer.usage.completion is None:
        raise TalkError("the answer does not count its tokens (`usage`)")


def _object(data: bytes) -> dict[str, Any]:
    try:
        obj = loads(data)
    except JSONTextError:
        obj = None
    if not isinstance(obj, dict):
        raise TalkError(f"not what an API answers: {data[:_TOLD]!r}")
    return obj


def _members(api: str, said: Sequence[Said], max_tokens: int) -> dict[str, Any]:
    """What a request says, and how long its answer is."""
    messages = [{"role": role, "content": text} for role, text in said]
    exactly = {"ignore_eos": True}  # vLLM's: both legs' answers are as long, whatever the model makes of its prompt
    match api:
        case "completions":
            # A line end keeps the last word of an answer and the first one after it from becoming one token.
            prompt = "".join(text if role == "assistant" else f"\n{text}\n" for role, text in said)
            return {"prompt": prompt, "max_tokens": max_tokens, **exactly}
        case "responses":
            return {"input": messages, "max_output_tokens": max_tokens, "store": False, **exactly}
        case "messages":
            system = {"system": said[0][1]} if said[0][0] == "system" else {}
            return {"messages": messages[len(system) :], "max_tokens": max_tokens, **system}
        case _:
            return {"messages": messages, "max_tokens": max_tokens, **exactly}


def _piece(api: str, event: Mapping[str, Any]) -> tuple[str, str]:
    """Text and reasoning that an event of a stream brings."""
    match api:
        case "responses":
            kind, text = str(event.get("type")), str(event.get("delta") or "")
            return (text if kind == "response.output_text.delta" else ""), (text if "reasoning" in kind else "")
        case "messages":
            delta = event.get("delta") or {}
            return delta.get("text") or "", delta.get("thinking") or ""
        case _:
            choice: Mapping[str, Any] = next(iter(event.get("choices") or ()), {})
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            return text, delta.get("reasoning") or delta.get("reasoning_content") or ""


def _whole(api: str, body: Mapping[str, Any]) -> str:
    """Text of an answer that was not streamed."""
    match api:
        case "responses":
            messages = [item for item in body.get("output") or () if item.get("type") == "message"]
            parts = [part for message in messages for part in message.get("content") or ()]
        case "messages":
            parts = body.get("content") or []
        case _:
            choice: Mapping[str, Any] = next(iter(body.get("choices") or ()), {})
            return choice.get("text") or (choice.get("message") or {}).get("content") or ""
    return "".join(part.get("text") or "" for part in parts)
