"""What every session store does: in this process's memory, on one Redis server, in a Redis cluster."""

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import RedisCluster

from kvreturn.core.outcome import Outcome
from kvreturn.core.ports import Record, Taken
from kvreturn.store.memory import MemoryStore
from support.stores import A, B, C, Subject, handle, marker

NOTHING = (None, None)


async def take(subject: Subject, *keys: bytes) -> tuple[Record | None, Outcome | None]:
    taken = await subject.store.take(keys)
    return taken.record, taken.reason


async def test_a_handle_is_taken_once_and_by_all_of_its_keys(subject: Subject) -> None:
    await subject.store.put([A, B], handle())
    await subject.advance(3)
    taken = await subject.store.take([C, B])
    assert (taken.record, taken.reason) == (handle(), None)
    assert taken.age == pytest.approx(3.0, abs=1e-3)
    for keys in ([A], [B], [C, A, B]):
        assert await subject.store.take(keys) == Taken(None, Outcome.ALREADY_TAKEN)


@pytest.mark.parametrize(
    "record",
    [
        Record(450.0, b"{}", None, None, None),
        Record(25.125, bytes(range(256)) * 40, None, "[fd00::1]:8000", None),
        Record(450.0, None, Outcome.MULTIPLE_CHOICES, None, "p:1"),
        Record(1e6, b"", None, "d:1", "p:1"),
        Record(3600.0, None, None, "d:1", "p:1", prompt=20_000, turns=7, returned=20_300, brought=400, pending=True),
    ],
)
async def test_a_record_comes_back_as_it_was(subject: Subject, record: Record) -> None:
    await subject.store.put([A], record)
    assert await take(subject, A) == (record, None)


async def test_nothing_is_known_of_what_was_never_put(subject: Subject) -> None:
    assert await subject.store.take([A, B]) == Taken()
    assert await subject.store.take([]) == Taken()


async def test_the_first_key_wins_and_the_others_stay(subject: Subject) -> None:
    await subject.store.put([A], handle("far"))
    await subject.store.put([B], handle("near"))
    assert await take(subject, B, A) == (handle("near"), None)
    assert await take(subject, B, A) == (handle("far"), None)
    assert await take(subject, B, A) == (None, Outcome.ALREADY_TAKEN)


@pytest.mark.parametrize("places", [(5, 100, 200), (100, 3000, 8191)])
async def test_the_first_of_many_keys_wins(subject: Subject, places: tuple[int, ...]) -> None:
    # A conversation of 4,096 items, whose last turns left nothing: two keys for each.
    keys = [b"%017d" % i for i in range(8192)]
    if isinstance(subject.client, RedisCluster):
        places = tuple(place for place in places if place < 256)
    for place in reversed(places):
        await subject.store.put([keys[place]], handle(str(place)))
    for place in places:
        assert await take(subject, *keys) == (handle(str(place)), None)
    assert await take(subject, *keys) == (None, Outcome.ALREADY_TAKEN)


async def test_under_one_key_the_newest_goes_first(subject: Subject) -> None:
    for text in ("1", "2", "3"):
        await subject.store.put([A], handle(text))
    taken = [(await subject.store.take([A])).record for _ in range(4)]
    assert taken == [handle("3"), handle("2"), handle("1"), None]


async def test_what_is_taken_once_need_hold_no_handle(subject: Subject) -> None:
    await subject.store.put([A], Record(60.0, b"", decode_node="d:1"))
    assert not any(one.handle for one in (await subject.store.look(9)).some)  # of a cluster, it tells of one node
    assert [part async for part in subject.store.take_all()] == []
    assert await take(subject, A) == (Record(60.0, b"", decode_node="d:1"), None)
    assert await take(subject, A) == (None, Outcome.ALREADY_TAKEN)


async def test_fr54_of_20_concurrent_requests_one_gets_the_handle(subject: Subject) -> None:
    await subject.store.put([A, B], handle())
    taken = await asyncio.gather(*(subject.store.take([A, B]) for _ in range(20)))
    assert [t.record for t in taken if t.record] == [handle()]
    assert {t.reason for t in taken if not t.record} == {Outcome.ALREADY_TAKEN}


@pytest.mark.parametrize(("age", "there"), [(0.0, True), (440.0, True), (450.0, False), (451.0, False)])
async def test_fr55_a_handle_lives_for_its_ttl(subject: Subject, age: float, there: bool) -> None:  # noqa: FBT001
    await subject.store.put([A], handle(ttl=450.0))
    await subject.advance(age)
    assert await take(subject, A) == ((handle(ttl=450.0), None) if there else (None, Outcome.EXPIRED))


