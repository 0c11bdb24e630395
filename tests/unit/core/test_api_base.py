import json
from typing import Any

import pytest

from kvreturn.core.api import APIS, Chat, Completions
from kvreturn.core.api.base import (
    NOT_SHAPING,
    BadRequestError,
    Usage,
    error_body,
    read_common,
    read_model,
    shaping,
    shaping_names,
)
from kvreturn.core.api.choices import read_index
from kvreturn.core.jsontext import ObjectText
from support.turns import Json, compact


def text(obj: Json | bytes) -> ObjectText:
    return ObjectText(obj if isinstance(obj, bytes) else compact(obj))


def test_each_api_has_its_path() -> None:
    assert {api.name: api.path for api in APIS} == {
        "chat": "/v1/chat/completions",
        "completions": "/v1/completions",
        "responses": "/v1/responses",
        "messages": "/v1/messages",
    }


# --- requests ---


@pytest.mark.parametrize(
    ("body", "model"),
    [({"model": "m"}, "m"), ({}, ""), ({"model": None}, ""), ({"model": ""}, ""), ({"model": "é/ü"}, "é/ü")],
)
def test_the_model(body: Json, model: str) -> None:
    assert read_model(text(body)) == model


@pytest.mark.parametrize("model", [1, ["m"], {"m": 1}, True, 0, []])
def test_a_model_that_is_no_text_is_refused(model: object) -> None:
    with pytest.raises(BadRequestError, match="`model` must be a string"):
        read_model(text({"model": model}))


def test_the_last_of_several_models_counts_as_it_does_for_vllm() -> None:
    assert read_model(text(b'{"model":"a","model":"b"}')) == "b"


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        ({}, 1),
        ({"n": None}, 1),
        ({"n": 1}, 1),
        ({"n": 3}, 3),
        ({"best_of": 2}, 2),
        ({"n": 2, "best_of": 5}, 5),
        ({"n": 1, "best_of": None}, 1),
        ({"use_beam_search": True}, 2),
        ({"use_beam_search": "true"}, 2),
        ({"use_beam_search": False}, 1),
        ({"use_beam_search": True, "n": 4}, 4),
        # vLLM's request models turn these into numbers: whatever they turn into, it may be more than one.
        ({"n": "3"}, 2),
        ({"n": 3.0}, 2),
        ({"best_of": "2"}, 2),
        ({"n": [3]}, 2),
    ],
)
def test_fr65_how_many_choices_are_asked_for(body: Json, choices: int) -> None:
    assert read_common(text(body))[0] == choices


@pytest.mark.parametrize(("value", "stream"), [(True, True), (False, False), (None, False), (1, True), ("true", True)])
def test_whether_it_streams(value: object, stream: bool) -> None:  # noqa: FBT001
    assert read_common(text({"stream": value}))[1] is stream
    assert read_common(text({}))[1] is False


@pytest.mark.parametrize("name", ["n", "best_of", "stream", "use_beam_search", "model"])
def test_a_member_that_cannot_be_decoded_is_named(name: str) -> None:
    body = ObjectText(b'{"%s":%s}' % (name.encode(), b"9" * 5000))  # valid JSON, too long a number for Python
    with pytest.raises(BadRequestError, match=f"`{name}`"):
        (read_model if name == "model" else read_common)(body)


def test_what_is_not_known_to_leave_the_prompt_alone_shapes_it() -> None:
    body = {"model": "m", "temperature": 0.5, "n": 1, "tools": [], "some_new_vllm_option": {"a": 1}, "user": "u"}
    assert shaping_names(text(body)) == {"model", "tools", "some_new_vllm_option"}
    assert shaping(text(body), ["model"]) == {"tools": [], "some_new_vllm_option": {"a": 1}}


@pytest.mark.parametrize(
    "name",
    [
        *("model", "messages", "prompt", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "mm_processor_kwargs", "cache_salt"),
        *("reasoning_effort", "truncate_prompt_tokens", "suffix", "prompt_embeds", "response_format", "echo"),
    ],
)
def test_what_may_shape_the_prompt_is_never_left_out(name: str) -> None:
    assert name not in NOT_SHAPING


