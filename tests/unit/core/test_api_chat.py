import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from kvreturn.core.api import BadRequestError, Chat, Prompt
from kvreturn.core.api.chat import ChatAnswer
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.sse import split_events
from support import corpus
from support.official import client_of
from support.turns import COLD, SCOPE, Json, compact

CHAT = Chat()
USER: Json = {"role": "user", "content": "Hello"}
PARAMS = compact(COLD)


def body_of(*messages: Json, **more: Any) -> ObjectText:  # noqa: ANN401 - JSON
    return ObjectText(compact({"model": "m", "messages": list(messages) or [USER], **more}))


def read(*messages: Json, strict: bool = False, **more: Any) -> Prompt:  # noqa: ANN401 - JSON
    return CHAT.read(body_of(*messages, **more), strict=strict)


def prefill(**more: Any) -> Json:  # noqa: ANN401 - JSON
    body: Json = json.loads(CHAT.prefill_body(body_of(**more), PARAMS, ids=False))
    return body


# --- reading ---


def test_a_request_is_read() -> None:
    prompt = read({"role": "system", "content": "s"}, USER, n=2, stream=True, cache_salt="salt")
    assert (prompt.model, prompt.choices, prompt.stream, prompt.has_answer, prompt.tokens) == (
        "m",
        2,
        True,
        False,
        None,
    )
    assert len(prompt.items) == 2
    assert read(USER, {"role": "assistant", "content": "x"}, USER).has_answer


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"messages":null}',
        b'{"messages":[]}',
        b'{"messages":{}}',
        b'{"messages":"hi"}',
        b'{"messages":["hi"]}',
        b'{"messages":[{"role":"user"},null]}',
        b'{"messages":[' + b"9" * 5000 + b"]}",
    ],
)
def test_a_request_without_messages_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="`messages`"):
        CHAT.read(ObjectText(body), strict=False)


# --- the P leg, as a table: field reports 61 to 66 ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "m2"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("parallel_tool_calls", False),
        ("chat_template", "{{ x }}"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("documents", [{"title": "t", "text": "x"}]),
        ("reasoning_effort", "low"),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("add_special_tokens", True),
        ("mm_processor_kwargs", {"fps": 1}),
        ("cache_salt", "salt"),
        ("response_format", {"type": "json_object"}),
        ("stop", ["\n"]),
        ("seed", 7),
        ("temperature", 0.7),
        ("user", "u"),
        ("lora_request", {"a": 1}),
        ("some_new_vllm_option", 1),
    ],
)
def test_fr66_p_keeps_what_may_shape_the_prompt(name: str, value: object) -> None:
    assert prefill(**{name: value})[name] == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream_options", {"include_usage": True}),
        ("min_tokens", 100),
        ("logprobs", True),
        ("top_logprobs", 5),
        ("prompt_logprobs", 1),
        ("echo", True),
        ("best_of", 3),
        ("use_beam_search", True),
    ],
)
def test_fr66_p_drops_what_only_costs(name: str, value: object) -> None:
    assert name not in prefill(**{name: value})


