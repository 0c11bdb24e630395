import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn.core import wire
from kvreturn.core.wire import Proof, Report, WireError

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "handle_v1.json").read_text())
SEED = wire.chain_seed(b"")
TAG = wire.scope_tag(SEED)
MEMBER: dict[str, Any] = VECTORS["proofs"][0]["member"]
REPORT: dict[str, Any] = VECTORS["reports"][-1]["member"]
SECRET = bytes.fromhex(VECTORS["macs"][0]["secret"])


def vectors(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", VECTORS[kind], ids=[v["name"] for v in VECTORS[kind]])


def extra_of(vector: dict[str, Any], name: str = "extra") -> dict[int, bytes]:
    return {int(k): bytes.fromhex(v) for k, v in vector.get(name, {}).items()}


def proof_of(tokens: list[int], block_size: int = 4, **changes: Any) -> Proof:  # noqa: ANN401 - fields of Proof
    proof = Proof(block_size, TAG, wire.block_digests(tokens, block_size, SEED), (), 480.0)
    return replace(proof, **changes)


def reason_of(error: "pytest.ExceptionInfo[WireError]") -> str:
    return error.value.reason


# --- digests ---


@vectors("seeds")
def test_seed_and_tag(vector: dict[str, Any]) -> None:
    seed = wire.chain_seed(bytes.fromhex(vector["secret"]), lora=vector["lora"], cache_salt=vector["cache_salt"])
    assert seed.hex() == vector["seed"]
    assert wire.scope_tag(seed).hex() == vector["tag"]


def test_lora_and_salt_cannot_be_confused() -> None:
    parts = [("a", ""), ("", "a"), ('a","b', ""), ("a", "b"), ('","', ""), ("", '","'), ("ab", ""), ("\x00", "")]
    assert len({wire.chain_seed(b"", lora=lora, cache_salt=salt) for lora, salt in parts}) == len(parts)


@vectors("digests")
def test_block_digests(vector: dict[str, Any]) -> None:
    seed = next(bytes.fromhex(s["seed"]) for s in VECTORS["seeds"] if s["name"] == vector["seed"])
    digests = wire.block_digests(vector["tokens"], vector["block_size"], seed, extra_of(vector))
    assert digests.hex() == "".join(vector["digests"])


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1, 2**70]])
def test_tokens_that_are_none_are_refused(tokens: list[int]) -> None:
    with pytest.raises(OverflowError):
        wire.block_digests(tokens, 4, SEED)


def test_a_long_prompt_is_digested_quickly() -> None:
    assert len(wire.block_digests(range(100_000), 16, SEED)) == 8 * 6250


@vectors("prompts")
def test_prompt_digest(vector: dict[str, Any]) -> None:
    seed = next(bytes.fromhex(s["seed"]) for s in VECTORS["seeds"] if s["name"] == vector["seed"])
    assert wire.prompt_digest(vector["tokens"], seed, bytes.fromhex(vector["inputs"])) == vector["digest"]


# --- what is proven ---


@vectors("proven")
def test_proven_tokens(vector: dict[str, Any]) -> None:
    digests = wire.block_digests(vector["held"], 4, SEED, extra_of(vector, "held_extra"))
    proof = proof_of([], digests=digests)
    proven = wire.proven_tokens(
        proof, len(vector["held"]), vector["prompt"], SEED, extra_of(vector, "prompt_extra") or None
    )
    assert proven == vector["proven"]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 9),
    st.integers(0, 40),
)
def test_proven_is_the_shared_prefix_in_whole_blocks_or_all_that_d_holds(
    held: list[int], other: list[int], block_size: int, shared: int
) -> None:
    prompt = held[:shared] + other
    common = next(
        (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt))
    )
    expected = common if common == len(held) else common // block_size * block_size
    assert wire.proven_tokens(proof_of(held, block_size), len(held), prompt, SEED) == expected


@pytest.mark.parametrize("held", [-1, 0, 4, 5, 8, 13, 2**31])
def test_digests_for_another_count_prove_nothing(held: int) -> None:
    with pytest.raises(WireError) as error:
        wire.proven_tokens(proof_of(list(range(10))), held, list(range(10)), SEED)
    assert reason_of(error) == "malformed"


@pytest.mark.parametrize("held", [9, 11, 12])
def test_another_count_within_the_same_block_does_not_prove_the_partial_block(held: int) -> None:
    assert wire.proven_tokens(proof_of(list(range(10))), held, list(range(20)), SEED) == 8


@pytest.mark.parametrize(
    "seed",
    [
        wire.chain_seed(b"other"),
        wire.chain_seed(b"", lora="a"),
        wire.chain_seed(b"", cache_salt="a"),
    ],
    ids=["secret", "lora", "salt"],
)
def test_another_scope_proves_nothing(seed: bytes) -> None:
    with pytest.raises(WireError) as error:
        wire.proven_tokens(proof_of([1, 2, 3, 4]), 4, [1, 2, 3, 4], seed)
    assert reason_of(error) == "scope"