# --- answers ---


@pytest.mark.parametrize("api", [Chat(), Completions()])
@pytest.mark.parametrize(
    ("chunk", "error"),
    [
        ({"error": {"code": 500, "message": "x"}}, "500"),
        ({"error": {"type": "BadRequestError", "code": None}}, "BadRequestError"),
        ({"error": {"message": "x"}}, "error"),
        ({"error": {"code": "what the user said"}}, "error"),
        ({"error": "overloaded"}, "error"),
        ({"error": ["x"]}, "error"),
        ({"error": True}, "error"),
        ({"error": None}, None),
        ({"error": {}}, None),
        ({"choices": []}, None),
    ],
)
def test_an_error_inside_a_response(api: Any, chunk: Json, error: str | None) -> None:  # noqa: ANN401 - either API
    answer = api.answer()
    answer.read(chunk, stream=True)
    assert answer.error == error


@pytest.mark.parametrize("api", [Chat(), Completions()])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": None},
        {"choices": {}},
        {"choices": "x"},
        {"choices": [None, 1, "x", []]},
        {"choices": [{}]},
        {"choices": [{"index": None, "delta": None, "message": None}]},
        {"choices": [{"index": [], "delta": [], "finish_reason": []}]},
        {"choices": [{"index": {}, "delta": "x", "text": 5}]},
        {"choices": [{"index": "0", "delta": {"content": ["x"]}, "message": {"content": {"a": 1}}}]},
        {"choices": [{"delta": {"tool_calls": {}}, "message": {"tool_calls": "x"}}]},
        {"choices": [{"delta": {"tool_calls": [None, 1, {"index": [], "function": None}]}}]},
        {"choices": [{"message": {"tool_calls": [{"index": {}, "function": {"arguments": 5, "name": []}}]}}]},
        {"usage": "x"},
        {"usage": {"prompt_tokens": "5", "prompt_tokens_details": []}},
        {"error": 0, "usage": []},
    ],
)
def test_odd_chunks_do_not_stop_the_collecting(api: Any, stream: bool, chunk: Json) -> None:  # noqa: ANN401, FBT001
    answer = api.answer()
    answer.read(chunk, stream=stream)
    call = {"index": 1, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    fine = {
        "index": 0,
        "delta": {"tool_calls": [call]},
        "text": "t",
        "message": {"tool_calls": [call]},
        "finish_reason": "stop",
    }
    answer.read({"choices": [fine]}, stream=stream)
    assert answer.finish_reasons[0] == "stop"
    answer.items(strict=False)


def test_finish_reasons_by_choice() -> None:
    answer = Chat().answer()
    for choice in [
        {"index": 1, "finish_reason": None},
        {"index": 1, "finish_reason": "length"},
        {"finish_reason": "stop"},
    ]:
        answer.read({"choices": [choice]}, stream=True)
    assert answer.finish_reasons == {0: "stop", 1: "length"}


def test_usage_keeps_what_a_later_chunk_does_not_say() -> None:
    usage = Usage()
    usage.read({"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 10}})
    usage.read({"completion_tokens": 7, "prompt_tokens_details": None})
    usage.read(None)
    assert (usage.prompt, usage.completion, usage.cached) == (20, 7, 10)
    usage.read({"prompt_tokens": 21})
    assert usage.prompt == 21


@pytest.mark.parametrize(
    ("obj", "index"),
    [({"index": 2}, 2), ({}, 7), ({"index": None}, 7), ({"index": "2"}, 7), ({"index": True}, 7), ({"index": []}, 7)],
)
def test_an_index_is_a_number_or_the_default(obj: Json, index: int) -> None:
    assert read_index(obj, 7) == index


def test_errors_have_openais_shape() -> None:
    assert json.loads(error_body('a "b" é', "BadRequestError", 400)) == {
        "error": {"message": 'a "b" é', "type": "BadRequestError", "param": None, "code": 400}
    }
