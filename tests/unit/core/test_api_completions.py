import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvreturn.core.api import Answer, BadRequestError, Chat, Completions, Prompt
from kvreturn.core.fingerprint import Trail
from kvreturn.core.jsontext import ObjectText
from kvreturn.core.sse import split_events
from support import corpus
from support.official import client_of
from support.turns import COLD, SCOPE, Json, compact

API = Completions()
TEXT = "The quick brown fox jumps over the lazy dog. " * 20  # 900 bytes: 3 pieces of 256 and a rest


def body_of(prompt: object = TEXT, **more: Any) -> ObjectText:  # noqa: ANN401 - JSON
    return ObjectText(compact({"model": "m", "prompt": prompt, **more}))


def read(prompt: object = TEXT, *, strict: bool = False, **more: Any) -> Prompt:  # noqa: ANN401 - JSON
    return API.read(body_of(prompt, **more), strict=strict)


def trail_of(prompt: Prompt) -> Trail:
    return SCOPE.trail(prompt.root, prompt.items)


def answer_of(*texts: str) -> Answer:
    answer = API.answer()
    for text in texts:
        answer.read({"choices": [{"index": 0, "text": text, "finish_reason": None}]}, stream=True)
    return answer


# --- reading ---


@pytest.mark.parametrize("prompt", [None, "", [], 5, {"a": 1}, True])
def test_a_request_without_a_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(BadRequestError, match="`prompt` must be a text or a list of token ids"):
        read(prompt)


def test_a_prompt_that_cannot_be_decoded_is_named() -> None:
    for text in (b"{}", b'{"prompt":' + b"9" * 5000 + b"}"):
        with pytest.raises(BadRequestError, match="`prompt`"):
            API.read(ObjectText(text), strict=False)


def test_text_is_cut_into_pieces_of_256_bytes() -> None:
    assert [bytes(i) for i in read().items] == [TEXT.encode()[i : i + 256] for i in (0, 256, 512)]
    assert read("x" * 255).items == []
    assert len(read("é" * 128).items) == 1
    assert len(read("\ud800" * 256).items) == 3


def test_token_ids_are_cut_into_pieces_of_64() -> None:
    ids = list(range(1000, 1150))
    prompt = read(ids)
    assert [array("I", bytes(i)).tolist() for i in prompt.items] == [ids[:64], ids[64:128]]
    assert prompt.tokens == ids
    assert not prompt.tokenizable  # needs none


@pytest.mark.parametrize("prompt", [["a", "b"], ["a"], [[1, 2], [3]], [[1, 2]], [1, "a"], [1.0], [True], [-1], [2**32]])
def test_several_prompts_in_one_request_are_never_followed(prompt: object) -> None:
    read_prompt = read(prompt)
    assert read_prompt.choices == 2
    assert read_prompt.items == []
    assert read_prompt.tokens is None
    assert not read_prompt.tokenizable
    assert isinstance(prompt, list)
    assert read_prompt.alone == ("several_prompts" if len(prompt) > 1 else None)


@pytest.mark.parametrize(
    ("more", "plain"),
    [
        ({}, True),
        ({"max_tokens": 5, "temperature": 0, "stop": ["x"], "cache_salt": "s", "stream": True}, True),
        ({"truncate_prompt_tokens": 10}, False),
        ({"add_special_tokens": False}, False),
        ({"prompt_embeds": "x"}, False),
        ({"suffix": "x"}, False),
        ({"some_new_vllm_option": 1}, False),
    ],
)
def test_what_else_changes_the_prompt_leaves_no_tokens_to_prove_with(more: Json, plain: bool) -> None:  # noqa: FBT001
    ids = list(range(100))
    assert read(**more).tokenizable is plain
    assert read(ids, **more).tokens == (ids if plain else None)


def test_text_and_token_ids_never_meet() -> None:
    ids = array("I", TEXT.encode()[:512]).tolist()
    assert [bytes(i) for i in read(ids).items] == [bytes(i) for i in read(TEXT[:512]).items]
    assert trail_of(read(ids)).digests != trail_of(read(TEXT[:512])).digests


@pytest.mark.parametrize(("name", "value"), [("model", "m2"), ("cache_salt", "s")])
def test_model_and_salt_make_another_root(name: str, value: Any) -> None:  # noqa: ANN401 - JSON
    assert read(**{name: value}).root != read().root