async def test_a_ttl_of_nothing_expires_at_once_and_says_so(subject: Subject) -> None:
    # What a D with a `decoder_kv_blocks_ttl` of 5 s comes to: its operator has to see why nothing is ever reused.
    await subject.store.put([A], handle(ttl=0.0))
    await subject.advance(30)
    assert await take(subject, A) == (None, Outcome.EXPIRED)


async def test_a_short_ttl_and_a_long_one_do_not_change_each_other(subject: Subject) -> None:
    await subject.store.put([A, B], handle("long", ttl=450.0))
    await subject.store.put([A, C], handle("short", ttl=1.0))
    await subject.advance(30)
    assert await take(subject, C) == (None, Outcome.EXPIRED)
    assert await take(subject, A) == (handle("long", ttl=450.0), None)


async def test_a_marker_tells_its_reason_again_and_again(subject: Subject) -> None:
    await subject.store.put([A], marker())
    for i in range(3):
        taken = await subject.store.take([A])
        assert (taken.record, taken.reason) == (marker(), None)
        assert taken.age == pytest.approx(100 * i, abs=1e-3)
        await subject.advance(100)
    await subject.advance(200)
    assert await take(subject, A) == (None, Outcome.NO_HANDLE_FROM_DECODE)


async def test_a_newer_marker_stands_before_an_older_handle(subject: Subject) -> None:
    # The turn that ended without a handle is the predecessor; an older one is never a fallback (field report 60).
    await subject.store.put([A], handle())
    await subject.store.put([A], marker())
    assert await take(subject, A) == (marker(), None)


async def test_the_reason_of_the_nearest_is_told(subject: Subject) -> None:
    await subject.store.put([A], handle(ttl=5.0))
    await subject.store.put([B], handle())
    await subject.store.take([B])
    await subject.advance(6)
    assert await take(subject, B, A) == (None, Outcome.ALREADY_TAKEN)
    assert await take(subject, A, B) == (None, Outcome.EXPIRED)


async def test_a_reason_is_forgotten_in_the_end(subject: Subject) -> None:
    await subject.store.put([A], handle(ttl=100.0))
    await subject.store.put([B], handle(ttl=100.0))
    await subject.store.take([A])
    await subject.advance(99)
    assert await take(subject, A) == (None, Outcome.ALREADY_TAKEN)
    await subject.advance(1)
    assert await take(subject, B) == (None, Outcome.EXPIRED)
    await subject.advance(101)
    assert await take(subject, A) == NOTHING
    assert await take(subject, B) == NOTHING


async def test_one_key_holds_the_eight_newest(subject: Subject) -> None:
    for i in range(12):
        await subject.store.put([A], handle(str(i)))
    taken = [(await subject.store.take([A])).record for _ in range(9)]
    assert taken == [*(handle(str(i)) for i in range(11, 3, -1)), None]


RETURNING = Record(3600.0, None, None, "d:1", "p:1", prompt=100, turns=2, returned=160, pending=True)


async def test_a_record_is_replaced_while_it_is_there(subject: Subject) -> None:
    """An eager return: the handle gives way to the word of where its tokens are going, and then of where they are."""
    ticket = await subject.store.put([A, B], handle(ttl=450.0))
    await subject.advance(10)
    assert await subject.store.replace(ticket, RETURNING) is True
    await subject.advance(5)
    for key in (A, B, A):  # it is no handle: it stays
        taken = await subject.store.take([key])
        assert (taken.record, taken.ticket) == (RETURNING, ticket)
        assert taken.age == pytest.approx(5, abs=1e-3)
    back = replace(RETURNING, pending=False)
    assert await subject.store.replace(ticket, back) is True
    await subject.advance(3599)  # its time has begun anew
    assert await take(subject, B) == (back, None)
    await subject.advance(1)
    assert await take(subject, B) == (None, Outcome.EXPIRED)


async def test_what_was_taken_or_has_expired_is_not_replaced(subject: Subject) -> None:
    taken, expired = await subject.store.put([A], handle()), await subject.store.put([B], handle(ttl=5.0))
    found = await subject.store.take([A])
    assert found.ticket == taken
    assert await subject.store.replace(taken, RETURNING) is False
    await subject.advance(5)
    assert await subject.store.replace(expired, RETURNING) is False
    assert await take(subject, A) == (None, Outcome.ALREADY_TAKEN)
    assert await take(subject, B) == (None, Outcome.EXPIRED)


