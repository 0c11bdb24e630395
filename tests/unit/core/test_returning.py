"""What P gets so that it reads back at once, by what runs there."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvreturn.core import wire
from kvreturn.core.handle import read_handle
from kvreturn.core.returning import Form, Job, ReturnError, free_body, probe_body, read_probe, return_body
from support.turns import COLD, D1, P1, Json, compact, d_handle

PROMPT, GENERATED = list(range(1, 151)), list(range(151, 162))  # 161 tokens, of which D has not the last one's KV
HANDLE = d_handle(160)


def job(handle: Json | None = None, **changes: Any) -> Job:  # noqa: ANN401 - fields of Job
    whole = Job(
        handle=read_handle(compact(handle or HANDLE)),
        prefill_node=P1,
        engine="51c0-p",
        decode_node=D1,
        kept=b'{"model": "m", "cache_salt": "s"}',
        prompt=compact(PROMPT),
        generated=GENERATED,
        tenant=b"t",
        secret=b"",
        salt="",
        finish_reason="stop",
        gap=None,
        turns=1,
    )
    return replace(whole, **changes)


def published(**directions: bool) -> Json:
    return {k: v for k, v in HANDLE.items() if k != "kvreturn"} | directions


BODIES: dict[Form, Json] = {
    Form.SEALED: {
        "prompt": [*PROMPT, *GENERATED],
        "max_tokens": 1,
        "kv_transfer_params": {**COLD, "kvreturn": {"v": 1, "keep": False, "handle": HANDLE}},
    },
    Form.STREAMED: {
        "prompt": [*PROMPT, *GENERATED],
        "stream": True,
        "max_tokens": 64,
        "ignore_eos": True,
        "kv_transfer_params": published(do_remote_decode=True, do_remote_prefill=False),
    },
    Form.LOADED: {
        "prompt": [*PROMPT, *GENERATED[:10]],
        "max_tokens": 1,
        "kv_transfer_params": published(do_remote_decode=False, do_remote_prefill=True),
    },
}


@pytest.mark.parametrize("form", Form)
def test_each_form_is_the_one_that_its_node_understands(form: Form) -> None:
    whole = job()
    sent = json.loads(return_body(form, whole, whole.tokens()))
    assert sent == {"model": "m", "cache_salt": "s", "temperature": 0, **BODIES[form]}


def test_a_priority_goes_along_only_if_it_is_set() -> None:
    whole = job()
    assert json.loads(return_body(Form.SEALED, whole, whole.tokens(), 100))["priority"] == 100
    assert b"priority" not in return_body(Form.SEALED, whole, whole.tokens())


def test_the_tokens_are_the_prompts_and_then_those_of_the_answer() -> None:
    assert job().tokens() == list(range(1, 162))


def _other(tokens: Sequence[int]) -> Json:
    return d_handle([*tokens[:40], 9_999, *tokens[41:160]])


BAD: list[tuple[str, Callable[[], Job], str]] = [
    ("no JSON", lambda: job(prompt=b"[1, 2"), "no_tokens"),
    ("no list", lambda: job(prompt=b"null"), "no_tokens"),
    ("no numbers", lambda: job(prompt=b'["1"]'), "no_tokens"),
    ("a truth", lambda: job(prompt=b"[true]"), "no_tokens"),
    ("beyond 32 bits", lambda: job(prompt=b"[4294967295]"), "no_tokens"),
    ("fewer than D holds", lambda: job(generated=GENERATED[:9]), "too_few_tokens"),
    ("another one in the middle", lambda: job(_other(range(1, 162))), "other_tokens"),
    ("another salt", lambda: job(salt="s"), "scope"),
    ("another secret", lambda: job(secret=b"s"), "scope"),
    ("digests for fewer blocks", lambda: job(d_handle(160, remote_num_tokens=144)), "other_tokens"),
]


@pytest.mark.parametrize(("make", "reason"), [c[1:] for c in BAD], ids=[c[0] for c in BAD])
def test_tokens_that_are_not_what_d_holds_do_not_go_back(make: Callable[[], Job], reason: str) -> None:
    with pytest.raises(ReturnError) as caught:
        make().tokens()
    assert caught.value.reason == reason


def test_a_stock_ds_own_ids_need_no_digests() -> None:
    assert job(d_handle(160, proof=False)).tokens() == list(range(1, 162))


def test_a_lora_adapter_is_known_by_the_models_name() -> None:
    held = list(range(1, 161))
    seed = wire.chain_seed(b"", lora="adapter")
    proof = wire.Proof(16, wire.scope_tag(seed), wire.block_digests(held, 16, seed), (7,), 480.0)
    handle = {**HANDLE, "kvreturn": wire.dump_proof(proof)}
    assert len(job(handle, kept=b'{"model":"adapter"}').tokens()) == 161
    with pytest.raises(ReturnError):
        job(handle).tokens()


# --- the probe ---


def test_the_probe_is_a_decode_request_that_a_p_without_the_flag_does_not_look_at() -> None:
    assert json.loads(probe_body("m")) == {
        "model": "m",
        "prompt": [1],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"do_remote_prefill": False, "do_remote_decode": False},
    }


@pytest.mark.parametrize(
    ("status", "body", "form"),
    [
        (200, {"choices": [{}], "kv_transfer_params": published()}, Form.STREAMED),
        (200, {"choices": [{}], "kv_transfer_params": None}, Form.LOADED),
        (200, {"choices": [{}]}, Form.LOADED),
        (200, {}, None),
        (500, {"choices": [{}]}, None),
        (404, {"error": {"message": "no model"}}, None),
        (0, b"", None),
        (200, b"[]", None),
    ],
)
def test_the_answer_to_the_probe(status: int, body: Json | bytes, form: Form | None) -> None:
    assert read_probe(status, body if isinstance(body, bytes) else compact(body)) is form


# --- freeing ---


def test_our_connector_is_told_to_have_the_blocks_freed() -> None:
    handle = read_handle(compact(HANDLE))
    assert json.loads(free_body(Form.SEALED, handle)) == {
        "prompt": [1],
        "max_tokens": 1,
        "kv_transfer_params": {**COLD, "kvreturn": {"v": 1, "free": True, "handle": HANDLE}},
    }


@pytest.mark.parametrize("form", [Form.STREAMED, Form.LOADED, None])
def test_a_stock_node_gets_a_request_that_it_must_reject(form: Form | None) -> None:
    sent = json.loads(free_body(form, read_handle(compact(HANDLE))))
    assert sent.pop("model") not in {"", "m"}
    assert sent == {
        "prompt": [1],
        "max_tokens": 1,
        "kv_transfer_params": published(do_remote_decode=False, do_remote_prefill=True),
    }
