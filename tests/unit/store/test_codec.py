import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreturn._proto.kvreturn.store.v1 import record_pb2 as pb
from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Record
from kvreturn.store.codec import Codec, Entry
from kvreturn.store.errors import StoreError
from support.stores import A, B, C, handle

NAME = b"kvr1r:0123456789abcdef"
CODEC = Codec(b"key")
optional_text = st.none() | st.text()
RECORDS = st.builds(
    Record,
    ttl=st.floats(0, 1e9),
    handle=st.none() | st.binary(max_size=5000),
    reason=st.none() | st.sampled_from(Outcome),
    decode_node=optional_text,
    prefill_node=optional_text,
    prompt=st.integers(0, 1 << 31),
    turns=st.integers(0, 1 << 31),
    returned=st.integers(0, 1 << 31),
    brought=st.integers(0, 1 << 31),
    pending=st.booleans(),
)


def seal(record: Record, *keys: bytes, place: bytes = NAME) -> bytes:
    return CODEC.seal(place, Entry(keys or (A,), 1, record))


@given(record=RECORDS, put_at=st.integers(0, 1 << 60))
def test_a_record_comes_back_as_it_was(record: Record, put_at: int) -> None:
    entry = Entry((A, B), put_at, record)
    assert CODEC.open(NAME, B, CODEC.seal(NAME, entry)) == entry


def kind_of(value: bytes, *, codec: Codec = CODEC, place: bytes = NAME, key: bytes = A) -> str:
    with pytest.raises(StoreError) as info:
        codec.open(place, key, value)
    assert not info.value.down
    return info.value.kind


def envelope(change: Callable[[pb.Envelope], None]) -> bytes:
    message = pb.Envelope.FromString(seal(handle()))
    change(message)
    return message.SerializeToString()


def flip(message: pb.Envelope) -> None:
    message.sealed = bytes([message.sealed[0] ^ 1]) + message.sealed[1:]


UNREADABLE = {
    "nothing": b"",
    "text": b"hello, this is no record",
    "a record of another version": envelope(lambda e: setattr(e, "version", 2)),
    "a changed bit": envelope(flip),
    "cut off": seal(handle())[:-3],
    "no nonce": envelope(lambda e: setattr(e, "nonce", b"")),
    "not deflated": envelope(lambda e: setattr(e, "deflated", True)),
    "zeros": bytes(100),
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_rubbish_is_unreadable(value: bytes) -> None:
    assert kind_of(value) == "unreadable"


@given(value=st.binary(max_size=200))
def test_any_rubbish_is_unreadable_and_nothing_else(value: bytes) -> None:
    assert kind_of(value) in {"unreadable", "wrong_key"}


def test_another_key_is_named() -> None:
    assert kind_of(seal(handle()), codec=Codec(b"another")) == "wrong_key"


def test_a_value_opens_only_at_its_own_place_and_for_its_keys() -> None:
    """field report 104: the owner is verified after the read."""
    value = seal(handle(), A, B)
    assert kind_of(value, place=NAME[:-1] + b"g") == "unreadable"
    assert kind_of(value, key=C) == "unreadable"
    assert CODEC.open(NAME, A, value).record == CODEC.open(NAME, B, value).record == handle()


def test_nothing_of_a_record_can_be_read_and_no_two_values_are_alike() -> None:
    record = Record(450.0, b'{"remote_host":"10.0.0.2"}', None, "10.0.0.2:8200", "10.0.0.1:8100")
    values = [seal(record) for _ in range(2)]
    assert not any(word in value for word in (A, b"10.0.0", b"remote") for value in values)
    assert values[0][20:] != values[1][20:]


def sealed(message: bytes) -> bytes:
    """As a router of another version would write it, with the same key."""
    nonce = os.urandom(12)
    return pb.Envelope(
        version=1, key_id=CODEC._key_id, nonce=nonce, sealed=CODEC._aead.encrypt(nonce, message, NAME)
    ).SerializeToString()


def test_fields_of_a_later_version_are_skipped_and_its_outcomes_are_unreadable() -> None:
    known = pb.Record(keys=[A], ttl=5.0, handle=b"h")
    later = b"\xf8\x7f\x01" + b"\xfa\x7f\x03abc"  # fields 2047: a number, a text
    assert CODEC.open(NAME, A, sealed(known.SerializeToString() + later)).record == Record(5.0, b"h", turns=0)
    assert kind_of(sealed(pb.Record(keys=[A], ttl=5.0, reason="a reason of tomorrow").SerializeToString())) == (
        "unreadable"
    )


@pytest.mark.parametrize("tokens", [24_576, 100_000])
def test_fr111_a_large_handle_is_made_smaller(tokens: int) -> None:
    blocks = ",".join(str(7000 + i) for i in range(tokens // 16))
    raw = f'{{"remote_block_ids":[[{blocks}]]}}'.encode()
    value = seal(Record(450.0, raw))
    assert len(value) < len(raw) / 2
    assert len(value) < 64 << 10
    assert CODEC.open(NAME, A, value).record.handle == raw
