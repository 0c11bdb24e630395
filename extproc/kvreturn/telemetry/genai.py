"""Names of the GenAI semantic conventions (open-telemetry/semantic-conventions-genai, v0.1.0): numbers and words only.

What a client wrote as text stays out (stop sequences, ids, instructions), as do messages.
"""

from collections.abc import Mapping

from opentelemetry.util.types import AttributeValue

from kvreturn.core.api.base import Answer, Prompt, Usage
from kvreturn.core.jsontext import JSONTextError, ObjectText

OPERATIONS = {"chat": "chat", "completions": "text_completion", "responses": "chat", "messages": "chat"}
"""Operation names by the names of our APIs."""
_REQUEST: Mapping[str, tuple[str, ...]] = {
    "gen_ai.request.max_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "gen_ai.request.temperature": ("temperature",),
    "gen_ai.request.top_p": ("top_p",),
    "gen_ai.request.top_k": ("top_k",),
    "gen_ai.request.frequency_penalty": ("frequency_penalty",),
    "gen_ai.request.presence_penalty": ("presence_penalty",),
    "gen_ai.request.seed": ("seed",),
}
_WHOLE = {"gen_ai.request.max_tokens", "gen_ai.request.top_k", "gen_ai.request.seed"}
_INT64 = 2**63  # OTLP has no larger numbers; the exporter logs a traceback for each
_MOST_REASONS = 128  # choices of an answer; the rest says nothing new


def of_request(body: ObjectText, prompt: Prompt) -> dict[str, AttributeValue]:
    """What a request asks for, as far as it is numbers."""
    told: dict[str, AttributeValue] = {"gen_ai.request.stream": prompt.stream}
    if prompt.choices != 1 and abs(prompt.choices) < _INT64:
        told["gen_ai.request.choice.count"] = prompt.choices
    for name, members in _REQUEST.items():
        value = next((v for v in (_load(body, m) for m in members if m in body) if v is not None), None)
        if type(value) is int and abs(value) < _INT64:
            told[name] = value if name in _WHOLE else float(value)
        elif type(value) is float and name not in _WHOLE:
            told[name] = value
    return told


def of_answer(answer: Answer, choices: int, prefill: Usage | None) -> dict[str, AttributeValue]:
    """What an answer brought.

    Args:
        answer: the answer, whole or cut.
        choices: how many there should be; one that did not end has `error` in the place of its reason.
        prefill: as P counted, if P did the prompt. D's count of cached tokens holds what it got from P.
    """
    usage = answer.usage
    cached = usage.cached if prefill is None else prefill.cached or 0
    told: dict[str, AttributeValue | None] = {
        "gen_ai.usage.input_tokens": usage.prompt if usage.prompt is not None or prefill is None else prefill.prompt,
        "gen_ai.usage.output_tokens": usage.completion,
        "gen_ai.usage.cache_read.input_tokens": cached,
        "gen_ai.usage.cache_write.input_tokens": usage.written,
        "gen_ai.response.finish_reasons": [
            answer.finish_reasons.get(i, "error")
            for i in range(min(max([choices - 1, *answer.finish_reasons]) + 1, _MOST_REASONS))
        ],
    }
    return known(told)


def known(told: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """Attributes without those of which nobody told."""
    return {name: value for name, value in told.items() if value is not None}


def _load(body: ObjectText, name: str) -> object:
    try:
        return body.load(name)
    except JSONTextError:
        return None  # the node will say what is wrong with it