def test_shaping_members_make_another_root_when_nothing_is_proven_later() -> None:
    assert read(strict=True, truncate_prompt_tokens=5).root != read(strict=True).root
    assert read(truncate_prompt_tokens=5).root == read().root
    assert read(strict=True, temperature=1).root == read(strict=True).root


# --- the bodies of P ---


def test_the_p_leg() -> None:
    more: Json = {"max_tokens": 500, "min_tokens": 5, "echo": True, "logprobs": 3, "n": 2, "best_of": 3, "stream": True}
    more |= {
        "stream_options": {"include_usage": True},
        "prompt_logprobs": 1,
        "temperature": 0,
        "add_special_tokens": False,
    }
    out = json.loads(API.prefill_body(body_of(**more), compact(COLD), ids=False))
    assert out == {
        "model": "m",
        "prompt": TEXT,
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "temperature": 0,
        "add_special_tokens": False,
        "kv_transfer_params": COLD,
    }
    assert json.loads(API.prefill_body(body_of(), compact(COLD), ids=False)) == {
        "model": "m",
        "prompt": TEXT,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": COLD,
    }


def test_the_tokenize_body() -> None:
    body = body_of(max_tokens=5, cache_salt="s", add_special_tokens=True)
    assert json.loads(API.tokenize_body(body)) == {"model": "m", "prompt": TEXT, "add_special_tokens": True}


# --- what the next prompt begins with ---


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 300, 511, 512, 900])
@pytest.mark.parametrize("answer", ["", "x", "y" * 100, "z" * 1000, "é" * 300])
def test_the_next_prompt_is_found_wherever_its_pieces_begin(length: int, answer: str) -> None:
    first = read("a" * length or "b")
    trail = API.extend(trail_of(first), body_of("a" * length or "b"), answer_of(answer[:7], answer[7:]), strict=False)
    assert trail
    following = trail_of(read(("a" * length or "b") + answer + " and then more " * 40))
    assert trail.digests == following.digests[: trail.depth + 1]
    assert trail.depth == (max(length, 1) + len(answer.encode())) // 256
    if trail.depth:
        assert trail.turn_key() in following.candidates()


def test_an_answer_to_token_ids_is_text_so_only_the_prompt_is_known() -> None:
    ids = list(range(200))
    assert API.extend(trail_of(read(ids)), body_of(ids), answer_of("x"), strict=False) is None
    assert trail_of(read(ids)).prompt_key() in trail_of(read([*ids, 7, 8, 9])).candidates()


def test_without_proof_the_answer_is_never_known() -> None:
    assert API.extend(trail_of(read(strict=True)), body_of(), answer_of("x"), strict=True) is None


def test_an_answer_that_repeats_its_prompt_is_not_taken_for_what_follows_it() -> None:
    assert API.extend(trail_of(read()), body_of(echo=True), answer_of(TEXT + "x"), strict=False) is None


def test_an_answer_of_another_api_is_none() -> None:
    assert API.extend(trail_of(read()), body_of(), Chat().answer(), strict=False) is None
    assert answer_of("x").items(strict=False) is None


# --- answers ---


@pytest.mark.parametrize("path", corpus.files("samples/completions_*_D_response.json"))
def test_real_answers(path: Path) -> None:
    body = json.loads(path.read_bytes())
    answer: Any = API.answer()
    answer.read(body, stream=False)
    assert "".join(answer.text) == body["choices"][0]["text"]
    assert answer.finish_reasons == {0: "length"}
    assert answer.usage.prompt == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "path", [*corpus.files("data/streams/completions_*.sse"), *corpus.files("samples/sse_*completions*.txt")]
)
def test_a_real_stream_adds_up_to_what_the_official_client_sees(path: Path) -> None:
    text = path.read_bytes()
    answer: Any = API.answer()
    for event in split_events(text):
        if event.data and event.data != b"[DONE]":
            answer.read(json.loads(event.data), stream=True)
    with client_of(text) as client:
        seen = list(client.completions.create(model="m", prompt="x", stream=True))
    assert "".join(answer.text) == "".join(c.text for chunk in seen for c in chunk.choices if c.index == 0)
    finished = [(c.index, c.model_dump()["finish_reason"]) for chunk in seen for c in chunk.choices]
    assert answer.finish_reasons == {index: reason for index, reason in finished if reason}
    usage = [chunk.usage for chunk in seen if chunk.usage]
    assert answer.usage.prompt == (usage[-1].prompt_tokens if usage else None)