def test_a_forged_scope_tag_does_not_help() -> None:
    seed = wire.chain_seed(b"other")
    assert wire.proven_tokens(proof_of([1, 2, 3, 4], scope=wire.scope_tag(seed)), 4, [1, 2, 3, 4], seed) == 0


# --- the member ---


@vectors("proofs")
def test_proof_from_and_to_json(vector: dict[str, Any]) -> None:
    proof = wire.load_proof(vector["member"])
    assert proof == Proof(
        vector["block_size"],
        bytes.fromhex(vector["scope"]),
        bytes.fromhex(vector["digests"]),
        tuple(vector["generated"]),
        vector["ttl"],
        bytes.fromhex(vector["mac"]) if vector["mac"] else None,
    )
    assert proof.blocks == vector["blocks"]
    assert json.loads(json.dumps(wire.dump_proof(proof))) == vector["member"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"v": 2}, "version"),
        ({"v": 0}, "version"),
        ({"v": "1"}, "version"),
        ({"v": True}, "version"),
        ({"v": 1.0}, "version"),
        ({"v": None}, "version"),
        ({"v": "x" * 10_000}, "version"),
        ({"block_size": 0}, "malformed"),
        ({"block_size": -4}, "malformed"),
        ({"block_size": 4.0}, "malformed"),
        ({"block_size": "4"}, "malformed"),
        ({"block_size": True}, "malformed"),
        ({"block_size": 2**31}, "malformed"),
        ({"block_size": None}, "malformed"),
        ({"scope": ""}, "malformed"),
        ({"scope": "AAAA"}, "malformed"),
        ({"scope": "AAECAwQFBgcI"}, "malformed"),  # 9 bytes
        ({"scope": 5}, "malformed"),
        ({"scope": "AAECAwQFBgc"}, "malformed"),  # padding missing
        ({"scope": "AAECAwQF Bgc="}, "malformed"),
        ({"scope": "AAECAwQFBgé="}, "malformed"),
        ({"digests": ""}, "malformed"),
        ({"digests": "AAECAwQFBgcI"}, "malformed"),
        ({"digests": "AAECAwQFBg=="}, "malformed"),  # 7 bytes
        ({"digests": "AAECAwQFBgc=\n"}, "malformed"),
        ({"digests": "AAEC-_QFBgc="}, "malformed"),  # the other alphabet
        ({"digests": "日本語"}, "malformed"),
        ({"digests": ["AAECAwQFBgc="]}, "malformed"),
        ({"digests": None}, "malformed"),
        ({"generated": None}, "malformed"),
        ({"generated": "1,2"}, "malformed"),
        ({"generated": [1, -1]}, "malformed"),
        ({"generated": [2**32 - 1]}, "malformed"),
        ({"generated": [1.0]}, "malformed"),
        ({"generated": [True]}, "malformed"),
        ({"generated": [[1]]}, "malformed"),
        ({"ttl": 0}, "malformed"),
        ({"ttl": -1.5}, "malformed"),
        ({"ttl": True}, "malformed"),
        ({"ttl": "480"}, "malformed"),
        ({"ttl": float("nan")}, "malformed"),
        ({"ttl": float("inf")}, "malformed"),
        ({"ttl": 2**70}, "malformed"),
        ({"ttl": None}, "malformed"),
        ({"mac": "é"}, "malformed"),
        ({"mac": "x"}, "malformed"),
        ({"mac": 1}, "malformed"),
        ({"mac": {}}, "malformed"),
    ],
)
def test_a_malformed_proof_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(WireError) as error:
        wire.load_proof(MEMBER | changes)
    assert reason_of(error) == reason
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", ["v", "block_size", "scope", "digests", "ttl"])
def test_a_proof_without_a_member_it_needs_is_refused(name: str) -> None:
    with pytest.raises(WireError):
        wire.load_proof({k: v for k, v in MEMBER.items() if k != name})


def test_a_proof_may_lack_generated_and_mac_and_hold_more() -> None:
    proof = wire.load_proof({k: v for k, v in MEMBER.items() if k not in {"generated", "mac"}} | {"future": [1]})
    assert (proof.generated, proof.mac) == ((), None)


@pytest.mark.parametrize("load", [wire.load_proof, wire.load_report])
@pytest.mark.parametrize("obj", [None, 1, "x", [], [1], True])
def test_what_is_no_member_is_none(load: Any, obj: object) -> None:  # noqa: ANN401 - either loader
    with pytest.raises(WireError) as error:
        load(obj)
    assert reason_of(error) == "no_digests"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3))
