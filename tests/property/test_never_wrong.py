"""Never wrong: whatever happens, every complete answer is the one that a plain node gives.

The same property, with proof switched off, must fail: the last tests here show that it can.
"""

import asyncio
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, seed, settings

from kvreturn.core import wire
from kvreturn.sim import TEMPLATES
from kvreturn.sim.tokenizer import Kind
from property.history import HONEST, OPTIONS, Fail, History, Kinds, Setup, Talk, Together, Turn, histories
from property.play import play
from property.verdict import Tally, WrongAnswerError

_DEFAULT = 300
# Histories in all, about; fewer than the default would not reach every outcome.
EXAMPLES = max(_DEFAULT, int(os.environ.get("KVRETURN_PROPERTY_EXAMPLES", "0")))
_SCALE = EXAMPLES / _DEFAULT
_ENOUGH = 60  # histories within which a mistake of every kind is found


@dataclass(frozen=True)
class Level:
    """A way to run.

    Attributes:
        kinds: histories.
        share: of them for each template and tokenizer.
        outcomes: how many turns must end so at least.
        read: tokens that must be read back at least; 0 forbids it.
    """

    kinds: Kinds
    share: int
    outcomes: Mapping[str, int]
    read: int = 0


_COMMON = {"first_turn": 30, "rejected": 2}
_SESSIONS = {
    **_COMMON,
    "cancelled": 1,
    "not_a_continuation": 5,
    "already_taken": 5,
    "multiple_choices": 2,
    "expired": 2,
}

LEVELS = {
    "connector": Level(
        Kinds("connector", "kvreturn", "kvreturn"),
        7,
        {**_SESSIONS, "hit": 60, "partial_hit": 60, "local_hit": 20, "below_threshold": 5, "node_gone": 2}
        | {"no_handle_from_decode": 2, "read_failed": 2},
        read=10_000,
    ),
    "router": Level(
        Kinds("router", "stock", "kvreturn"),
        7,
        {**_SESSIONS, "hit": 60, "partial_hit": 60, "read_failed": 2, "unproven": 5},
        read=10_000,
    ),
    "stock P": Level(Kinds("connector", "stock", "kvreturn"), 3, {**_SESSIONS, "unproven": 50}),
    "stock D": Level(Kinds("connector", "kvreturn", "stock"), 2, {**_COMMON, "unproven": 10}),
    "connector on P for nothing": Level(Kinds("router", "kvreturn", "kvreturn"), 2, {**_COMMON, "unproven": 10}),
    "off": Level(Kinds("off", "stock", "stock"), 4, {"disabled": 200, "rejected": 5}),
}


