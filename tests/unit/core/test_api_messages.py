"""`/v1/messages`. What vLLM makes of blocks is read from vLLM 0.32.0 (entrypoints/anthropic/serving.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvreturn.core.api import BadRequestError, Messages, Prompt
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.sse import split_events
from support import corpus
from support.official import anthropic_client_of
from support.turns import COLD, SCOPE, Json, compact

API = Messages()
PARAMS = compact(COLD)
USER: Json = {"role": "user", "content": "Hello"}
TEXT: Json = {"type": "text", "text": "4"}
USE: Json = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1, "b": [2.0]}}
THOUGHT: Json = {"type": "thinking", "thinking": "2+2", "signature": "abc"}
RESULT: Json = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "seven"}]}


def said(*blocks: Json | str) -> Json:
    return {"role": "assistant", "content": list(blocks) if blocks[1:] or isinstance(blocks[0], dict) else blocks[0]}


def body_of(*messages: Json, **more: Any) -> ObjectText:  # noqa: ANN401 - JSON
    return ObjectText(compact({"model": "m", "messages": list(messages) or [USER], "max_tokens": 9, **more}))


def read(*messages: Json, strict: bool = False, **more: Any) -> Prompt:  # noqa: ANN401 - JSON
    return API.read(body_of(*messages, **more), strict=strict)


def prefill(**more: Any) -> Json:  # noqa: ANN401 - JSON
    body: Json = json.loads(API.prefill_body(body_of(**more), PARAMS, ids=False))
    return body


def message(*blocks: Json, stop: str | None = "end_turn", **usage: int) -> Json:
    counted = usage or {"input_tokens": 20, "output_tokens": 5}
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": list(blocks),
        "model": "m",
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": counted,
    }


# --- reading ---


def test_a_request_is_read() -> None:
    prompt = read(USER, said("4"), USER, system="Be brief.", stream=True, cache_salt="s")
    assert (prompt.model, prompt.choices, prompt.stream, prompt.has_answer) == ("m", 1, True, True)
    assert (prompt.tokenizable, prompt.passes_ids, prompt.alone, prompt.stored) == (False, False, None, None)
    assert len(prompt.items) == 4
    assert not read().has_answer


@pytest.mark.parametrize("messages", [None, [], {}, "hi", ["hi"], [{"role": "user"}, None]])
def test_a_request_without_messages_is_refused(messages: object) -> None:
    with pytest.raises(BadRequestError, match="`messages` must be a list"):
        API.read(ObjectText(compact({"messages": messages})), strict=False)


def test_odd_types_of_members_do_no_harm() -> None:
    odd: list[Json] = [
        {"role": [], "content": {}},
        {"content": [None, [], 5, {"type": []}, {"type": "text", "text": 5}]},
    ]
    for strict in (False, True):
        assert len(read(*odd, strict=strict, system={}).items) == len(odd)


def test_odd_requests_are_told_what_is_wrong_in_the_shape_of_this_api() -> None:
    for code, kind in [
        (400, "invalid_request_error"),
        (403, "permission_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (503, "overloaded_error"),
        (415, "invalid_request_error"),
        (500, "api_error"),
        (502, "api_error"),
        (504, "timeout_error"),
    ]:
        expected = {"type": "error", "error": {"type": kind, "message": "no"}}
        assert json.loads(API.error("no", "BadRequestError", code)) == expected


# --- the P leg ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("system", "Be brief."),
        ("tools", [{"name": "f", "input_schema": {}}]),
        ("tool_choice", {"type": "any"}),
        ("thinking", {"type": "enabled", "budget_tokens": 2048}),  # vLLM lets a prefill leg have a smaller limit
        ("output_config", {"effort": "low"}),
        ("chat_template_kwargs", {"a": 1}),
        ("cache_salt", "salt"),
        ("some_new_vllm_option", 1),
    ],
)
def test_p_keeps_what_may_shape_the_prompt(name: str, value: object) -> None:
    assert prefill(**{name: value})[name] == value


def test_fr62_p_computes_one_token_and_streams_nothing() -> None:
    leg = {"stream": False, "max_tokens": 1, "kv_transfer_params": COLD}
    assert prefill(stream=True, max_tokens=500) == {"model": "m", "messages": [USER]} | leg


# --- replayed answers ---

REPLAYS: dict[str, tuple[list[Json], Json]] = {
    "as it came": ([TEXT, USE], said(TEXT, USE)),
    "text as a string": ([TEXT], said("4")),
    "text in several blocks": ([TEXT, TEXT], said("44")),
    "an empty text kept": ([TEXT | {"text": ""}, USE], said(USE)),
    "thinking dropped": ([THOUGHT, TEXT], said(TEXT)),
    "thinking kept": ([THOUGHT, TEXT], said(THOUGHT, TEXT)),
    "thinking redacted": ([THOUGHT, TEXT], said({"type": "redacted_thinking", "data": "x"}, TEXT)),
    "marked for a cache": ([TEXT, USE], said(TEXT, USE | {"cache_control": {"type": "ephemeral"}})),
    "with null members": ([TEXT], said(TEXT | {"citations": None})),
    "input in another order": ([USE], said(USE | {"input": {"b": [2.0], "a": 1}})),
    "another id of a call": ([USE], said(USE | {"id": "call_1"})),
    "a call without input": ([USE | {"input": {}}], said({k: USE[k] for k in ("type", "id", "name")})),
    "parallel calls": ([USE, USE | {"name": "g"}], said(USE, USE | {"name": "g"})),
}


@pytest.mark.parametrize(("blocks", "replayed"), REPLAYS.values(), ids=REPLAYS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_an_answer_is_found_again_however_clients_replay_it(
    blocks: list[Json],
    replayed: Json,
    stream: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    answer = API.answer()
    for part in events_of(*blocks) if stream else [message(*blocks)]:
        answer.read(part, stream=stream)
    prompt = read(USER)
    trail = API.extend(SCOPE.trail(prompt.root, prompt.items), body_of(USER), answer, strict=False)
    following = read(USER, replayed, RESULT)
    assert trail
    assert trail.turn_key() in SCOPE.trail(following.root, following.items).candidates()


def events_of(*blocks: Json) -> list[Json]:
    """A stream of these blocks, in pieces of one character."""
    events: list[Json] = [{"type": "message_start", "message": message(stop=None)}, {"type": "ping"}]
    for i, block in enumerate(blocks):
        member, kind = {
            "text": ("text", "text_delta"),
            "thinking": ("thinking", "thinking_delta"),
            "tool_use": ("partial_json", "input_json_delta"),
        }[block["type"]]
        pieces = json.dumps(block["input"]) if member == "partial_json" else block[member]
        empty: Json = {"input": {}} if member == "partial_json" else {member: ""}
        events.append({"type": "content_block_start", "index": i, "content_block": block | empty})
        events += [{"type": "content_block_delta", "index": i, "delta": {"type": kind, member: c}} for c in pieces]
        if "signature" in block:
            signed = {"type": "signature_delta", "signature": block["signature"]}
            events.append({"type": "content_block_delta", "index": i, "delta": signed})
        events.append({"type": "content_block_stop", "index": i})
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    return [*events, {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 7}}, {"type": "message_stop"}]


IMAGE: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
DIFFERENT: dict[str, tuple[Json, Json]] = {
    "another text": (said("4"), said("5")),
    "another role": (USER, USER | {"role": "system"}),
    "another tool": (said(USE), said(USE | {"name": "g"})),
    "other input": (said(USE), said(USE | {"input": {"a": 2, "b": [2.0]}})),
    "another result": (RESULT, {"role": "user", "content": [RESULT["content"][0] | {"content": "eight"}]}),
    "another image": (
        {"role": "user", "content": [IMAGE]},
        {"role": "user", "content": [IMAGE | {"source": IMAGE["source"] | {"data": "AAAB"}}]},
    ),
    "another image in a result": (
        {"role": "user", "content": [RESULT["content"][0] | {"content": [IMAGE]}]},
        {"role": "user", "content": [RESULT["content"][0] | {"content": [IMAGE | {"source": {"url": "x"}}]}]},
    ),
    "text and an image in another order": (
        {"role": "user", "content": [IMAGE, TEXT]},
        {"role": "user", "content": [TEXT, IMAGE]},
    ),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_another_item(one: Json, other: Json) -> None:
    for strict in (False, True):
        assert read(one, strict=strict).items != read(other, strict=strict).items


SYSTEMS: list[tuple[Any, Any, bool]] = [
    ("Be brief.", [{"type": "text", "text": "Be brief."}], True),
    ("Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}], True),
    ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], True),
    # Claude Code's: another one in every request, and vLLM leaves it out.
    (
        "Be brief.",
        [{"type": "text", "text": "x-anthropic-billing-header: cch=1f;"}, {"type": "text", "text": "Be brief."}],
        True,
    ),
    ("Be brief.", "Be long.", False),
    ("Be brief.", None, False),
]


@pytest.mark.parametrize(("one", "other", "same"), SYSTEMS)
def test_the_system_prompt_is_the_first_item(one: object, other: object, same: bool) -> None:  # noqa: FBT001
    assert (read(system=one).items == read(system=other).items) is same


def test_trusted_takes_no_attribution_for_nothing() -> None:
    blocks = [[{"type": "text", "text": f"x-anthropic-billing-header: cch={n};"}] for n in "12"]
    one, other = (read(system=b, strict=True).items for b in blocks)
    assert one != other


@pytest.mark.parametrize("name", ["as it came", "text as a string", "marked for a cache", "with null members"])
def test_trusted_finds_what_is_equal_to_the_letter(name: str) -> None:
    blocks, replayed = REPLAYS[name]
    answer = API.answer()
    answer.read(message(*blocks), stream=False)
    assert answer.items(strict=True) == read(replayed, strict=True).items


@pytest.mark.parametrize("name", ["input in another order", "another id of a call", "text in several blocks"])
def test_trusted_does_not_find_what_may_be_other_tokens(name: str) -> None:
    blocks, replayed = REPLAYS[name]
    answer = API.answer()
    answer.read(message(*blocks), stream=False)
    assert answer.items(strict=True) != read(replayed, strict=True).items


def test_trusted_refuses_an_answer_with_thinking() -> None:
    answer = API.answer()
    answer.read(message(THOUGHT, TEXT), stream=False)
    assert answer.items(strict=True) is None


@pytest.mark.parametrize(
    "more", [{"thinking": {"type": "disabled"}}, {"tools": [{"name": "f"}]}, {"output_config": {}}]
)
def test_trusted_keeps_apart_what_may_shape_the_prompt(more: Json) -> None:
    assert read(strict=True, **more).root != read(strict=True).root
    assert read(**more).root == read().root


@pytest.mark.parametrize(
    "more", [{"max_tokens": 5}, {"stop_sequences": ["x"]}, {"metadata": {"user_id": "u"}}, {"system": "x"}]
)
def test_trusted_does_not_mind_what_leaves_the_prompt_alone(more: Json) -> None:
    assert read(strict=True, **more).root == read(strict=True).root


# --- answers ---


def test_fr44_usage_is_merged_field_by_field() -> None:
    answer = API.answer()
    started = message(stop=None, input_tokens=20, cache_read_input_tokens=100, output_tokens=1)
    answer.read({"type": "message_start", "message": started}, stream=True)
    answer.read(
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}}, stream=True
    )
    assert (answer.usage.prompt, answer.usage.completion, answer.usage.cached) == (120, 7, 100)


def test_fr122_what_was_cached_is_added_to_the_input() -> None:
    answer = API.answer()
    answer.read(
        message(input_tokens=20, cache_read_input_tokens=100, cache_creation_input_tokens=30, output_tokens=7),
        stream=False,
    )
    assert (answer.usage.prompt, answer.usage.completion, answer.usage.cached) == (150, 7, 100)


@pytest.mark.parametrize("stop", ["end_turn", "max_tokens", "stop_sequence", "tool_use"])
def test_how_a_message_ends(stop: str) -> None:
    answer = API.answer()
    answer.read(message(TEXT, stop=stop), stream=False)
    assert (answer.finish_reasons, answer.error, answer.id) == ({0: stop}, None, None)


def test_fr41_an_error_in_the_stream_is_told() -> None:
    answer = API.answer()
    for part in events_of(TEXT)[:4]:
        answer.read(part, stream=True)
    answer.read({"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, stream=True)
    assert (answer.error, answer.finish_reasons) == ("overloaded_error", {})


def test_a_call_cut_off_by_the_limit_is_compared_as_text() -> None:
    answer = API.answer()
    for part in events_of(USE)[:8]:
        answer.read(part, stream=True)
    answer.read({"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}, stream=True)
    assert answer.items(strict=False) == read(said(USE | {"input": '{"a":'})).items


@pytest.mark.parametrize("path", corpus.files("data/streams/messages_*.sse"))
def test_fr43_a_real_stream_is_read_as_the_official_client_does(path: Path) -> None:
    text = path.read_bytes()
    with anthropic_client_of(text) as client, client.messages.stream(model="m", max_tokens=9, messages=[]) as stream:
        final = stream.get_final_message()
    answer = API.answer()
    for part in split_events(text):
        if part.data:
            answer.read(json.loads(part.data), stream=True)
    replayed = said(*(block.model_dump(exclude_unset=True) for block in final.content), {})
    replayed["content"].pop()
    assert answer.items(strict=False) == read(replayed).items
    assert answer.finish_reasons == {0: final.stop_reason}
    assert answer.error is None
    usage = final.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert answer.usage.prompt == usage.input_tokens + cached
    assert answer.usage.completion == usage.output_tokens