def test_no_value_of_any_member_raises_anything_else(value: Any) -> None:  # noqa: ANN401 - JSON
    for name in MEMBER:
        try:
            wire.load_proof(MEMBER | {name: value})
        except WireError as e:
            assert e.reason in {"version", "malformed"}  # noqa: PT017 - either outcome is right
    for name in REPORT:
        try:
            wire.load_report(REPORT | {name: value})
        except WireError as e:
            assert e.reason in {"version", "malformed"}  # noqa: PT017 - as above


# --- reports ---


@vectors("reports")
def test_report_from_and_to_json(vector: dict[str, Any]) -> None:
    report = wire.load_report(vector["member"])
    assert report == Report(vector["proven"], vector["read"], vector["local"], vector["reason"], vector["prompt"])
    assert wire.dump_report(report) == vector["member"]


@pytest.mark.parametrize("name", ["proven", "read", "local"])
@pytest.mark.parametrize("value", [None, -1, 1.0, "1", True, 2**31, []])
def test_a_report_without_whole_counts_is_refused(name: str, value: object) -> None:
    with pytest.raises(WireError) as error:
        wire.load_report(REPORT | {name: value})
    assert reason_of(error) == "malformed"


@pytest.mark.parametrize("reason", ["x" * 33, "grün", 5, ["local_hit"], "two words", "a\nb", "", "<b>"])
def test_a_reason_that_is_not_one_short_word_counts_as_none(reason: object) -> None:
    assert wire.load_report(REPORT | {"reason": reason}).reason is None


@pytest.mark.parametrize(
    ("value", "read"),
    [(12.5, 12.5), (12, 12.0), (0, 0.0), (-1, None), (True, None), ("12", None), (10**400, None), (float("nan"), None)],
)
def test_when_a_lease_ends_is_a_point_in_time_or_unknown(value: object, read: float | None) -> None:
    assert wire.load_report(REPORT | {"expires": value}).expires == read


def test_when_a_lease_ends_is_passed_on() -> None:
    report = Report(0, 0, 0, expires=12.5)
    assert wire.load_report(json.loads(json.dumps(wire.dump_report(report)))) == report


# --- MAC ---


@vectors("macs")
def test_mac(vector: dict[str, Any]) -> None:
    assert wire.sign(bytes.fromhex(vector["secret"]), vector["handle"]).hex() == vector["mac"]


@vectors("macs")
def test_a_round_trip_through_json_keeps_the_mac(vector: dict[str, Any]) -> None:
    for text in (json.dumps(vector["handle"]), json.dumps(vector["handle"], indent=1, sort_keys=True)):
        assert wire.sign(SECRET, json.loads(text)).hex() == vector["mac"]


def signed_handle() -> dict[str, Any]:
    handle: dict[str, Any] = json.loads(json.dumps(VECTORS["macs"][0]["handle"]))
    handle["kvreturn"]["mac"] = MEMBER["mac"]
    return handle


def check(handle: dict[str, Any], secret: bytes = SECRET) -> None:
    wire.check_mac(secret, handle, wire.load_proof(handle["kvreturn"]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("do_remote_prefill", True), ("do_remote_decode", False), ("remote_host", "fd00::1")],
)
def test_what_the_router_may_set_is_not_signed(name: str, value: object) -> None:
    check(signed_handle() | {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_block_ids", [[1, 2, 4]]),
        ("remote_block_ids", [[1, 2]]),
        ("remote_engine_id", "e-2"),
        ("remote_request_id", "r-2"),
        ("remote_port", 5602),
        ("remote_num_tokens", 11),
        ("tp_size", 2),
        ("added", None),
    ],
)
def test_everything_else_is(name: str, value: object) -> None:
    with pytest.raises(WireError) as error:
        check(signed_handle() | {name: value})
    assert reason_of(error) == "mac"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("digests", "AAECAwQFBgg="),
        ("scope", "AAECAwQFBgg="),
        ("block_size", 8),
        ("ttl", 481),
        ("generated", [9, 11]),
        ("added", 1),
        ("mac", "gZQ+1VwcJZX3RQtPzyUneg=="),
        ("mac", "gZQ+1VwcJZX3RQtPzyUn"),
        ("mac", None),
    ],
)
def test_the_proof_is_signed_too(name: str, value: object) -> None:
    handle = signed_handle()
    handle["kvreturn"][name] = value
    with pytest.raises(WireError, match="same secret") as error:
        check(handle)
    assert reason_of(error) == "mac"


def test_another_secret_does_not_verify_and_none_asks_for_nothing() -> None:
    with pytest.raises(WireError):
        check(signed_handle(), b"other")
    handle = signed_handle()
    del handle["kvreturn"]["mac"]
    with pytest.raises(WireError):
        check(handle)
    check(handle, b"")
