"""Fuzz targets: handles, reports and stored records, whoever wrote them."""

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from fuzz.strategies import NUMBERS, bounded, texts, values
from kvreturn.core import wire
from kvreturn.core.attach import Objection, prove_with_tokens
from kvreturn.core.handle import HandleError, cold, direct, published, read_handle, sealed
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Record
from kvreturn.store.codec import Codec, Entry
from kvreturn.store.errors import StoreError
from support.turns import Json, compact, d_handle

HELD = list(range(1, 101))
PROOF = d_handle(HELD)["kvreturn"]
ids = st.lists(st.integers(0, 2**32 - 2), max_size=100)
odd_proofs = st.builds(
    lambda changes: PROOF | changes, st.dictionaries(st.sampled_from(list(PROOF)), values | NUMBERS, max_size=2)
)
odd_handles = st.builds(
    lambda changes, proof: d_handle(HELD) | changes | ({"kvreturn": proof} if proof is not None else {}),
    st.dictionaries(st.sampled_from(list(d_handle(HELD))), values | NUMBERS | st.lists(st.lists(NUMBERS)), max_size=2),
    st.none() | odd_proofs,
)
prompts = st.one_of(
    ids,
    st.integers(0, 100).flatmap(lambda n: ids.map(lambda more: HELD[:n] + more)),
)


@bounded
@given(odd_proofs | values)
def test_a_proof_is_read_or_refused(member: Any) -> None:  # noqa: ANN401 - JSON
    try:
        proof = wire.load_proof(member)
    except wire.WireError:
        return
    assert wire.load_proof(json.loads(json.dumps(wire.dump_proof(proof)))) == proof


@bounded
@given(
    st.dictionaries(
        st.sampled_from(["proven", "read", "local", "reason", "prompt", "expires", "ids"]), values | NUMBERS
    )
    | values
)
def test_a_report_is_read_or_refused(member: Any) -> None:  # noqa: ANN401 - JSON
    try:
        report = wire.load_report(
            {"v": 1, "proven": 1, "read": 1, "local": 1, **member} if isinstance(member, dict) else member
        )
    except wire.WireError:
        return
    assert wire.load_report(json.loads(json.dumps(wire.dump_report(report)))) == report


@bounded
@given(odd_handles, prompts, st.sampled_from([b"", b"secret"]), values)
def test_a_handle_proves_no_more_than_is_the_same(
    handle: Json,
    prompt: list[int],
    secret: bytes,
    salt: Any,  # noqa: ANN401 - JSON
) -> None:
    """Whatever else of it is wrong: its digests are those of `HELD`, or it proves nothing."""
    try:
        read = read_handle(compact(handle), "node-2:8000")
    except HandleError:
        return
    for text in (cold(ids=True), direct(read), sealed(read), published(read, prefill=True)):
        assert isinstance(json.loads(text), dict)
    try:
        attached = prove_with_tokens(read, prompt, secret, lora="", cache_salt=salt)
    except Objection:
        return
    same = next((i for i, (a, b) in enumerate(zip(HELD, prompt, strict=False)) if a != b), min(len(HELD), len(prompt)))
    assert attached.proven is not None
    assert attached.proven <= same
    params = json.loads(attached.params)
    assert params["remote_num_tokens"] == attached.proven
    assert len(params["remote_block_ids"][0]) == -(-attached.proven // 16)


@bounded
@given(texts() | st.binary(max_size=40))
def test_what_is_no_handle_is_refused(raw: bytes) -> None:
    try:
        read_handle(raw)
    except HandleError:
        return
    assert {"remote_engine_id", "remote_host"} <= set(json.loads(raw))


words = st.none() | st.text(max_size=30).filter(lambda s: s.isprintable())
records = st.builds(
    Record,
    ttl=st.floats(0, 1e6),
    handle=st.none() | st.binary(max_size=3000),
    reason=st.none() | st.sampled_from(Outcome),
    decode_node=words,
    prefill_node=words,
    prompt=st.integers(0, 2**31 - 1),
    turns=st.integers(0, 2**31 - 1),
    returned=st.integers(0, 2**31 - 1),
    pending=st.booleans(),
    trace=words,
)
keys = st.lists(st.binary(max_size=20), min_size=1, max_size=3)
changed_bytes = st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(0, 255)), max_size=3)
CODEC = Codec(b"key")


@bounded
@given(
    records,
    keys,
    st.integers(0, 2**50),
    st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(0, 255)), max_size=3),
    st.integers(0, 5),
)
@example(Record(1.0), [b"k"], 0, [], 0)
def test_a_record_comes_back_whole_or_not_at_all(
    record: Record, where: list[bytes], put_at: int, changes: list[tuple[int, int]], lost: int
) -> None:
    entry = Entry(tuple(where), put_at, record)
    value = CODEC.seal(b"place", entry)
    assert CODEC.open(b"place", where[0], value) == entry
    broken = bytearray(value)
    for at, byte in changes:
        broken[at % len(broken)] = byte
    changed = bytes(broken[: len(broken) - lost])
    try:
        assert CODEC.open(b"place", where[0], changed) == entry
    except StoreError:
        assert changed != value


@bounded
@given(st.binary(max_size=80))
def test_rubbish_is_no_record(value: bytes) -> None:
    try:
        CODEC.open(b"place", b"key", value)
    except StoreError:
        return
    raise AssertionError("rubbish was opened")