@pytest.mark.timeout(600 * _SCALE)  # hypothesis takes its time to make a counterexample small
@pytest.mark.parametrize("name", LEVELS)
def test_every_complete_answer_is_the_oracles(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    level, tally = LEVELS[name], Tally()
    examples = math.ceil(level.share * _SCALE)
    for number, kinds in enumerate(_combinations(level.kinds)):

        @seed(number)
        @settings(max_examples=examples)
        @given(histories(kinds))
        def explore(history: History) -> None:
            asyncio.run(play(history, tally))

        explore()
    with capsys.disabled():
        print(f"\n{name}: {tally}")  # noqa: T201 - what the run is worth
    missed = {o: (tally.outcomes[o], least) for o, least in level.outcomes.items() if tally.outcomes[o] < least}
    assert not missed, "the histories reach too little of what can become of a turn (got, least)"
    assert tally.read_tokens >= level.read
    assert level.read or not tally.read_tokens
    assert tally.fates["complete"] > tally.turns // 2


def _combinations(kinds: Kinds) -> Iterator[Kinds]:
    for template, tokenizer in itertools.product(kinds.templates, kinds.tokenizers):
        yield replace(kinds, templates=(template,), tokenizers=(tokenizer,))


# What these histories found. Each is played at every level.
_LONG = 2  # of `history.TEXTS`, and of `history.SYSTEMS`
_THREE = next(i for i, option in enumerate(OPTIONS) if option.get("n") == 3)
_TALKS = (Talk(system=_LONG), Talk(system=1), Talk(system=_LONG, salt="salt"))
FOUND = {
    "the minute ends between /tokenize and P's rendering": History(
        Setup(template="dated_minute", p_cache=False, d_cache=False, talks=_TALKS),
        (Turn(), Fail("P", "delay"), Turn(), Turn()),
    ),
    "several prompts, and P's blocks of one": History(
        Setup(talks=(Talk("text", system=_LONG), Talk("ids", system=_LONG))),
        (Turn(), Turn(), Turn(change="batch"), Turn(talk=1), Turn(talk=1, change="batch"), Turn(talk=1)),
    ),
    "several choices, for which D has no room at once, and P's blocks that the first has freed": History(
        Setup(p_cache=False, d_cache=False, p_room=1.0, d_room=1.0, talks=_TALKS),
        (
            *[Turn(text=_LONG)] * 2,
            *[Together((Turn(text=_LONG, options=(_THREE,)), Turn(1, text=_LONG), Turn(2, text=_LONG)))] * 3,
        ),
    ),
}


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("history", FOUND.values(), ids=FOUND)
def test_what_went_wrong_once_does_not_again(name: str, history: History) -> None:
    kinds, tally = LEVELS[name].kinds, Tally()
    setup = replace(history.setup, proof=kinds.proof, p=kinds.p, d=kinds.d)
    asyncio.run(play(replace(history, setup=setup), tally))
    assert tally.compared == tally.turns


# --- the property can fail ---


def _mistake(kinds: Kinds) -> WrongAnswerError | None:
    """The first wrong answer, if there is one within `_ENOUGH` histories. All else may go wrong too: it does."""
    found: list[WrongAnswerError] = []

    @seed(1)
    @settings(max_examples=_ENOUGH)
    @given(histories(kinds))
    def explore(history: History) -> None:
        if found:
            return
        try:
            asyncio.run(play(history, Tally()))
        except WrongAnswerError as error:
            found.append(error)
        except AssertionError:
            pass

    explore()
    return found[0] if found else None


def _believe(
    proof: wire.Proof, held: int, tokens: list[int], seed: bytes, extra: Mapping[int, bytes] | None = None
) -> int:
    """In place of `wire.proven_tokens`: compares nothing."""
    del proof, seed, extra
    return min(held, len(tokens))


@pytest.mark.parametrize("template", ["plain", "drop_thinking", "dated_minute"])
@pytest.mark.parametrize("name", ["connector", "router"])
def test_without_the_proof_it_would_be_wrong(name: str, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "proven_tokens", _believe)
    assert _mistake(replace(LEVELS[name].kinds, templates=(template,)))


@pytest.mark.parametrize(
    ("template", "tokenizer"), [("tools_last", "exact"), ("dated_minute", "exact"), ("plain", "blurry")]
)
def test_trust_is_misplaced_where_text_is_not_prefix_stable(template: str, tokenizer: Kind) -> None:
    kinds = Kinds("trusted", "stock", "kvreturn", (template,), (tokenizer,), HONEST)
    assert _mistake(kinds)


def test_trust_holds_for_honest_continuations_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()

    @seed(1)
    @settings(max_examples=math.ceil(24 * _SCALE))
    @given(histories(Kinds("trusted", "stock", "stock", ("plain",), ("exact",), HONEST)))
    def explore(history: History) -> None:
        asyncio.run(play(history, tally))

    explore()
    with capsys.disabled():
        print(f"\ntrusted, honest: {tally}")  # noqa: T201 - as above
    assert tally.outcomes["hit"] >= 20
    assert tally.read_tokens >= 2_000


def test_every_template_is_tried() -> None:
    assert {kinds.templates for kinds in _combinations(LEVELS["router"].kinds)} == {(name,) for name in TEMPLATES}
