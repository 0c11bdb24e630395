"""Turns that were left on D: oldest first, node by node, and only so many."""

from dataclasses import replace

import pytest

from kvreturn.core import left as module
from kvreturn.core.handle import read_handle
from kvreturn.core.left import LeftTurns, Return
from kvreturn.core.ports import Record
from kvreturn.core.returning import Job
from support.turns import D1, D2, P1, compact, d_handle

JOB = Job(
    handle=read_handle(compact(d_handle(160))),
    prefill_node=P1,
    engine="51c0-p",
    decode_node=D1,
    kept=b"{}",
    prompt=b"[]",
    generated=(),
    tenant=b"t",
    secret=b"",
    salt="",
    finish_reason="stop",
    gap=None,
    turns=1,
)


def turn(name: str, node: str = D1) -> Return:
    return Return(name.encode(), replace(JOB, decode_node=node), Record(450.0, b"{}", None, node, P1))


def turns(*added: Return) -> LeftTurns:
    found = LeftTurns()
    for left in added:
        found.add(left)
    return found


def test_each_node_has_its_oldest() -> None:
    a, b, c = turn("a", D2), turn("b"), turn("c")
    left = turns(a, b, c)
    assert (left.oldest(D1, 0.0), left.oldest(D2, 0.0), left.oldest(P1, 0.0)) == (b, a, None)
    left.drop(b"b")
    left.drop(b"b")
    assert (left.oldest(D1, 0.0), left.oldest(D2, 0.0)) == (c, a)


@pytest.mark.parametrize(("bound", "most"), [("_TURNS", 2), ("_TOKENS", 2 * 160), ("_TOKENS", 3 * 160 - 1)])
def test_only_the_latest_are_known(monkeypatch: pytest.MonkeyPatch, bound: str, most: int) -> None:
    monkeypatch.setattr(module, bound, most)
    left = turns(turn("a"), turn("b"), turn("c"))
    assert left.oldest(D1, 0.0) == turn("b")
    left.drop(b"b")
    left.add(turn("d"))
    assert left.oldest(D1, 0.0) == turn("c")


def test_what_d_has_no_more_is_forgotten() -> None:
    left = turns(replace(turn("a"), until=10.0), turn("b"))
    assert left.oldest(D1, 9.9) == replace(turn("a"), until=10.0)
    assert left.oldest(D1, 10.0) == turn("b")
    assert left.oldest(D1, 0.0) == turn("b")