@pytest.mark.parametrize(
    ("client", "p"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": 500}, {"max_tokens": 1}),
        ({"max_tokens": None}, {"max_tokens": 1}),
        ({"max_completion_tokens": 800}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_tokens": 5, "max_completion_tokens": None}, {"max_tokens": 1, "max_completion_tokens": 1}),
    ],
)
def test_fr62_every_output_limit_that_the_client_sent_is_1_on_p(client: Json, p: Json) -> None:
    body = prefill(**client)
    assert {k: v for k, v in body.items() if k.startswith("max")} == p


def test_fr61_min_tokens_is_not_sent_to_p() -> None:
    body = prefill(min_tokens=100, max_tokens=500)
    assert body["max_tokens"] == 1
    assert "min_tokens" not in body


def test_fr64_p_does_not_stream() -> None:
    for stream in (True, False, None):
        body = prefill(stream=stream, stream_options={"include_usage": True})
        assert body["stream"] is False
        assert "stream_options" not in body
    assert prefill()["stream"] is False


def test_fr65_p_computes_one_choice() -> None:
    assert prefill(n=3, best_of=5)["n"] == 1
    assert "n" not in prefill()


def test_fr59_p_gets_the_parameters_it_was_given_and_no_others() -> None:
    assert prefill(kv_transfer_params={"remote_host": "evil"})["kv_transfer_params"] == COLD


def test_fr63_all_else_reaches_p_byte_for_byte() -> None:
    messages = b'[ {"role":"user", "content":"\\u00e9 \\/ 1.50"} ]'
    raw = b'{"model" : "m","messages":%b,"top_p":0.10,"min_tokens":2 , "tools":[ ]}' % messages
    out = CHAT.prefill_body(ObjectText(raw), b"{}", ids=False)
    assert out == (
        b'{"model" : "m","messages":%b,"top_p":0.10 , "tools":[ ],"stream":false,"max_tokens":1,'
        b'"kv_transfer_params":{}}' % messages
    )


# --- /tokenize ---


def test_the_tokenize_body_holds_what_renders_the_prompt() -> None:
    body = body_of(
        USER, tools=[], chat_template_kwargs={"a": 1}, temperature=0, stream=True, cache_salt="s", max_tokens=5
    )
    assert json.loads(CHAT.tokenize_body(body)) == {
        "model": "m",
        "messages": [USER],
        "tools": [],
        "chat_template_kwargs": {"a": 1},
    }


@pytest.mark.parametrize(
    ("more", "tokenizable"),
    [
        ({}, True),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, True),
        ({"tools": [{"type": "function"}], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, False),
        ({"chat_template_kwargs": {"x": 1}, "cache_salt": "s", "temperature": 1, "stop": "x"}, True),
        ({"documents": []}, False),
        ({"reasoning_effort": "low"}, False),
        ({"truncate_prompt_tokens": 5}, False),
        ({"continue_final_message": True}, False),
        ({"add_generation_prompt": False}, False),
        ({"some_new_vllm_option": 1}, False),
    ],
)
def test_only_what_tokenize_renders_alike_is_tokenizable(more: Json, tokenizable: bool) -> None:  # noqa: FBT001
    assert read(USER, **more).tokenizable is tokenizable


@pytest.mark.parametrize(
    ("content", "tokenizable"),
    [
        ("text", True),
        (None, True),
        ([{"type": "text", "text": "a"}], True),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], False),
        ([{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}], False),
        ([5], False),
    ],
)
def test_what_is_more_than_text_is_not_tokenizable(content: object, tokenizable: bool) -> None:  # noqa: FBT001
    assert read({"role": "user", "content": content}).tokenizable is tokenizable


def test_members_that_do_not_matter_are_not_decoded() -> None:
    # 5000 digits are no number to Python. vLLM will say so; it is not for us to refuse what we do not need.
    body = ObjectText(b'{"messages":[{"role":"user"}],"tools":' + b"9" * 5000 + b"}")
    assert CHAT.read(body, strict=False).tokenizable


# --- items: what the fingerprint sees of a message ---


def call(arguments: object, name: str = "f", call_id: str = "c1", **more: Any) -> Json:  # noqa: ANN401 - JSON
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments, **more}}


def says(content: object = "Hi", **more: Any) -> Json:  # noqa: ANN401 - JSON
    return {"role": "assistant", "content": content, **more}


