"""`/v1/responses`. What vLLM makes of items is read from vLLM 0.32.0 (entrypoints/openai/responses/utils.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvreturn.core.api import BadRequestError, Prompt, Responses
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.sse import split_events
from support import corpus
from support.official import client_of
from support.turns import COLD, SCOPE, Json, compact

API = Responses()
PARAMS = compact(COLD)
USER: Json = {"role": "user", "content": "Hello"}
TEXT: Json = {"type": "output_text", "text": "4", "annotations": []}
SAID: Json = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [TEXT]}
CALL: Json = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "f",
    "arguments": '{"a": 1, "b": [2.0]}',
    "status": "completed",
}
RESULT: Json = {"type": "function_call_output", "call_id": "call_1", "output": "seven"}
THOUGHT: Json = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "2+2"}],
}


def body_of(value: object = "Hello", **more: Any) -> ObjectText:  # noqa: ANN401 - JSON
    return ObjectText(compact({"model": "m", "input": value, **more}))


def read(value: object = "Hello", *, strict: bool = False, **more: Any) -> Prompt:  # noqa: ANN401 - JSON
    return API.read(body_of(value, **more), strict=strict)


def prefill(**more: Any) -> Json:  # noqa: ANN401 - JSON
    body: Json = json.loads(API.prefill_body(body_of(**more), PARAMS, ids=False))
    return body


def response(*output: Json, status: str = "completed", **more: Any) -> Json:  # noqa: ANN401 - JSON
    usage = {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16},
        "output_tokens": 5,
        "total_tokens": 25,
    }
    return {
        "id": "resp_1",
        "object": "response",
        "status": status,
        "error": None,
        "output": list(output),
        "usage": usage,
    } | more


# --- reading ---


def test_a_request_is_read() -> None:
    prompt = read([USER, SAID, USER], instructions="Be brief.", stream=True, cache_salt="s")
    assert (prompt.model, prompt.choices, prompt.stream, prompt.has_answer) == ("m", 1, True, True)
    assert (prompt.tokenizable, prompt.passes_ids, prompt.alone, prompt.stored) == (False, False, None, None)
    assert len(prompt.items) == 4
    assert not read().has_answer
    assert read([USER, CALL]).has_answer


@pytest.mark.parametrize("value", [None, {}, 5, ["hi"], [USER, None], True])
def test_an_input_of_no_known_shape_is_refused(value: object) -> None:
    with pytest.raises(BadRequestError, match="`input` must be a text or a list"):
        read(value)


def test_odd_types_of_members_do_no_harm() -> None:
    odd: list[Any] = [{"type": []}, {"type": {}, "role": {}}, {"role": [], "content": {}}, {"content": [None, [], 5]}]
    for strict in (False, True):
        assert len(read(odd, strict=strict, tools=[None, {"type": {}}], truncation=None).items) == len(odd)


@pytest.mark.parametrize("strict", [False, True])
def test_a_text_is_a_message_of_the_user_as_instructions_are_one_of_the_system(strict: bool) -> None:  # noqa: FBT001
    assert read("Hello", strict=strict).items == read([USER], strict=strict).items
    system = {"role": "system", "content": "Be brief."}
    said = read([system, USER], strict=strict).items
    assert read("Hello", strict=strict, instructions="Be brief.").items == said


# What only D can run, and why.
ALONE: list[tuple[Json, str | None]] = [
    ({}, None),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"previous_response_id": None}, None),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"background": True}, "background"),
    ({"background": False, "store": True}, None),
    ({"truncation": "auto"}, "truncation"),
    ({"truncation": "disabled"}, None),
    ({"tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]}, None),
    ({"tools": [{"type": "web_search"}, {"type": "local_shell"}]}, None),  # Codex's: vLLM does not run these
    ({"tools": [{"type": "function", "name": "f"}, {"type": "code_interpreter"}]}, "builtin_tools"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "builtin_tools"),
    ({"tools": [{"type": "web_search_preview"}]}, "builtin_tools"),
    ({"tools": [{"type": "container"}]}, "builtin_tools"),
]


@pytest.mark.parametrize(("more", "alone"), ALONE, ids=[json.dumps(m) for m, _ in ALONE])
def test_what_only_d_can_run(more: Json, alone: str | None) -> None:
    prompt = read(**more)
    assert prompt.alone == alone
    assert prompt.stored == more.get("previous_response_id")


def test_behind_a_stored_response_nothing_new_is_needed() -> None:
    assert read([], previous_response_id="resp_1").items == []


# --- the P leg ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("instructions", "Be brief."),
        ("tools", [{"type": "function", "name": "f"}]),
        ("tool_choice", "required"),
        ("reasoning", {"effort": "low"}),
        ("text", {"format": {"type": "json_object"}}),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("previous_input_messages", [{"role": "user", "content": "x"}]),
        ("cache_salt", "salt"),
        ("truncation", "disabled"),
        ("some_new_vllm_option", 1),
    ],
)
def test_p_keeps_what_may_shape_the_prompt(name: str, value: object) -> None:
    assert prefill(**{name: value})[name] == value


@pytest.mark.parametrize(
    ("name", "value"), [("request_id", "resp_x"), ("include", ["message.output_text.logprobs"]), ("top_logprobs", 5)]
)
def test_p_drops_what_only_costs_and_the_id(name: str, value: object) -> None:
    assert name not in prefill(**{name: value})


def test_fr62_p_computes_one_token_streams_nothing_and_stores_nothing() -> None:
    leg = {"stream": False, "max_output_tokens": 1, "kv_transfer_params": COLD, "store": False}
    assert prefill() == {"model": "m", "input": "Hello"} | leg
    assert prefill(stream=True, max_output_tokens=50, store=True) == {"model": "m", "input": "Hello"} | leg


def test_fr63_all_else_reaches_p_byte_for_byte() -> None:
    raw = b'{"model" : "m","input":[ {"role":"user","content":"\\u00e9 \\/ 1.50"} ],"request_id":"r" , "tools":[ ]}'
    out = API.prefill_body(ObjectText(raw), b"{}", ids=False)
    assert out == (
        b'{"model" : "m","input":[ {"role":"user","content":"\\u00e9 \\/ 1.50"} ] , "tools":[ ],"stream":false,'
        b'"max_output_tokens":1,"kv_transfer_params":{},"store":false}'
    )


# --- replayed answers: what clients change, and what is another conversation ---

REPLAYS: dict[str, tuple[list[Json], list[Json]]] = {
    "as it came": ([SAID], [SAID]),
    "without id and status": ([SAID], [{"type": "message", "role": "assistant", "content": [TEXT]}]),
    "as an easy message": ([SAID], [{"role": "assistant", "content": "4"}]),
    "with null members": (
        [SAID],
        [SAID | {"phase": None, "content": [TEXT | {"logprobs": None, "annotations": None}]}],
    ),
    "with log probabilities": ([SAID], [SAID | {"content": [TEXT | {"logprobs": [{"token": "4", "logprob": -1}]}]}]),
    "text in several parts": (
        [SAID | {"content": [TEXT, TEXT | {"text": "2"}]}],
        [{"role": "assistant", "content": "42"}],
    ),
    "reasoning dropped": ([THOUGHT, SAID], [SAID]),
    "reasoning encrypted": (
        [THOUGHT, SAID],
        [{"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAA"}, SAID],
    ),
    "reasoning kept": ([SAID], [THOUGHT, SAID]),
    "arguments written anew": ([CALL], [CALL | {"arguments": '{"a":1,"b":[2.0]}', "id": None, "status": None}]),
    "arguments in another order": ([CALL], [CALL | {"arguments": '{"b": [2.0], "a": 1}'}]),
    "a call without its id": ([CALL], [{k: CALL[k] for k in ("type", "call_id", "name", "arguments")}]),
    "arguments cut off": ([CALL | {"arguments": '{"a'}], [CALL | {"arguments": '{"a', "id": "fc_9"}]),
    "parallel calls": ([CALL, CALL | {"name": "g"}], [CALL, CALL | {"name": "g", "id": "x"}]),
    "a custom tool's call": (
        [{"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "g", "input": "ls"}],
        [{"type": "custom_tool_call", "call_id": "c", "name": "g", "input": "ls"}],
    ),
}


@pytest.mark.parametrize(("output", "replayed"), REPLAYS.values(), ids=REPLAYS)
def test_an_answer_is_found_again_however_clients_replay_it(output: list[Json], replayed: list[Json]) -> None:
    answer = API.answer()
    answer.read(response(*output), stream=False)
    prompt = read([USER])
    trail = API.extend(SCOPE.trail(prompt.root, prompt.items), body_of([USER]), answer, strict=False)
    following = read([USER, *replayed, RESULT])
    assert trail
    assert trail.turn_key() in SCOPE.trail(following.root, following.items).candidates()


DIFFERENT: dict[str, tuple[Json, Json]] = {
    "another text": (SAID, SAID | {"content": [TEXT | {"text": "5"}]}),
    "another role": (USER, USER | {"role": "developer"}),
    "another tool": (CALL, CALL | {"name": "g"}),
    "another namespace": (CALL, CALL | {"namespace": "n"}),
    "other arguments": (CALL, CALL | {"arguments": '{"a": 2, "b": [2.0]}'}),
    "another result": (RESULT, RESULT | {"output": "eight"}),
    "another image": (
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAB"}]},
    ),
    "another file": (
        {"role": "user", "content": [{"type": "input_file", "file_id": "a"}]},
        {"role": "user", "content": [{"type": "input_file", "file_id": "b"}]},
    ),
    "an image or its text": (
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "u"}]},
        {"role": "user", "content": "x"},
    ),
    "another kind of item": ({"type": "item_reference", "id": "a"}, {"type": "web_search_call", "id": "a"}),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_another_item(one: Json, other: Json) -> None:
    for strict in (False, True):
        assert read([one], strict=strict).items != read([other], strict=strict).items


@pytest.mark.parametrize("name", ["as it came", "without id and status", "with null members", "a call without its id"])
def test_trusted_finds_what_is_equal_to_the_letter(name: str) -> None:
    output, replayed = REPLAYS[name]
    answer = API.answer()
    answer.read(response(*output), stream=False)
    assert answer.items(strict=True) == read(replayed, strict=True).items


@pytest.mark.parametrize("name", ["arguments written anew", "arguments in another order", "as an easy message"])
def test_trusted_does_not_find_what_may_be_other_tokens(name: str) -> None:
    output, replayed = REPLAYS[name]
    answer = API.answer()
    answer.read(response(*output), stream=False)
    assert answer.items(strict=True) != read(replayed, strict=True).items


def test_trusted_refuses_an_answer_with_reasoning() -> None:
    answer = API.answer()
    answer.read(response(THOUGHT, SAID), stream=False)
    assert answer.items(strict=True) is None


@pytest.mark.parametrize(
    "more", [{"reasoning": {"effort": "low"}}, {"tools": [{"type": "function", "name": "f"}]}, {"text": {}}]
)
def test_trusted_keeps_apart_what_may_shape_the_prompt(more: Json) -> None:
    assert read(strict=True, **more).root != read(strict=True).root
    assert read(**more).root == read().root


@pytest.mark.parametrize(
    "more",
    [
        {"max_output_tokens": 5},
        {"temperature": 0.5},
        {"store": False},
        {"include": []},
        {"metadata": {"a": "b"}},
        {"max_tool_calls": 2},
        {"instructions": "x"},  # an item
    ],
)
def test_trusted_does_not_mind_what_leaves_the_prompt_alone(more: Json) -> None:
    assert read(strict=True, **more).root == read(strict=True).root


# --- answers ---


def event(kind: str, **more: Any) -> Json:  # noqa: ANN401 - JSON
    return {"type": kind, "sequence_number": 1, **more}


ENDS: list[tuple[Json, dict[int, str], str | None]] = [
    (event("response.completed", response=response(SAID)), {0: "completed"}, None),
    # vLLM's, cut off by the limit: the event has this name all the same.
    (event("response.completed", response=response(SAID, status="incomplete")), {0: "incomplete"}, None),
    (event("response.incomplete", response=response(SAID, status="incomplete")), {0: "incomplete"}, None),
    (
        event("response.failed", response=response(status="failed", error={"code": "server_error", "message": "x"})),
        {},
        "server_error",
    ),
    (event("response.failed", response=response(status="failed")), {}, "error"),
    (event("response.cancelled", response=response(status="cancelled")), {}, "error"),
    (event("error", code="rate_limit", message="x", param=None), {}, "rate_limit"),
    (event("error", code=None, message="x", param=None), {}, "error"),
    ({"error": {"message": "x", "type": "InternalServerError", "code": 500}}, {}, "500"),
    (event("response.in_progress", response=response(status="in_progress", usage=None)), {}, None),
    (event("response.queued", response=response(status="queued", usage=None)), {}, None),
    (event("response.output_text.delta", delta="4", item_id="msg_1"), {}, None),
    (event("response.completed", response=None), {}, None),
]


@pytest.mark.parametrize(
    ("last", "finished", "error"), ENDS, ids=[f"{i}-{e[0].get('type')}" for i, e in enumerate(ENDS)]
)
def test_fr42_how_a_stream_ends(last: Json, finished: dict[int, str], error: str | None) -> None:
    answer = API.answer()
    answer.read(event("response.created", response=response(status="in_progress", usage=None)), stream=True)
    assert (answer.id, answer.finish_reasons, answer.items(strict=False)) == ("resp_1", {}, [])
    answer.read(last, stream=True)
    assert (answer.finish_reasons, answer.error) == (finished, error)
    if finished:
        assert answer.items(strict=False) == read([SAID]).items
        assert (answer.usage.prompt, answer.usage.completion, answer.usage.cached) == (20, 5, 16)


def test_a_body_that_is_only_queued_is_no_end() -> None:
    answer = API.answer()
    answer.read(response(status="queued", usage=None), stream=False)
    assert (answer.id, answer.finish_reasons, answer.error) == ("resp_1", {}, None)


STREAMS = corpus.files("data/streams/responses_*.sse")


@pytest.mark.parametrize("path", STREAMS)
def test_a_real_stream_is_read_as_the_official_client_does(path: Path) -> None:
    text = path.read_bytes()
    with client_of(text) as client:
        events = list(client.responses.create(model="m", input="x", stream=True))
    final: Any = next(e for e in events if e.type in {"response.completed", "response.incomplete"})
    answer = API.answer()
    for part in split_events(text):
        if part.data and part.data != b"[DONE]":
            answer.read(json.loads(part.data), stream=True)
    replayed = [item.model_dump(exclude_unset=True, warnings=False) for item in final.response.output]
    assert answer.items(strict=False) == read([*replayed, USER]).items[:-1]
    assert answer.id == final.response.id
    assert answer.finish_reasons == {0: final.response.status}
    assert answer.error is None
    assert answer.usage.prompt == final.response.usage.input_tokens
    assert answer.usage.completion == final.response.usage.output_tokens