async def test_either_the_next_turn_or_the_return_has_the_handle(subject: Subject) -> None:
    for i in range(20):
        key = b"%017d" % i
        ticket = await subject.store.put([key, A], handle())
        calls = [subject.store.take([key]), subject.store.replace(ticket, RETURNING), subject.store.take([key])]
        first, replaced, second = await asyncio.gather(*calls[:: 1 if i % 2 else -1])
        got = [t.record for t in (first, second) if isinstance(t, Taken) and t.record and t.record.handle]
        assert len(got) == (0 if replaced else 1)


async def test_a_store_that_is_there_answers(subject: Subject) -> None:
    await subject.store.ping()


D, E = b"cd" * 8, b"ce" * 8  # keys of conversations


async def records(subject: Subject, conversation: bytes) -> list[Record | None]:
    return [taken.record for taken in await subject.store.end(conversation)]


async def test_a_conversation_ends_with_all_that_is_left_of_it(subject: Subject) -> None:
    """Its branches and sub-agents each have their own; what was taken before is gone, and notes go too."""
    await subject.store.put([A], handle("taken"), D)
    assert await take(subject, A) == (handle("taken"), None)
    await subject.store.put([A], handle("expired", ttl=5.0), D)
    await subject.store.put([A], handle("branch"), D)
    await subject.store.put([B], Record(450.0, returned=20_000, prefill_node="p:1"), D)
    await subject.store.put([B], handle("another one's"), E)
    await subject.store.put([C], handle("nobody's"))
    await subject.store.put([C], handle("mine"), D)
    await subject.advance(6)
    assert await take(subject, C) == (handle("mine"), None)
    ended = await subject.store.end(D)
    assert [t.record for t in ended] == [
        handle("branch"),
        Record(450.0, returned=20_000, prefill_node="p:1"),
    ]
    assert len({t.ticket for t in ended}) == 2
    assert await records(subject, D) == []
    assert (await take(subject, A))[0] is None
    assert await take(subject, B) == (handle("another one's"), None)
    assert await take(subject, C) == (handle("nobody's"), None)
    assert await records(subject, E) == []


async def test_what_was_replaced_is_still_its_conversations(subject: Subject) -> None:
    ticket = await subject.store.put([A], handle(ttl=10.0), D)
    await subject.advance(8)
    assert await subject.store.replace(ticket, handle("new", ttl=450.0))
    await subject.advance(100)
    assert await records(subject, D) == [handle("new")]
    assert not await subject.store.replace(ticket, handle())


async def test_of_very_many_records_of_a_conversation_the_newest_end_and_the_others_can_still_be_taken(
    subject: Subject,
) -> None:
    for i in range(70):
        await subject.store.put([b"%017d" % i], handle(str(i)), D)
    assert await records(subject, D) == [handle(str(i)) for i in range(6, 70)]
    assert await take(subject, b"%017d" % 5) == (handle("5"), None)


async def test_all_handles_are_taken_and_notes_stay(subject: Subject) -> None:
    for i in range(150):
        await subject.store.put([b"%017d" % i], handle(str(i)) if i % 3 else marker())
    parts = [part async for part in subject.store.take_all()]
    taken = [t.record for part in parts for t in part]
    assert sorted(t.handle or b"" for t in taken if t) == sorted(b"%d" % i for i in range(150) if i % 3)
    assert max(map(len, parts)) <= 64
    assert await take(subject, b"%017d" % 3) == (marker(), None)
    assert await take(subject, b"%017d" % 4) == (None, Outcome.ALREADY_TAKEN)
    assert [part async for part in subject.store.take_all()] == []


async def test_what_it_shows_to_people_is_bounded_and_tells_no_contents(subject: Subject) -> None:
    for i in range(150):  # so that a third of them, on the cluster's node that is looked at, is surely more than 20
        await subject.store.put([b"%017d" % i], handle("secret" * 9, ttl=450.0), D)
    await subject.advance(50)
    seen = await subject.store.look(20)
    # Redis has two keys for each, the record and what leads there, and one that tells which routers there are.
    assert seen.records == (150 if isinstance(subject.store, MemoryStore) else 301)
    assert len(seen.some) == 20
    assert all(one.handle and one.ttl == pytest.approx(400.0, abs=5) and one.size >= 54 for one in seen.some)
    assert len({one.name for one in seen.some}) == 20
    assert "secret" not in repr(seen)
    assert (await subject.store.look(0)).some == []