REPLAYED: list[tuple[str, Json, Json, bool, bool]] = [
    # what changes, the message, how it comes back, equal when loose, equal when strict
    ("nothing", says(), says(), True, True),
    ("order of members", says(), {"content": "Hi", "role": "assistant"}, True, True),
    ("null for missing", says(), says(refusal=None, annotations=None, audio=None, function_call=None), True, True),
    ("empty list of calls", says(), says(tool_calls=[]), True, True),
    (
        "null content",
        says(None, tool_calls=[call("{}")]),
        {"role": "assistant", "tool_calls": [call("{}")]},
        True,
        True,
    ),
    ("empty content", says("", tool_calls=[call("{}")]), says(None, tool_calls=[call("{}")]), True, True),
    ("parts for text", says("ab"), says([{"type": "text", "text": "ab"}]), True, False),
    ("several parts", says("ab"), says([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), True, False),
    (
        "cache marks",
        says([{"type": "text", "text": "a"}]),
        says([{"type": "text", "text": "a", "cache_control": {}}]),
        True,
        False,
    ),
    ("reasoning dropped", says(reasoning="because"), says(), True, False),
    ("reasoning under the older name", says(reasoning="b"), says(reasoning_content="b"), True, False),
    (
        "white space in arguments",
        says(None, tool_calls=[call('{"a":1}')]),
        says(None, tool_calls=[call('{ "a": 1 }')]),
        True,
        False,
    ),
    (
        "order in arguments",
        says(None, tool_calls=[call('{"b":1, "a":2}')]),
        says(None, tool_calls=[call('{"a": 2, "b": 1}')]),
        True,
        False,
    ),
    (
        "escapes in arguments",
        says(None, tool_calls=[call('{"a":"\\u00e9"}')]),
        says(None, tool_calls=[call('{"a":"é"}')]),
        True,
        False,
    ),
    (
        "ids of calls",
        says(None, tool_calls=[call("{}")]),
        says(None, tool_calls=[call("{}", call_id="c2")]),
        True,
        False,
    ),
    (
        "index in calls",
        says(None, tool_calls=[call("{}")]),
        says(None, tool_calls=[{"index": 0, **call("{}")}]),
        True,
        False,
    ),
    ("a name for the speaker", says(), says(name="bot"), True, False),
    ("refusal", says(None, refusal="no"), says(None, refusal="no"), True, True),
    # and what is another message in any case
    ("text", says("Hi"), says("Hi!"), False, False),
    ("trailing space", says("Hi"), says("Hi "), False, False),
    ("normal form", says("é"), says("e\u0301"), False, False),
    ("role", says("Hi"), {"role": "user", "content": "Hi"}, False, False),
    ("a role that nobody knows", says("Hi"), {"role": "assistant H", "content": "i"}, False, False),
    ("half of a pair of surrogates", says("Hi\ud83d"), says("Hi\ude00"), False, False),
    ("text that looks like a message", says("{}"), {"role": "", "content": "assistant {}"}, False, False),
    ("refusal dropped", says(None, refusal="no"), says(None), False, False),
    ("call dropped", says("a", tool_calls=[call("{}")]), says("a"), False, False),
    ("name of a call", says(None, tool_calls=[call("{}")]), says(None, tool_calls=[call("{}", "g")]), False, False),
    (
        "value in arguments",
        says(None, tool_calls=[call('{"a":1}')]),
        says(None, tool_calls=[call('{"a":2}')]),
        False,
        False,
    ),
    (
        "type in arguments",
        says(None, tool_calls=[call('{"a":1}')]),
        says(None, tool_calls=[call('{"a":"1"}')]),
        False,
        False,
    ),
    ("arguments cut off", says(None, tool_calls=[call('{"a":')]), says(None, tool_calls=[call('{"b":')]), False, False),
    (
        "text that looks like arguments",
        says(None, tool_calls=[call('"x"')]),
        says(None, tool_calls=[call("x")]),
        False,
        False,
    ),
    (
        "order of calls",
        says(None, tool_calls=[call("1"), call("2")]),
        says(None, tool_calls=[call("2"), call("1")]),
        False,
        False,
    ),
    (
        "an image",
        says([{"type": "image_url", "image_url": {"url": "a"}}]),
        says([{"type": "image_url", "image_url": {"url": "b"}}]),
        False,
        False,
    ),
    (
        "an image beside text",
        says([{"type": "text", "text": "a"}]),
        says([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}]),
        False,
        False,
    ),
]


@pytest.mark.parametrize("case", REPLAYED, ids=[c[0] for c in REPLAYED])
@pytest.mark.parametrize("strict", [False, True])
def test_which_changes_make_another_message(case: tuple[str, Json, Json, bool, bool], strict: bool) -> None:  # noqa: FBT001
    _, message, replayed, loose_equal, strict_equal = case
    equal = read(message, strict=strict).items == read(replayed, strict=strict).items
    assert equal is (strict_equal if strict else loose_equal)


def test_results_of_tools_are_part_of_the_prompt() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    other = {**result, "content": "43"}
    for strict in (False, True):
        assert read(USER, result, strict=strict).items != read(USER, other, strict=strict).items


@pytest.mark.parametrize(
    "content", [5, True, {"a": 1}, ["a", "b"], [{"text": 5}], [[]], "\ud800", [{"text": "\udfff"}], 10**30]
)
@pytest.mark.parametrize("strict", [False, True])
def test_odd_messages_have_items_too(content: object, strict: bool) -> None:  # noqa: FBT001
    assert read({"role": "user", "content": content}, strict=strict).items != read(USER, strict=strict).items


@pytest.mark.parametrize(
    "calls",
    [
        "x",
        {"a": 1},
        [None],
        ["x"],
        [{}],
        [{"function": None}],
        [{"function": {"arguments": {"a": 1}}}],
        [call("\ud800")],
        [call("9" * 5000)],
    ],
)
def test_odd_tool_calls_have_items_too(calls: object) -> None:
    for strict in (False, True):
        assert len(read(USER, says(None, tool_calls=calls), strict=strict).items) == 2


