import json
from typing import Any

import pytest

from kvreturn.core import wire
from kvreturn.core.attach import Attached, Objection, prove_with_tokens, read_tokens
from kvreturn.core.handle import Handle, read_handle
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Failure, Reply
from support.turns import BLOCK, Json, compact, d_handle, p_error, p_silent, tokenized

HELD = list(range(1, 161))


def handle_of(tokens: int = 160, **changes: Any) -> Handle:  # noqa: ANN401 - as `d_handle`
    return read_handle(compact(d_handle(tokens, **changes)))


def prove(handle: Handle, tokens: list[int], secret: bytes = b"", *, lora: str = "m", salt: str = "") -> Attached:
    return prove_with_tokens(handle, tokens, secret, lora=lora, cache_salt=salt)


# --- /tokenize ---


def test_tokens_are_read() -> None:
    assert read_tokens(tokenized([1, 5, 2**32 - 2])) == [1, 5, 2**32 - 2]
    assert read_tokens(tokenized([])) == []


@pytest.mark.parametrize(
    "reply",
    [
        p_error(500),
        p_error(404),
        p_error(400, body=b'{"tokens":[1]}'),
        p_silent(Failure.CONNECT),
        p_silent(Failure.TIMEOUT),
        p_silent(Failure.CONNECT, None),
        p_error(200, body=b""),
        p_error(200, body=b"<html>"),
        p_error(200, body=b"[1,2]"),
        p_error(200, body=b'"tokens"'),
        p_error(200, body=b"null"),
        p_error(200, body=b"{}"),
        p_error(200, body=b'{"tokens":null}'),
        p_error(200, body=b'{"tokens":"12"}'),
        p_error(200, body=b'{"tokens":[1.0]}'),
        p_error(200, body=b'{"tokens":[true]}'),
        p_error(200, body=b'{"tokens":["1"]}'),
        p_error(200, body=b'{"tokens":[-1]}'),
        p_error(200, body=b'{"tokens":[4294967295]}'),
        p_error(200, body=b'{"tokens":[1,'),
    ],
)
def test_an_answer_without_tokens_proves_nothing(reply: Reply) -> None:
    with pytest.raises(Objection) as info:
        read_tokens(reply)
    assert (info.value.outcome, info.value.detail) == (Outcome.UNPROVEN, "tokenize_failed")


# --- the proof ---


@pytest.mark.parametrize(
    ("prompt", "proven"),
    [
        (HELD, 160),
        ([*HELD, 7, 8], 160),
        (HELD[:150], 144),
        (HELD[:16], 16),
        ([*HELD[:100], 0, *HELD[101:]], 96),
        ([*HELD[:159], 0], 144),
    ],
)
def test_a_handle_is_clipped_to_what_the_tokens_prove(prompt: list[int], proven: int) -> None:
    attached = prove(handle_of(), prompt)
    assert (attached.proven, attached.prompt) == (proven, prompt)
    params = json.loads(attached.params)
    assert params["remote_num_tokens"] == proven
    assert params["remote_block_ids"] == [list(range(1, proven // BLOCK + 1))]
    assert "kvreturn" not in params


def test_a_partial_last_block_is_attached_when_it_is_equal() -> None:
    attached = prove(handle_of(161), list(range(1, 200)))
    assert json.loads(attached.params)["remote_num_tokens"] == 161
    assert json.loads(attached.params)["remote_block_ids"] == [list(range(1, 12))]


@pytest.mark.parametrize("prompt", [[], [1], HELD[:15], [0, *HELD], HELD[1:]])
def test_without_one_equal_block_it_is_no_continuation(prompt: list[int]) -> None:
    with pytest.raises(Objection) as info:
        prove(handle_of(), prompt)
    assert (info.value.outcome, info.value.detail) == (Outcome.NOT_A_CONTINUATION, None)


@pytest.mark.parametrize(
    ("changes", "secret", "salt", "detail"),
    [
        ({"proof": False}, b"", "", "no_digests"),
        ({"kvreturn": {"v": 2}}, b"", "", "no_digests"),
        ({"salt": "other"}, b"", "mine", "scope"),
        ({"salt": "other"}, b"", "", "scope"),
        ({"secret": b"theirs"}, b"", "", "scope"),
        ({"secret": b"theirs"}, b"mine", "", "mac"),
        ({}, b"mine", "", "mac"),
        ({"remote_num_tokens": 200}, b"", "", "malformed"),
        ({"remote_num_tokens": 100}, b"", "", "malformed"),
        ({"remote_block_ids": [[1, 2], [3]]}, b"", "", "groups"),
        ({"remote_block_ids": [[1, 2]]}, b"", "", "groups"),
    ],
)
def test_what_makes_a_proof_impossible(changes: Json, secret: bytes, salt: str, detail: str) -> None:
    with pytest.raises(Objection) as info:
        prove(handle_of(**changes), HELD, secret, salt=salt)
    assert (info.value.outcome, info.value.detail) == (Outcome.UNPROVEN, detail)


def test_secret_and_salt_that_agree_prove() -> None:
    assert prove(handle_of(secret=b"s"), HELD, b"s").proven == 160
    assert prove(handle_of(salt="mine"), HELD, salt="mine").proven == 160


def test_a_lora_is_found_by_the_requests_model() -> None:
    seed = wire.chain_seed(b"", lora="sql-adapter")
    member = wire.dump_proof(wire.Proof(BLOCK, wire.scope_tag(seed), wire.block_digests(HELD, BLOCK, seed), (), 480.0))
    handle = handle_of(kvreturn=member)
    assert prove(handle, HELD, lora="sql-adapter").proven == 160
    with pytest.raises(Objection) as info:
        prove(handle, HELD, lora="another")
    assert info.value.detail == "scope"


def test_a_forged_count_under_a_secret_is_refused_by_its_mac() -> None:
    forged = d_handle(secret=b"s") | {"remote_num_tokens": 159}
    with pytest.raises(Objection) as info:
        prove(read_handle(compact(forged)), HELD, b"s")
    assert info.value.detail == "mac"
