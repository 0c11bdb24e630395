"""`POST /v1/responses`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvreturn.core.api.base import (
    API,
    HISTORY,
    Answer,
    Prompt,
    load,
    prefill_edit,
    read_common,
    read_list,
    read_model,
    shaping,
)
from kvreturn.core.api.replay import by_value, cleaned, joined_text, kind_of, without_empty
from kvreturn.core.fingerprint import canonical
from kvreturn.core.jsontext import ObjectText

# Tools that vLLM runs itself, in the middle of an answer. Each time it goes on with the same `kv_transfer_params`, and
# so would load P's blocks again, long after P has freed them (`_generate_with_builtin_tools`, vLLM 0.32.0).
_RUN_BY_D = frozenset({"web_search_preview", "code_interpreter", "container", "mcp"})
# On P besides what all APIs drop: the id, which on P is nobody's business, and more that only costs.
_PREFILL_DROPS = frozenset({"request_id", "background", "include"})
_SHAPE = ("model", "input", "instructions", "cache_salt")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ENDED = frozenset({"completed", "incomplete"})
_FAILED = frozenset({"failed", "cancelled"})
# What an item or a part of it has besides what the model gets of it.
_ITEM_EXTRAS = ("id", "status")
_PART_EXTRAS = ("annotations", "logprobs")


class Responses(API):
    """Input items are the items, with the instructions before them; a text is one message of the user."""

    name = "responses"
    path = "/v1/responses"
    begun = re.compile(rb'"response\.[a-z_.]+\.delta"')
    keeps = True
    # The node keeps the response under the id that the client may choose with `request_id`: also over another's.
    ours = (*API.ours, "request_id")

    def read(self, body: ObjectText, *, strict: bool, longest: int = HISTORY) -> Prompt:
        """See `API.read`."""
        items = _input(body, longest)
        model, (_, stream) = read_model(body), read_common(body)
        root: list[Any] = [self.name, model, load(body, "cache_salt")]
        if strict:
            root.append(shaping(body, _SHAPE))
        instructions = load(body, "instructions")
        said = [{"role": "system", "content": instructions}] if instructions else []
        stored = load(body, "previous_response_id")
        return Prompt(
            model=model,
            root=root,
            items=_canonical([*said, *items], strict=strict),
            has_answer=any(i.get("role") == "assistant" or kind_of(i) in _CALLS for i in items),
            choices=1,
            stream=stream,
            tokenizable=False,
            alone=_alone(body),
            stored=stored if isinstance(stored, str) else None,
        )

    def prefill_body(self, body: ObjectText, params: bytes, *, ids: bool) -> bytes:
        """See `API.prefill_body`. P keeps no response: nobody would ask it for one."""
        del ids
        return prefill_edit(body, params, ("max_output_tokens",), {"store": b"false"}, _PREFILL_DROPS)

    def answer(self) -> Answer:
        """See `API.answer`."""
        return ResponsesAnswer()


@dataclass(slots=True)
class ResponsesAnswer(Answer):
    """The output of a response, as its last event or its body has it whole."""

    output: Sequence[Any] = ()

    def read(self, obj: Mapping[str, Any], *, stream: bool) -> None:
        """See `Answer.read`. How a response ended is in its `status`: vLLM calls each last event `completed`."""
        self.read_error(obj if obj.get("type") == "error" else obj.get("error"))
        response = obj.get("response", {}) if stream else obj
        if not isinstance(response, Mapping):
            return
        status = str(response.get("status"))
        if status in _FAILED:
            self.read_error(response.get("error") or status)
        self.usage.read(response.get("usage"))
        if isinstance(response.get("id"), str):
            self.id = response["id"]
        if status in _ENDED:
            self.finish_reasons[0] = status
            output = response.get("output")
            self.output = output if isinstance(output, list) else ()

    def items(self, *, strict: bool) -> Sequence[bytes] | None:
        """See `Answer.items`. Under `strict`, an answer with reasoning tells nothing: templates drop it later."""
        items = [i for i in self.output if isinstance(i, dict)]
        if strict and any(kind_of(i) == "reasoning" for i in items):
            return None
        return _canonical(items, strict=strict)


def _input(body: ObjectText, longest: int) -> list[dict[str, Any]]:
    value = load(body, "input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if value == []:  # behind what is stored, nothing new is needed; elsewhere the node says what it thinks of it
        return []
    return read_list(body, "input", "a text or ", longest=longest)


def _alone(body: ObjectText) -> str | None:
    """Why P cannot prefill this request, or must not."""
    for name in ("previous_response_id", "conversation"):
        if load(body, name) is not None:
            return name  # a part of the prompt is at D only
    if load(body, "background"):
        return "background"  # it may begin when P's blocks are gone, and its end passes nobody
    if load(body, "truncation") not in (None, "disabled"):
        return "truncation"  # vLLM cuts the prompt by the room that the answer may take: P's would be another one
    tools = load(body, "tools")
    kinds = map(kind_of, tools) if isinstance(tools, list) else ()
    return "builtin_tools" if _RUN_BY_D.intersection(kinds) else None


def _canonical(items: Sequence[Mapping[str, Any]], *, strict: bool) -> list[bytes]:
    shaped = (_strict(i) if strict else _loose(i) for i in items)
    return [canonical(i) for i in shaped if i is not None]


def _strict(item: Mapping[str, Any]) -> dict[str, Any]:
    """All of it but for what clients leave out at will: ids, notes on text, the status of what is complete."""
    out = without_empty(item, ("id", "status") if item.get("status") == "completed" else ("id",))
    return out | {"content": cleaned(out.get("content"), _PART_EXTRAS)}


def _loose(item: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """What survives clients that replay an answer: no reasoning, no ids, tool arguments by value; None if nothing."""
    kind = kind_of(item) or "message"
    if kind == "reasoning":
        return None
    if kind == "message":
        return [item.get("role"), _content(item.get("content"))]
    if kind in _CALLS:
        return ["call", item.get("namespace"), item.get("name"), by_value(item.get(_CALLS[kind]))]
    if kind in _RESULTS:
        return ["output", _content(item.get("output"))]
    return without_empty(item, _ITEM_EXTRAS)


def _content(content: Any) -> Any:  # noqa: ANN401 - JSON
    return joined_text(cleaned(content, _PART_EXTRAS)) or ""
