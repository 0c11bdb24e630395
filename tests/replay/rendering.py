"""From a request's body to token ids, as a node does it: vLLM's conversions, chat templates, a real tokenizer.

The templates are written after three families in use, each with what it does to a prefix: ChatML renders every message
where it stands and no thinking at all; the second keeps thinking only behind the last question; the third has the list
of tools directly before the last question.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Json = dict[str, Any]

_SPECIAL = ("<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULT]", "</s>")
_CALLS = """
{%- macro calls(m) %}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- endmacro %}
"""
_CHATML = (
    _CALLS
    + """
{%- if tools %}<|im_start|>system
You may call these functions:
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{{ calls(m) }}<|im_end|>
{% endfor %}{{ "<|im_start|>assistant\\n" }}"""
)
_THINKING = (
    _CALLS
    + """
{%- set at = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|im_start|>system
# Tools
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.reasoning and loop.index0 > at.last %}<think>
{{ m.reasoning }}
</think>

{% endif %}{{ m.content or '' }}{{ calls(m) }}<|im_end|>
{% endif %}
{%- endfor %}{{ "<|im_start|>assistant\\n" }}"""
)
_TOOLS_LATE = """
{%- set at = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}[CALLS]{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}</s>
{%- elif m.role == 'tool' %}[RESULT]{{ m.content }}[/INST]
{%- else %}
{%- if tools and loop.index0 == at.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Template:
    """A chat template, and how a model that was trained on it writes.

    Attributes:
        name: for reports.
        source: Jinja.
        call: of a function, with `%s` for name and arguments.
        end: token that ends an answer.
    """

    name: str
    source: str
    call: str
    end: str

    def render(self, messages: Sequence[Json], tools: Sequence[Json]) -> str:
        text: str = self._compiled.render(messages=messages, tools=tools)
        return text

    def written(self, message: Mapping[str, Any]) -> str:
        """What the model wrote, of which this message was parsed: its thinking, and arguments in its own spacing."""
        text = f"<think>\n{message['reasoning']}\n</think>\n\n" if message.get("reasoning") else ""
        text += message.get("content") or ""
        for call in message.get("tool_calls") or []:
            text += self.call % (call["function"]["name"], call["function"]["arguments"])
        return text + self.end

    @cached_property
    def _compiled(self) -> Any:  # noqa: ANN401 - jinja2.Template, unless the environment says otherwise
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # as transformers has it
        return environment.from_string(self.source)


_HERMES = '\n<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TEMPLATES = (
    Template("chatml", _CHATML, _HERMES, "<|im_end|>"),
    Template("drops thinking", _THINKING, _HERMES, "<|im_end|>"),
    Template("tools late", _TOOLS_LATE, "[CALLS]%s %s", "</s>"),
)


def trained(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of 1,500 tokens, trained on these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1500, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return tokenizer


def messages_of(path: str, body: Mapping[str, Any]) -> tuple[list[Json], list[Json]]:
    """Messages and tools of a request, as vLLM 0.32.0 gives them to the template."""
    tools = body.get("tools") or []
    if path == "/v1/chat/completions":
        messages = [_chat(m) for m in body["messages"]]
    elif path == "/v1/messages":
        system = [{"role": "system", "content": _text(body["system"])}] if body.get("system") else []
        messages = system + [m for said in body["messages"] for m in anthropic_messages(said)]
        tools = [{"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}} for t in tools]
    else:
        instructions = body.get("instructions")
        messages = [{"role": "system", "content": instructions}] if instructions else []
        messages += response_messages(body["input"])
        tools = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in tools]
    return [_parsed(m) for m in messages], tools


def _chat(message: Json) -> Json:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return {**message, "content": _text(message.get("content")), "reasoning": reasoning}


def anthropic_messages(message: Json) -> list[Json]:
    """`/v1/messages`: results of tools become messages of their own, before what else the user says."""
    if isinstance(message["content"], str):
        return [message]
    results: list[Json] = []
    texts, thinking, calls = [], [], []
    for block in message["content"]:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "thinking":
                thinking.append(block["thinking"])
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                calls.append({"id": block["id"], "function": {"name": block["name"], "arguments": arguments}})
            case "tool_result":
                results.append({"role": "tool", "content": _text(block["content"])})
            case "redacted_thinking":
                pass
            case _:  # vLLM leaves out what it does not know; here it shows, so that a change of it is seen
                texts.append(json.dumps({k: v for k, v in block.items() if v is not None}, sort_keys=True))
    said = {"role": message["role"], "content": "".join(texts), "reasoning": "".join(thinking), "tool_calls": calls}
    return [*results, said] if texts or thinking or calls else results


def response_messages(items: Sequence[Json]) -> list[Json]:
    """`/v1/responses`: neighbouring items of the assistant make one message."""
    messages: list[Json] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "content": item["output"]})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text(item["content"])})
        else:
            last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
            name, value = _of_assistant(kind, item)
            if last is None or (name in last and name != "tool_calls"):
                last = {"role": "assistant"}
                messages.append(last)
            if name == "tool_calls":
                last.setdefault(name, []).append(value)
            else:
                last[name] = value
    return messages


def _of_assistant(kind: str, item: Json) -> tuple[str, Any]:
    if kind == "function_call":
        return "tool_calls", {"function": {"name": item["name"], "arguments": item["arguments"]}}
    if kind == "reasoning":
        return "reasoning", _text(item.get("content") or item.get("summary") or [])
    if kind == "message":
        return "content", _text(item["content"])
    return "content", json.dumps({k: v for k, v in item.items() if v is not None}, sort_keys=True)


def _text(content: Any) -> Any:  # noqa: ANN401 - JSON
    return "".join(p["text"] for p in content) if isinstance(content, list) else content


def _parsed(message: Json) -> Json:
    """Templates get a call's arguments as an object, and a broken text as none (vLLM: `_postprocess_messages`)."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"] or "{}")
        calls.append({"function": {"name": call["function"]["name"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