# --- the root: what a whole prompt depends on ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("chat_template_kwargs", {"a": 1}),
        ("documents", [1]),
        ("some_new_vllm_option", 0),
        ("tool_choice", "none"),
    ],
)
def test_shaping_members_make_another_root_when_nothing_is_proven_later(name: str, value: Any) -> None:  # noqa: ANN401 - JSON
    plain, changed = read(strict=True), read(strict=True, **{name: value})
    assert plain.root != changed.root
    assert read().root == read(**{name: value}).root  # tokens are compared later, and may have a common prefix


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("name", "value"), [("model", "m2"), ("cache_salt", "s")])
def test_model_and_salt_make_another_root_always(strict: bool, name: str, value: Any) -> None:  # noqa: ANN401, FBT001
    assert read(strict=strict).root != read(strict=strict, **{name: value}).root


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.1), ("stream", True), ("max_tokens", 5), ("user", "u"), ("seed", 1)]
)
def test_how_the_answer_is_sampled_makes_no_other_root(name: str, value: object) -> None:
    assert read(strict=True).root == read(strict=True, **{name: value}).root


# --- answers ---


def chunks(*deltas: Json, finish: str | None = "stop") -> list[Json]:
    whole = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    return [*whole, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}]


def streamed(parts: list[Json]) -> Any:  # noqa: ANN401 - a ChatAnswer
    answer = CHAT.answer()
    for part in parts:
        answer.read(part, stream=True)
    return answer


def test_a_streamed_answer_is_the_message_that_its_chunks_make_up() -> None:
    answer = streamed(
        chunks(
            {"role": "assistant", "content": ""},
            {"content": "He"},
            {"content": "llo"},
            {
                "content": None,
                "tool_calls": [
                    {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
                ],
            },
            {
                "tool_calls": [
                    {"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"b"'}}
                ]
            },
            {
                "tool_calls": [
                    {"index": 0, "function": {"arguments": '{"a":1}'}},
                    {"index": 1, "function": {"arguments": ":2}"}},
                ]
            },
            finish="tool_calls",
        )
    )
    expected = says("Hello", tool_calls=[call('{"a":1}'), call('{"b":2}', "g", "c2")])
    for strict in (False, True):
        assert answer.items(strict=strict) == read(expected, strict=strict).items
    assert answer.finish_reasons == {0: "tool_calls"}


def test_other_choices_are_not_mixed_in() -> None:
    answer = CHAT.answer()
    for index, content in [(0, "a"), (1, "x"), (0, "b"), (1, "y")]:
        answer.read({"choices": [{"index": index, "delta": {"content": content}}]}, stream=True)
    assert answer.items(strict=False) == read(says("ab")).items


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("stream", [True, False])
def test_fr75_an_answer_with_reasoning_is_known_only_where_tokens_prove(name: str, stream: bool) -> None:  # noqa: FBT001
    answer = CHAT.answer()
    answer.read(
        {"choices": [{"index": 0, "delta" if stream else "message": {"content": "4", name: "2+2"}}]}, stream=stream
    )
    assert answer.items(strict=True) is None
    assert answer.items(strict=False) == read(says("4")).items
    trail = SCOPE.trail([], [b"x"])
    assert CHAT.extend(trail, body_of(), answer, strict=True) is None
    assert CHAT.extend(trail, body_of(), answer, strict=False) == trail.extend(read(says("4")).items)


@pytest.mark.parametrize("value", [None, ""])
def test_empty_reasoning_is_none(value: object) -> None:
    answer = streamed(chunks({"reasoning": value, "content": "4"}))
    assert answer.items(strict=True) == read(says("4"), strict=True).items


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    assert streamed(chunks()).items(strict=True) == read(says(None), strict=True).items


@pytest.mark.parametrize("path", corpus.files("samples/chat_*_D_response.json"))
def test_a_real_answer_comes_back_as_the_client_replays_it(path: Path) -> None:
    body = json.loads(path.read_bytes())
    answer = CHAT.answer()
    answer.read(body, stream=False)
    message = body["choices"][0]["message"]
    kept = {k: v for k, v in message.items() if v is not None}
    for replayed in (message, kept):
        for strict in (False, True):
            assert answer.items(strict=strict) == read(replayed, strict=strict).items
    assert answer.usage.prompt == body["usage"]["prompt_tokens"]
    assert answer.finish_reasons == {0: "length"}


# --- continued messages ---

BEGUN: list[tuple[Any, Json, Json | None]] = [
    ("Well, ", {}, says("Well, 4")),
    ([{"type": "text", "text": "Well, "}], {}, says("Well, 4")),
    (None, {}, says("4")),
    ("Well, ", {"echo": True}, says("4")),  # the answer has all of it then
    ([{"type": "image_url", "image_url": {"url": "u"}}], {}, None),
]


@pytest.mark.parametrize(("begun", "more", "replayed"), BEGUN)
def test_a_continued_message_is_replayed_as_one(begun: Any, more: Json, replayed: Json | None) -> None:  # noqa: ANN401
    messages = [USER, {"role": "assistant", "content": begun}]
    body = body_of(*messages, continue_final_message=True, add_generation_prompt=False, **more)
    answer = CHAT.answer()
    answer.read({"choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}}]}, stream=False)
    prompt = CHAT.read(body, strict=False)
    trail = CHAT.extend(SCOPE.trail(prompt.root, prompt.items), body, answer, strict=False)
    assert CHAT.extend(SCOPE.trail(prompt.root, prompt.items), body, answer, strict=True) is None
    if replayed is None:
        assert trail is None
        return
    following = read(USER, replayed, USER)
    assert trail
    assert trail.turn_key() in SCOPE.trail(following.root, following.items).candidates()


# --- parts that are no text ---

MEDIA: list[tuple[Json, Json]] = [
    ({"type": "image_url", "image_url": {"url": "https://x/a.png"}}, {"image_url": {"url": "https://x/b.png"}}),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"image_url": {"url": "data:,A"}}),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, {"input_audio": {"data": "AAAB"}}),
    ({"type": "video_url", "video_url": {"url": "https://x/a.mp4"}}, {"video_url": {"url": "https://x/b.mp4"}}),
    ({"type": "image_url", "image_url": {"url": "u"}, "uuid": "1"}, {"uuid": "2"}),
]


@pytest.mark.parametrize(("part", "change"), MEDIA)
def test_media_are_told_apart_and_their_prompts_are_not_passed_as_token_ids(part: Json, change: Json) -> None:
    text = {"type": "text", "text": "What is it?"}
    one, other = (read({"role": "user", "content": [text, p]}) for p in (part, part | change))
    assert one.items != other.items
    assert (one.passes_ids, one.tokenizable) == (False, False)


# --- the same as the official client ---


def accumulated(text: bytes) -> tuple[Json, bool]:
    """What the official client accumulates of a response body, and whether it raised an error."""
    state, failed = ChatCompletionStreamState(), False
    with client_of(text) as client:
        try:
            for chunk in client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            ):
                state.handle_chunk(chunk)
        except openai.APIError:
            failed = True
    return state.current_completion_snapshot.model_dump(), failed


