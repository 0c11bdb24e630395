"""`langchain-openai`: the chat model with a bound tool, over both APIs that it speaks."""

from typing import Any

from conversation import MODEL, ROUNDS, SYSTEM, TASKS, Desk, Talk, main
from langchain_core.messages import HumanMessage, SystemMessage, message_chunk_to_message
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI


def _talk(*, responses: bool) -> Talk:
    async def talk(url: str, stream: bool, desk: Desk) -> None:
        tool = StructuredTool.from_function(desk.read)
        options: Any = {"base_url": url, "api_key": "x", "max_retries": 0, "use_responses_api": responses}
        model = ChatOpenAI(model=MODEL, **options).bind_tools([tool])
        messages: list[Any] = [SystemMessage(SYSTEM)]
        for task in TASKS:
            messages.append(HumanMessage(task))
            for _ in range(ROUNDS):
                answer: Any = None
                if stream:
                    async for chunk in model.astream(messages):
                        answer = chunk if answer is None else answer + chunk
                    answer = message_chunk_to_message(answer)
                else:
                    answer = await model.ainvoke(messages)
                messages.append(answer)
                messages += [await tool.ainvoke(call) for call in answer.tool_calls]
                if not answer.tool_calls:
                    desk.texts.append(answer.text)
                    break

    return talk


if __name__ == "__main__":
    main({"chat": _talk(responses=False), "responses": _talk(responses=True)})
