"""`openai-agents`: its runner, over both APIs that it speaks."""

from typing import Any

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from conversation import MODEL, ROUNDS, SYSTEM, TASKS, Desk, Talk, main


def _talk(kind: type[OpenAIChatCompletionsModel | OpenAIResponsesModel]) -> Talk:
    async def talk(url: str, stream: bool, desk: Desk) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as sdk:
            model = kind(model=MODEL, openai_client=sdk)
            agent = Agent(name="agent", instructions=SYSTEM, model=model, tools=[function_tool(desk.read)])
            items: list[Any] = []
            for task in TASKS:
                items.append({"role": "user", "content": task})
                if stream:
                    running = Runner.run_streamed(agent, items, max_turns=ROUNDS)
                    async for _ in running.stream_events():
                        pass
                    result: Any = running
                else:
                    result = await Runner.run(agent, items, max_turns=ROUNDS)
                items = result.to_input_list()
                desk.texts.append(result.final_output)

    return talk


if __name__ == "__main__":
    set_tracing_disabled(True)  # else it sends its traces to OpenAI
    main({"chat": _talk(OpenAIChatCompletionsModel), "responses": _talk(OpenAIResponsesModel)})