STREAMS = [*corpus.files("data/streams/chat_*.sse"), *corpus.files("samples/sse_*chat*.txt")]
# Mistral streams content as lists of parts, which is not OpenAI's format, nor vLLM's.
STREAMS = [s for s in STREAMS if "chat_30" not in str(s.values)]


@pytest.mark.parametrize("path", STREAMS)
def test_a_real_stream_adds_up_to_what_the_official_client_accumulates(path: Path) -> None:
    text = path.read_bytes()
    snapshot, failed = accumulated(text)
    answer: Any = CHAT.answer()
    for event in split_events(text):
        if event.data and event.data != b"[DONE]":
            answer.read(json.loads(event.data), stream=True)
    message = snapshot["choices"][0]["message"]
    # Some providers repeat the role in every chunk; the accumulator strings these together, clients do not send that.
    replayed = {"role": "assistant"} | {k: message.get(k) for k in ("content", "refusal", "tool_calls")}
    for tool_call in replayed["tool_calls"] or ():
        tool_call.pop("index", None)
        tool_call["function"].pop("parsed_arguments", None)
    assert answer.items(strict=False) == read(replayed).items
    if not answer.reasoned:
        assert answer.items(strict=True) == read(replayed, strict=True).items
    assert bool(answer.error) is failed
    assert answer.finish_reasons == {c["index"]: c["finish_reason"] for c in snapshot["choices"] if c["finish_reason"]}
    if snapshot.get("usage"):
        assert answer.usage.prompt == snapshot["usage"]["prompt_tokens"]
        assert answer.usage.completion == snapshot["usage"]["completion_tokens"]


def test_a_long_answer_is_not_kept_token_by_token() -> None:
    answer = ChatAnswer()
    tokens = [f" token{i}" for i in range(5000)]
    for token in tokens:
        answer.read({"choices": [{"index": 0, "delta": {"content": token}}]}, stream=True)
    assert "".join(answer.content) == "".join(tokens)
    assert len(answer.content) < 256
