"""`anthropic`: an agent by hand, and its own tool runner."""

from typing import Any

import anthropic
from conversation import MODEL, ROUNDS, SCHEMA, SYSTEM, TASKS, Desk, main

_LIMIT = 400


def _client(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="x", max_retries=0)


def _text(message: Any) -> str:
    return "".join(str(block.text) for block in message.content if block.type == "text")


async def messages(url: str, stream: bool, desk: Desk) -> None:
    """Blocks go back as they came; the mark for the cache moves along, as in Anthropic's documentation."""
    said: list[Any] = []
    tools = [{"name": "read", "description": "Read a file.", "input_schema": SCHEMA}]
    async with _client(url) as sdk:
        for task in TASKS:
            mark = {"type": "text", "text": task, "cache_control": {"type": "ephemeral"}}
            for message in said:
                if message["role"] == "user":
                    message["content"][-1].pop("cache_control", None)
            said.append({"role": "user", "content": [mark]})
            for _ in range(ROUNDS):
                request: Any = {
                    "model": MODEL,
                    "system": SYSTEM,
                    "messages": said,
                    "tools": tools,
                    "max_tokens": _LIMIT,
                }
                if stream:
                    async with sdk.messages.stream(**request) as events:
                        answer = await events.get_final_message()
                else:
                    answer = await sdk.messages.create(**request)
                said.append({"role": "assistant", "content": answer.content})
                calls: Any = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    desk.texts.append(_text(answer))
                    break
                results = [{"type": "tool_result", "tool_use_id": c.id, "content": desk.read(**c.input)} for c in calls]
                said.append({"role": "user", "content": results})


async def runner(url: str, stream: bool, desk: Desk) -> None:
    """The tool runner, which keeps the messages itself."""
    said: list[Any] = []

    async def read(path: str, line: int, deep: bool) -> str:
        return desk.read(path, line, deep)

    tool = anthropic.beta_async_tool(read, description="Read a file.", input_schema=SCHEMA)
    async with _client(url) as sdk:
        for task in TASKS:
            said.append({"role": "user", "content": task})
            request: Any = {"model": MODEL, "system": SYSTEM, "messages": said, "tools": [tool], "max_tokens": _LIMIT}
            # vLLM keeps no threads: where the runner believes it does, it sends new messages only.
            running: Any = sdk.beta.messages.tool_runner(**request, stream=stream, max_iterations=ROUNDS, thread=False)
            async for answer in running:
                message = await answer.get_final_message() if stream else answer
                said.append({"role": "assistant", "content": message.content})
                results = await running.generate_tool_call_response()
                if results is not None:
                    said.append(results)
            desk.texts.append(_text(message))


if __name__ == "__main__":
    main({"messages": messages, "tool_runner": runner})
