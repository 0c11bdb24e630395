from kvreturn.server.quota import Quota
from support.harness import Clock


def test_beyond_its_share_a_tenants_own_oldest_goes() -> None:
    quota = Quota(2, Clock())
    assert [quota.put(b"a", ticket, 60.0) for ticket in (b"1", b"2")] == [[], []]
    assert quota.put(b"b", b"3", 60.0) == []
    assert quota.put(b"a", b"4", 60.0) == [b"1"]
    assert quota.put(b"a", b"5", 60.0) == [b"2"]
    assert len(quota) == 3


def test_a_record_that_is_over_at_once_is_none() -> None:
    quota = Quota(2, Clock())
    assert quota.put(b"a", b"1", 0.0) == []
    assert len(quota) == 0


def test_what_was_taken_or_is_over_does_not_count() -> None:
    clock = Clock()
    quota = Quota(2, clock)
    quota.put(b"a", b"1", 60.0)
    quota.put(b"a", b"2", 90.0)
    quota.gone(b"1")
    quota.gone(b"1")
    assert quota.put(b"a", b"3", 60.0) == []
    clock.now += 60
    assert quota.put(b"a", b"4", 60.0) == []  # 3 is over; 2, though older, is not
    assert quota.put(b"a", b"5", 60.0) == [b"2"]


def test_what_was_replaced_lives_as_long_as_the_new_one() -> None:
    clock = Clock()
    quota = Quota(2, clock)
    quota.put(b"a", b"1", 60.0)
    quota.renewed(b"1", 3600.0)
    quota.renewed(b"of another router", 3600.0)
    clock.now += 100
    quota.put(b"a", b"2", 60.0)
    assert quota.put(b"a", b"3", 60.0) == [b"1"]
    quota.renewed(b"2", 0.001)
    clock.now += 1
    assert quota.put(b"a", b"4", 60.0) == []


def test_tenants_that_never_come_back_leave_nothing() -> None:
    clock = Clock()
    quota = Quota(10, clock)
    for n in range(1000):
        quota.put(b"%d" % n, b"t%d" % n, 60.0)
        clock.now += 1
    assert len(quota) <= 61
    assert len(quota._shares) <= 61
