"""`pydantic-ai`: its agent, over the three APIs that it speaks to such servers."""

from collections.abc import AsyncIterable, Callable
from typing import Any

from conversation import MODEL, ROUNDS, SYSTEM, TASKS, Desk, Talk, main
from pydantic_ai import Agent, Tool, UsageLimits
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


async def _listen(_: object, events: AsyncIterable[Any]) -> None:
    async for _event in events:
        pass


def _talk(model: Callable[[str], Model]) -> Talk:
    async def talk(url: str, stream: bool, desk: Desk) -> None:
        agent = Agent(model(url), instructions=SYSTEM, tools=[Tool(desk.read)])
        limits = UsageLimits(request_limit=ROUNDS)
        history: list[Any] = []
        for task in TASKS:
            listener = _listen if stream else None  # with somebody listening it streams its requests
            result = await agent.run(task, message_history=history, usage_limits=limits, event_stream_handler=listener)
            history = result.all_messages()
            desk.texts.append(result.output)

    return talk


def _openai(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=url, api_key="x")


def _anthropic(url: str) -> AnthropicProvider:
    return AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="x")


if __name__ == "__main__":
    main(
        {
            "chat": _talk(lambda url: OpenAIChatModel(MODEL, provider=_openai(url))),
            "responses": _talk(lambda url: OpenAIResponsesModel(MODEL, provider=_openai(url))),
            "messages": _talk(lambda url: AnthropicModel(MODEL, provider=_anthropic(url))),
        }
    )
