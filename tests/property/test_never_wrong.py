"""Never wrong: whatever happens, every complete answer is the one that a plain node gives.

And the property can fail: without its guards, and without any proof, it does.
"""

import asyncio
import itertools
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, seed, settings

from kvreturn.core import wire
from kvreturn.sim.tokenizer import Kind
from property.dangers import DANGERS
from property.draw import HONEST, Kinds, histories
from property.history import History
from property.levels import LEVELS
from property.play import play
from property.return_dangers import RETURN_DANGERS
from property.verdict import Tally, WrongAnswerError

_DEFAULT = 400
# Histories in all, about. With fewer than the default, some outcomes would not come up.
EXAMPLES = max(_DEFAULT, int(os.environ.get("KVRETURN_PROPERTY_EXAMPLES", "0")))
_SCALE = EXAMPLES / _DEFAULT
pytestmark = pytest.mark.timeout(600 * _SCALE)  # hypothesis takes its time to make a counterexample small
_ENOUGH = 60  # histories within which a mistake of every kind is found


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Each router warns once of its nodes: of hundreds of routers that is too much for a report."""
    caplog.set_level(logging.ERROR, "kvreturn")


@pytest.mark.parametrize("name", LEVELS)
def test_every_complete_answer_is_the_oracles(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    level, tally = LEVELS[name], Tally()
    for number, kinds in enumerate(_combinations(level.kinds), start=100 * list(LEVELS).index(name)):
        _explore(kinds, math.ceil(level.share * _SCALE), number, tally)
    with capsys.disabled():
        print(f"\n{name}: {tally}")  # noqa: T201 - says what the run is worth
    assert not _missed(tally.outcomes, level.outcomes), "the histories reach too little of what can become of a turn"
    assert not _missed(tally.returns, level.returns), "the histories reach too little of what can become of a return"
    assert level.returns or not tally.returns
    assert tally.read_tokens >= level.read
    assert level.read or not tally.read_tokens
    assert tally.fates["complete"] > tally.turns // 2
    if level.read and level.share >= 6:  # fewer histories do not come everywhere
        assert all(tally.fates[f"left ({where})"] for where in ("send", "P", "between", "D"))


def _missed(found: Mapping[str, int], wanted: Mapping[str, int]) -> Mapping[str, tuple[int, int]]:
    """What was found too rarely: how often, and how often it must be at least."""
    return {name: (found.get(name, 0), least) for name, least in wanted.items() if found.get(name, 0) < least}


def _combinations(kinds: Kinds) -> Iterator[Kinds]:
    for template, tokenizer in itertools.product(kinds.templates, kinds.tokenizers):
        yield replace(kinds, templates=(template,), tokenizers=(tokenizer,))


def _explore(kinds: Kinds, examples: int, number: int, tally: Tally) -> None:
    @seed(number)
    @settings(max_examples=examples)
    @given(histories(kinds))
    def explore(history: History) -> None:
        asyncio.run(play(history, tally))

    explore()


# --- single dangers ---

_DANGERS = DANGERS | RETURN_DANGERS


def _at(level: str, history: History) -> History:
    kinds = LEVELS[level].kinds
    returns = kinds.returns[0]
    setup = replace(
        history.setup,
        proof=kinds.proof,
        returns=returns,
        adapter_returns=returns,
        p=kinds.p,
        flag=kinds.flag,
        d=kinds.d,
    )
    return replace(history, setup=setup)


@pytest.mark.parametrize(("name", "level"), [(name, level) for name, d in _DANGERS.items() for level in d.levels])
def test_what_is_dangerous_goes_well(name: str, level: str) -> None:
    tally = Tally()
    asyncio.run(play(_at(level, _DANGERS[name].history), tally))
    assert tally.compared == tally.turns


@pytest.mark.parametrize("name", _DANGERS)
def test_without_its_guard_it_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    danger = _DANGERS[name]
    danger.unguard(monkeypatch)
    with pytest.raises(danger.error, match=danger.says):
        asyncio.run(play(_at(danger.level, danger.history), Tally()))


# --- without proof ---


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
        except AssertionError:  # an engine has died of it, for example
            pass

    explore()
    return found[0] if found else None


def _believe(
    proof: wire.Proof, held: int, tokens: list[int], seed: bytes, extra: Mapping[int, bytes] | None = None
) -> int:
    """In place of `wire.proven_tokens`, for router and nodes: compares nothing."""
    del proof, seed, extra
    return min(held, len(tokens))


@pytest.mark.parametrize("template", ["plain", "drop_thinking", "dated_minute"])
@pytest.mark.parametrize("name", ["connector", "router"])
def test_without_any_proof_it_is_wrong(name: str, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "proven_tokens", _believe)
    assert _mistake(replace(LEVELS[name].kinds, templates=(template,)))


@pytest.mark.parametrize(
    ("template", "tokenizer"), [("tools_last", "exact"), ("dated_minute", "exact"), ("plain", "blurry")]
)
def test_trust_is_misplaced_where_text_is_not_prefix_stable(template: str, tokenizer: Kind) -> None:
    assert _mistake(Kinds("trusted", "stock", "kvreturn", (template,), (tokenizer,), HONEST))


def test_trust_holds_for_honest_continuations_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()
    _explore(Kinds("trusted", "stock", "stock", ("plain",), ("exact",), HONEST), math.ceil(24 * _SCALE), 1, tally)
    with capsys.disabled():
        print(f"\ntrusted, honest: {tally}")  # noqa: T201 - as above
    assert tally.outcomes["hit"] >= 20
    assert tally.read_tokens >= 2_000
