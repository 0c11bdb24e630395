"""`litellm`: its chat function, which puts streams together by itself, and its Responses function."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices, three times

import litellm
from conversation import MODEL, ROUNDS, SCHEMA, SYSTEM, TASKS, Desk, Talk, main

_FUNCTION = {"name": "read", "description": "Read a file.", "parameters": SCHEMA}


def _chat(provider: str) -> Talk:
    async def talk(url: str, stream: bool, desk: Desk) -> None:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for task in TASKS:
            messages.append({"role": "user", "content": task})
            for _ in range(ROUNDS):
                request: Any = {"model": f"{provider}/{MODEL}", "api_base": url, "api_key": "x", "messages": messages}
                answer: Any = await litellm.acompletion(
                    **request, tools=[{"type": "function", "function": _FUNCTION}], stream=stream
                )
                if stream:
                    answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages=messages)
                message = answer.choices[0].message
                messages.append(message)
                for call in message.tool_calls or ():
                    result = desk.read(**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                if not message.tool_calls:
                    desk.texts.append(message.content)
                    break

    return talk


async def responses(url: str, stream: bool, desk: Desk) -> None:
    """`/v1/responses`. Of models that it does not know, it only pretends to stream."""
    litellm.register_model({f"openai/{MODEL}": {"litellm_provider": "openai", "supports_native_streaming": True}})
    items: list[Any] = []
    tool = {"type": "function", **_FUNCTION, "strict": True}
    for task in TASKS:
        items.append({"role": "user", "content": task})
        for _ in range(ROUNDS):
            request: Any = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "x", "instructions": SYSTEM}
            answer: Any = await litellm.aresponses(**request, input=items, tools=[tool], stream=stream)
            if stream:
                answer = [event async for event in answer][-1].response
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            for call in calls:
                result = desk.read(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
            if not calls:
                desk.texts.append(answer.output_text)
                break


if __name__ == "__main__":
    main({"openai": _chat("openai"), "hosted_vllm": _chat("hosted_vllm"), "responses": responses})
