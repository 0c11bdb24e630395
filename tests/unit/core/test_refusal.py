import json

import pytest

from kvreturn.core.api import Chat, Messages
from kvreturn.core.refusal import strip_refusal
from support.turns import COLD, Json, compact, d_handle, p_params

SEALED = COLD | {"kvreturn": {"v": 1, "handle": d_handle()}}


def validation_error(params: Json, *, cut: int | None = None) -> bytes:
    """vLLM's answer to a request that a validator refuses: it quotes the request as Python writes it, cut off."""
    request = {
        "model": "m",
        "messages": [{"role": "user", "content": 'a {"b": 1} \\ "c"'}],
        "kv_transfer_params": params,
    }
    text = f"1 validation error:\n  {{'type': 'value_error', 'loc': 'body', 'msg': 'no', 'input': {request}}}"
    message = text if cut is None else text[:cut] + "...[truncated]"
    return compact({"error": {"message": message, "type": "Bad Request", "param": "body", "code": 400}})


@pytest.mark.parametrize("params", [p_params(), COLD, SEALED], ids=["of p", "cold", "sealed"])
def test_quoted_parameters_are_cut_out_of_vllms_words(params: Json) -> None:
    out = json.loads(strip_refusal(validation_error(params), Chat(), 400))["error"]
    assert out["message"].endswith("\\\\ \"c\"'}], 'kv_transfer_params': {...}}}")
    assert out["message"].startswith("1 validation error:\n  {'type': 'value_error', 'loc': 'body', 'msg': 'no', ")
    assert (out["type"], out["param"], out["code"]) == ("Bad Request", "body", 400)


def test_wherever_the_quotation_breaks_off_nothing_of_them_is_left() -> None:
    whole = json.loads(validation_error(p_params()))["error"]["message"]
    begin = whole.index("kv_transfer_params': {") + len("kv_transfer_params': {")
    for cut in range(begin, len(whole)):
        out = json.loads(strip_refusal(validation_error(p_params(), cut=cut), Chat(), 400))["error"]["message"]
        assert out.startswith(whole[:begin] + "...")
        assert not any(word in out for word in ("remote", "transfer_mode", "10.0.0.1", "51c0-p"))


@pytest.mark.parametrize(
    ("quoted", "kept"),
    [
        ('{"kv_transfer_params": %s}', '{"kv_transfer_params": {...}}'),
        ("kv_transfer_params=%s", "kv_transfer_params={...}"),
        (
            "ec_transfer_params: %s and kv_transfer_params: %s.",
            "ec_transfer_params: {...} and kv_transfer_params: {...}.",
        ),
    ],
)
def test_other_ways_to_quote_them(quoted: str, kept: str) -> None:
    message = quoted.replace("%s", json.dumps(p_params()))
    out = strip_refusal(compact({"error": {"message": message}}), Chat(), 400)
    assert json.loads(out) == {"error": {"message": kept}}


@pytest.mark.parametrize(
    "body",
    [
        compact({"error": {"message": f"cannot read from {p_params()}"}}),  # nobody says what it is
        compact({"detail": [{"input": {"kv_transfer_params": p_params()}}]}),  # members, but deep inside
        f"Traceback: {p_params()}".encode(),
    ],
)
@pytest.mark.parametrize("status", [400, 499, 500, 529])
def test_what_cannot_be_cut_out_is_withheld(body: bytes, status: int) -> None:
    out = json.loads(strip_refusal(body, Messages(), status))
    assert out["type"] == "error"
    assert out["error"]["message"].startswith("kvreturn: the node refused the request; what it says is withheld")
    assert json.loads(strip_refusal(body, Chat(), status))["error"]["code"] == status


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "`kv_transfer_params[\'prompt_token_ids\']` must be a list", "code": 400}}\n',
        b'{"error": {"message": "unknown field: kv_transfer_params"}}',
        b"Internal Server Error",
        b"",
        b'{"error":{"message":"no {brace} at \\"all\\""}}',
    ],
)
def test_all_else_stays_byte_for_byte(body: bytes) -> None:
    assert strip_refusal(body, Chat(), 400) == body


def test_members_go_too() -> None:
    body = b'{"error":{"message":"no"},"kv_transfer_params":{"remote_engine_id":"x"}}'
    assert strip_refusal(body, Chat(), 400) == b'{"error":{"message":"no"}}'
