import json
from typing import Any

import pytest

from kvreturn.core import handle as handles
from kvreturn.core import wire
from kvreturn.core.handle import HandleError, clipped, direct, read_handle, sealed
from support import corpus
from support.turns import BLOCK, COLD, Json, compact, d_handle

SAMPLES = corpus.files("samples/*_D_response.json")


def test_a_handle_is_read() -> None:
    raw = compact(d_handle(161))
    handle = read_handle(raw)
    assert (handle.raw, handle.tokens, handle.engine, handle.groups) == (raw, 161, "9b1f-d", 1)
    assert handle.proof
    assert (handle.proof.blocks, handle.proof.block_size, handle.proof.ttl) == (11, 16, 480.0)


@pytest.mark.parametrize("path", SAMPLES)
def test_real_handles_are_read_and_kept_byte_for_byte(path: Any) -> None:  # noqa: ANN401 - a path
    params = json.loads(path.read_bytes())["kv_transfer_params"]
    raw = json.dumps(params, indent=2).encode()
    handle = read_handle(raw)
    assert handle.raw == raw
    assert handle.tokens == params["remote_num_tokens"]
    assert handle.proof is None
    expected = params | {"do_remote_decode": True, "do_remote_prefill": False}
    assert json.loads(direct(handle)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remote_engine_id": None}, "without remote_engine_id"),
        ({"remote_engine_id": ""}, "without remote_engine_id"),
        ({"remote_request_id": None}, "without remote_request_id"),
        ({"remote_host": None}, "without remote_host"),
        ({"remote_port": None, "remote_host": ""}, "without remote_host, remote_port"),
        ({"remote_block_ids": None}, "without blocks"),
        ({"remote_block_ids": []}, "without blocks"),
        ({"remote_block_ids": [[]]}, "without blocks"),
        ({"remote_block_ids": [[], []]}, "without blocks"),
        ({"remote_block_ids": [1, 2]}, "without blocks"),
        ({"remote_block_ids": "abc"}, "without blocks"),
        ({"remote_block_ids": {"a": [1]}}, "without blocks"),
        ({"remote_num_tokens": None}, "without remote_num_tokens"),
        ({"remote_num_tokens": 0}, "without remote_num_tokens"),
        ({"remote_num_tokens": -1}, "without remote_num_tokens"),
        ({"remote_num_tokens": "160"}, "without remote_num_tokens"),
        ({"remote_num_tokens": 160.0}, "without remote_num_tokens"),
        ({"remote_num_tokens": True}, "without remote_num_tokens"),
    ],
)
def test_what_p_could_not_read_with_is_no_handle(changes: Json, message: str) -> None:
    with pytest.raises(HandleError, match=message):
        read_handle(compact(d_handle(**changes)))


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{", b'{"a":1}x', b"\xff"])
def test_what_is_no_object_is_no_handle(raw: bytes) -> None:
    with pytest.raises(HandleError):
        read_handle(raw)


@pytest.mark.parametrize(
    "member",
    [
        {},
        {"v": 2},
        {"v": 1, "block_size": 16, "scope": "é", "digests": "日本", "ttl": 1},
        "x",
        [1],
        {"v": 1, "block_size": 16, "scope": "AAAAAAAAAAA=", "digests": "AAAAAAAAAAA=", "ttl": None},
    ],
)
def test_a_proof_that_cannot_be_used_leaves_a_handle_without_one(member: object) -> None:
    handle = read_handle(compact(d_handle(kvreturn=member)))
    assert handle.proof is None
    assert handle.tokens == 160


def test_a_sealed_handle_is_cold_to_a_stock_p_and_whole_to_ours() -> None:
    raw = json.dumps(d_handle(), indent=3).encode()
    params = sealed(read_handle(raw))
    assert raw in params
    assert json.loads(params) == COLD | {"kvreturn": {"v": 1, "handle": json.loads(raw)}}


def test_the_published_form_is_ds_object_with_the_flags_for_p() -> None:
    raw = compact(d_handle(do_remote_prefill=True, do_remote_decode=False, x_future={"a": [1]}))
    assert raw.startswith(b'{"do_remote_prefill":true,"do_remote_decode":false,')
    expected = b'{"do_remote_prefill":false,"do_remote_decode":true,' + raw.split(b",", 2)[2]
    assert direct(read_handle(raw)) == expected
    bare = compact({k: v for k, v in d_handle().items() if not k.startswith("do_")})
    assert direct(read_handle(bare)) == bare[:-1] + b',"do_remote_decode":true,"do_remote_prefill":false}'


@pytest.mark.parametrize(
    ("tokens", "blocks", "count"),
    [
        (160, 10, 160),
        (161, 10, 160),
        (5000, 10, 160),
        (159, 10, 159),
        (144, 9, 144),
        (145, 10, 145),
        (16, 1, 16),
        (1, 1, 1),
    ],
)
def test_a_clipped_handle_holds_the_first_blocks_only(tokens: int, blocks: int, count: int) -> None:
    raw = compact(d_handle(160))
    params = json.loads(clipped(read_handle(raw), tokens))
    expected = json.loads(raw)
    del expected["kvreturn"]
    assert params == expected | {"remote_block_ids": [list(range(1, blocks + 1))], "remote_num_tokens": count}


@pytest.mark.parametrize(
    "changes",
    [
        {"proof": False},
        {"remote_block_ids": [[1, 2, 3], [4]]},
        # P's worker counts blocks from the list's end, so a list of another length would be read in the wrong place.
        {"remote_block_ids": [[1, 2, 3]]},
        {"remote_block_ids": [list(range(11))]},
    ],
)
@pytest.mark.parametrize("tokens", [80, 160, 1000])
def test_what_cannot_be_clipped_safely_is_not(changes: Json, tokens: int) -> None:
    with pytest.raises(HandleError):
        clipped(read_handle(compact(d_handle(160, **changes))), tokens)


def test_the_last_block_of_a_clipped_handle_may_be_partial_on_d() -> None:
    # Field report 84: 1023 tokens in 64 blocks.
    params = json.loads(clipped(read_handle(compact(d_handle(1023))), 1023))
    assert params["remote_num_tokens"] == 1023
    assert len(params["remote_block_ids"][0]) == 1023 // BLOCK + 1


def test_the_mac_is_checked_where_a_secret_is_configured() -> None:
    handle = read_handle(compact(d_handle(secret=b"s3cret")), "10.9.9.9")
    handles.check_mac(b"s3cret", handle)
    handles.check_mac(b"", handle)
    for secret, raw, reason in [
        (b"other", handle.raw, "mac"),
        (b"s3cret", compact(d_handle()), "mac"),
        (b"s3cret", compact(d_handle(proof=False)), "no_digests"),
        (b"s3cret", handle.raw.replace(b"5601", b"5602"), "mac"),
    ]:
        with pytest.raises(wire.WireError) as error:
            handles.check_mac(secret, read_handle(raw))
        assert error.value.reason == reason


def test_the_mac_survives_a_host_that_was_filled_in() -> None:
    signed = compact(d_handle(secret=b"s3cret", remote_host="localhost"))
    handle = read_handle(signed, "10.0.0.7")
    assert json.loads(handle.raw)["remote_host"] == "10.0.0.7"
    handles.check_mac(b"s3cret", handle)
    handles.check_mac(b"s3cret", read_handle(direct(handle)))
