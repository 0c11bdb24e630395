"""A handle is checked before anything is opened, allocated or read."""

import json
from pathlib import Path
from typing import Any

import pytest
from kvreturn_connector import wire
from kvreturn_connector.handles import Offer, Once, check_handle, open_offer, prove, to_free
from kvreturn_connector.settings import Settings

from kvreturn.core import wire as routers

TOKENS = list(range(1, 101))  # 100 tokens, blocks of 16: the seventh holds 4
SEED = wire.chain_seed(b"")
SETTINGS = Settings(bidirectional=True)


def handle(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    digests = wire.block_digests(TOKENS, 16, SEED)
    return {
        "remote_block_ids": [[3, 1, 4, 15, 9, 2, 6]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": 100,
        "remote_blocks_expiry_time": 12.5,
        "kvreturn": wire.dump_proof(wire.Proof(16, wire.scope_tag(SEED), digests, (), 480.0)),
        **changes,
    }


def examined(params: dict[str, Any], tokens: list[int], block_size: int = 16, settings: Settings = SETTINGS) -> Offer:
    return prove(*check_handle(params, settings), tokens, block_size, SEED, None)


@pytest.mark.parametrize(
    ("prompt", "proven", "blocks"),
    [
        ([*TOKENS, 7, 7], 100, [3, 1, 4, 15, 9, 2, 6]),
        (TOKENS[:50], 48, [3, 1, 4]),
        ([*TOKENS[:70], 0, *TOKENS[71:]], 64, [3, 1, 4, 15]),
        ([0, *TOKENS[1:]], 0, []),
    ],
    ids=["continuation", "shorter", "edited at 70", "another"],
)
def test_only_the_blocks_of_the_proven_prefix_are_named(prompt: list[int], proven: int, blocks: list[int]) -> None:
    offer = examined(handle(), prompt)
    assert offer.proven == proven
    fields = offer.remote_fields()
    assert (fields["remote_block_ids"], fields["remote_num_tokens"]) == ([blocks], proven)
    assert fields["remote_blocks_expiry_time"] is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kvreturn": None}, "no_digests"),
        ({"kvreturn": {"v": 2}}, "version"),
        ({"remote_block_ids": "abc"}, "malformed"),
        ({"remote_block_ids": []}, "malformed"),
        ({"remote_block_ids": [["1"]]}, "malformed"),
        ({"remote_block_ids": [[-1]]}, "malformed"),
        ({"remote_block_ids": [[1, 2]]}, "malformed"),
        ({"remote_block_ids": [[3, 1, 4, 15, 9, 2, 6], [1]]}, "groups"),
        ({"remote_num_tokens": 140}, "malformed"),
        ({"remote_num_tokens": "100"}, "malformed"),
        ({"remote_num_tokens": True}, "malformed"),
        ({"remote_engine_id": None}, "malformed"),
        ({"remote_engine_id": ["e"]}, "malformed"),
        ({"remote_request_id": ""}, "malformed"),
        ({"remote_port": 0}, "malformed"),
        ({"remote_port": "5600"}, "malformed"),
        ({"tp_size": 0}, "malformed"),
        ({"transfer_mode": "push"}, "malformed"),
        ({"remote_host": "8.8.8.8"}, "peer"),
        ({"remote_host": "evil.example"}, "peer"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(wire.WireError) as refused:
        examined(handle(**changes), [*TOKENS, 1])
    assert refused.value.reason == reason


def test_a_count_of_one_too_many_proves_whole_blocks_only() -> None:
    """Blocks and digests are as many as before, but the last digest covers 4 tokens, not the 5 that are claimed."""
    assert examined(handle(remote_num_tokens=101), [*TOKENS, 1]).proven == 96


def test_another_block_size_is_refused() -> None:
    with pytest.raises(wire.WireError, match="blocks of 16 tokens, we have 32"):
        examined(handle(), TOKENS, 32)


def test_with_a_secret_the_mac_is_checked_first() -> None:
    with pytest.raises(wire.WireError) as refused:
        examined(handle(), TOKENS, settings=Settings(bidirectional=True, secret=b"s"))
    assert refused.value.reason == "mac"


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"do_remote_decode": True, "remote_block_ids": None}, False),
        ({"do_remote_decode": True, "kvreturn": {"v": 1, "handle": {"a": 1}}}, True),
        ({"do_remote_decode": True, "kvreturn": {"v": 1}}, False),
        ({"do_remote_decode": True, "remote_block_ids": [[1]]}, True),
    ],
)
def test_both_forms_of_a_handle_are_found(params: dict[str, Any], found: bool) -> None:  # noqa: FBT001 - a table
    assert (open_offer(params) is not None) is found


@pytest.mark.parametrize(
    ("member", "freed"),
    [
        ({"v": 1, "handle": {"a": 1}, "free": True}, {"a": 1}),
        ({"v": 1, "handle": {"a": 1}, "free": 1}, None),
        ({"v": 1, "handle": {"a": 1}}, None),
        ({"v": 1, "free": True}, None),
        (None, None),
    ],
)
def test_a_handle_is_freed_only_if_that_is_asked_for(member: object, freed: object) -> None:
    assert to_free({"do_remote_decode": True, "kvreturn": member}) == freed


def test_what_was_seen_is_forgotten_oldest_first() -> None:
    once = Once(2)
    assert [once.first(key) for key in "aabbcab"] == [True, False, True, False, True, True, True]


def test_connector_and_router_speak_the_same_format() -> None:
    """One file serves both; the vectors in tests/vectors are checked against it in tests/unit/core/test_wire.py."""
    mine, theirs = (Path(str(m.__file__)).read_text() for m in (wire, routers))
    assert mine == theirs
    vectors = json.loads((Path(__file__).parents[2] / "vectors/handle_v1.json").read_text())
    assert vectors
