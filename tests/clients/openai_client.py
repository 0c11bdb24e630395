"""`openai`: agents as its documentation has them."""

import json
from typing import Any

import openai
from conversation import MODEL, RESULT, ROUNDS, SCHEMA, SYSTEM, TASKS, Desk, main

_FUNCTION = {"name": "read", "description": "Read a file.", "parameters": SCHEMA}


async def chat(url: str, stream: bool, desk: Desk) -> None:
    """`/v1/chat/completions`."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as sdk:
        for task in TASKS:
            messages.append({"role": "user", "content": task})
            for _ in range(ROUNDS):
                request: Any = {
                    "model": MODEL,
                    "messages": messages,
                    "tools": [{"type": "function", "function": _FUNCTION}],
                }
                if stream:
                    async with sdk.chat.completions.stream(**request) as events:
                        answer = await events.get_final_completion()
                else:
                    answer = await sdk.chat.completions.create(**request)
                message = answer.choices[0].message
                messages.append(message)
                for call in message.tool_calls or ():
                    result = desk.read(**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                if not message.tool_calls:
                    desk.texts.append(message.content or "")
                    break


async def completions(url: str, stream: bool, desk: Desk) -> None:
    """`/v1/completions`: a log of thoughts and observations that grows; nothing in it is a tool call."""
    prompt = SYSTEM
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as sdk:
        for task in TASKS:
            prompt += f"\nTask: {task}\nThought:"
            request: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 200, "stream": stream}
            answer = await sdk.completions.create(**request)
            text = "".join([c.choices[0].text async for c in answer]) if stream else answer.choices[0].text
            desk.texts.append(text)
            prompt += f"{text}\nObservation: {RESULT}"


async def responses(url: str, stream: bool, desk: Desk) -> None:
    """`/v1/responses`: what came goes back as it is."""
    items: list[Any] = []
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as sdk:
        for task in TASKS:
            items.append({"role": "user", "content": task})
            for _ in range(ROUNDS):
                tool = {"type": "function", **_FUNCTION, "strict": True}
                request: Any = {"model": MODEL, "instructions": SYSTEM, "input": items, "tools": [tool]}
                if stream:
                    async with sdk.responses.stream(**request) as events:
                        answer = await events.get_final_response()
                else:
                    answer = await sdk.responses.create(**request)
                items += answer.output
                calls: Any = [item for item in answer.output if item.type == "function_call"]
                for call in calls:
                    result = desk.read(**json.loads(call.arguments))
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
                if not calls:
                    desk.texts.append(answer.output_text)
                    break


if __name__ == "__main__":
    main({"chat": chat, "completions": completions, "responses": responses})
