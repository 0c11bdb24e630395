import json
from typing import Any

import pytest

from kvreturn.core.api import Chat
from kvreturn.core.ports import Failure, Refuse, Reply
from kvreturn.core.prefill import PrefillAnswer, PrefillError, read_prefill
from kvreturn.core.wire import Report
from support import corpus
from support.turns import P1, Json, compact, p_error, p_params, p_reply, p_silent


def read(reply: Reply) -> PrefillAnswer | PrefillError:
    return read_prefill(reply, Chat())


def reply_with(params: Any, **body: Any) -> Reply:  # noqa: ANN401 - JSON
    return Reply(P1, 200, compact({"kv_transfer_params": params, **body}))


def test_an_answer_is_read() -> None:
    answer = read(p_reply(prompt_tokens=209))
    assert isinstance(answer, PrefillAnswer)
    assert answer.node == P1
    assert answer.params.text == compact(p_params())
    assert (answer.usage.prompt, answer.usage.completion, answer.usage.cached) == (209, 1, None)
    assert answer.report is None


@pytest.mark.parametrize("path", corpus.files("samples/*_P_response.json"))
def test_real_answers_are_read_and_params_kept_byte_for_byte(path: Any) -> None:  # noqa: ANN401 - a path
    text = path.read_bytes()
    expected = json.loads(text)
    answer = read(Reply("10.0.0.1:8100", 200, text))
    assert isinstance(answer, PrefillAnswer)
    assert json.loads(answer.params.text) == expected["kv_transfer_params"] | {
        "remote_host": "10.0.0.1"
    }  # was 127.0.0.1
    assert answer.params.text.replace(b"10.0.0.1", b"127.0.0.1") in text
    assert answer.usage.prompt == expected["usage"]["prompt_tokens"]
    assert answer.usage.cached == expected["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_unknown_members_and_odd_spacing_reach_d_as_they_are() -> None:
    params = b'{ "do_remote_prefill" : true,\n"x_future":{"a":[1.50]}, "remote_host":"10.0.0.1","n":1e2 }'
    answer = read(Reply(P1, 200, b'{"kv_transfer_params":' + params + b"}"))
    assert isinstance(answer, PrefillAnswer)
    assert answer.params.text == params


@pytest.mark.parametrize(
    ("host", "node", "expected"),
    [
        ("localhost", P1, "10.0.0.1"),
        ("0.0.0.0", P1, "10.0.0.1"),
        ("", P1, "10.0.0.1"),
        ("::1", P1, "10.0.0.1"),
        ("localhost", "[fd00::1]:8000", "fd00::1"),
        ("10.9.9.9", P1, "10.9.9.9"),
        ("fd00::2", P1, "fd00::2"),
        ("p.example.org", P1, "p.example.org"),
        ("localhost", None, "localhost"),
    ],
)
def test_fr80_a_host_that_names_no_machine_to_d_becomes_the_node_that_answered(
    host: str, node: str | None, expected: str
) -> None:
    answer = read(Reply(node, 200, compact({"kv_transfer_params": p_params(remote_host=host)})))
    assert isinstance(answer, PrefillAnswer)
    assert json.loads(answer.params.text) == p_params(remote_host=expected)


@pytest.mark.parametrize("host", [None, 5, ["localhost"]])
def test_a_host_that_is_no_text_is_left_alone(host: object) -> None:
    answer = read(reply_with(p_params(remote_host=host)))
    assert isinstance(answer, PrefillAnswer)
    assert answer.params.text == compact(p_params(remote_host=host))


def test_the_report_is_read() -> None:
    answer = read(p_reply({"proven": 160, "read": 128, "local": 32, "reason": "local_hit"}))
    assert isinstance(answer, PrefillAnswer)
    assert answer.report == Report(160, 128, 32, "local_hit")


@pytest.mark.parametrize("report", [{"v": 2}, {"read": -1}, {"proven": "many"}])
def test_a_report_that_cannot_be_read_is_none(report: Json) -> None:
    answer = read(p_reply(report))
    assert isinstance(answer, PrefillAnswer)
    assert answer.report is None


@pytest.mark.parametrize(
    ("usage", "prompt", "cached"),
    [
        (None, None, None),
        ([], None, None),
        ({}, None, None),
        ({"prompt_tokens": "5"}, None, None),
        ({"prompt_tokens": True}, None, None),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, 5, None),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": None}}, 5, None),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}, 5, 3),
        ({"prompt_tokens": -1, "prompt_tokens_details": {"cached_tokens": -1}}, None, None),
        ({"prompt_tokens": 10**400, "prompt_tokens_details": {"cached_tokens": 2**31}}, None, None),
    ],
)
def test_usage_counts_only_what_is_a_count(usage: object, prompt: int | None, cached: int | None) -> None:
    answer = read(reply_with(p_params(), usage=usage))
    assert isinstance(answer, PrefillAnswer)
    assert (answer.usage.prompt, answer.usage.cached) == (prompt, cached)


@pytest.mark.parametrize(("cached", "local"), [(96, 96), (0, 0), (None, None), (-1, None), ("96", None), ([96], None)])
def test_what_a_stock_p_had_itself_is_a_count(cached: object, local: int | None) -> None:
    answer = read(reply_with(p_params(remote_prefill_cached_tokens=cached)))
    assert isinstance(answer, PrefillAnswer)
    assert answer.local == local


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (p_error(500), "500"),
        (p_error(503), "503"),
        (p_error(302), "302"),
        (p_error(204), "204"),
        (p_silent(Failure.CONNECT), "connect"),
        (p_silent(Failure.TIMEOUT), "timeout"),
        (p_silent(Failure.CONNECT, None), "connect"),
        (p_error(200, body=b""), "malformed"),
        (p_error(200, body=b"<html>"), "malformed"),
        (p_error(200, body=b"[]"), "malformed"),
        (p_error(200, body=b'{"kv_transfer_params":{"a":1}'), "malformed"),
        (p_error(200, body=b'{"kv_transfer_params":{"a":1}}}'), "malformed"),
        (p_error(200, body=b"\xff\xfe"), "malformed"),
        (p_error(200, body=b'{"kv_transfer_params":[1]}'), "malformed"),
        (p_error(200, body=b'{"kv_transfer_params":"x"}'), "malformed"),
        (p_error(200, body=b'{"kv_transfer_params":' + b'{"a":' * 5000 + b"1" + b"}" * 5001), "malformed"),
        (p_error(200, body=b"{}"), "no_kv_transfer_params"),
        (p_error(200, body=b'{"kv_transfer_params":null}'), "no_kv_transfer_params"),
        (p_error(200, body=b'{"kv_transfer_params":{ }}'), "no_kv_transfer_params"),
        (p_error(200, body=b'{"x":{"kv_transfer_params":{"a":1}}}'), "no_kv_transfer_params"),
    ],
)
def test_how_p_fails(reply: Reply, reason: str) -> None:
    answer = read(reply)
    assert isinstance(answer, PrefillError)
    assert (answer.node, answer.reason, answer.refusal, answer.failure) == (reply.node, reason, None, reply.failure)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 499])
def test_a_4xx_is_the_requests_fault_and_goes_on_as_p_sent_it(status: int) -> None:
    body = b'{"error":{"message":"prompt is too long","code":400}} '
    answer = read(Reply(P1, status, body, "application/problem+json"))
    assert isinstance(answer, PrefillError)
    assert answer.reason == str(status)
    assert answer.refusal == Refuse(status, body, "application/problem+json")
