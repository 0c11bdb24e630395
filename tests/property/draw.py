"""How hypothesis draws histories."""

from dataclasses import dataclass
from typing import TypeVar

from hypothesis import strategies as st

from kvreturn.config import Proof
from kvreturn.sim import TEMPLATES
from kvreturn.sim.config import ConnectorKind
from kvreturn.sim.faults import FaultKind
from kvreturn.sim.tokenizer import Kind
from property.history import STARTS, Fail, History, Pause, Restart, Setup, Step, Style, Talk, Together, Turn, Wait
from property.wording import ADAPTER, MODEL, OPTIONS, SYSTEMS, TEXTS, TOOLS

T = TypeVar("T")

# Seconds for which D keeps blocks, and for which the router would use a handle.
_TTLS = [(480.0, 450.0), (480.0, 450.0), (60.0, 450.0), (480.0, 40.0)]
HONEST = ("go_on",)
_CHANGES = (
    *["go_on"] * 12,
    *("regenerate", "regenerate", "retry", "retry", *["resume"] * 4, "edit", "edit", "delete", "shorten"),
    *("tools", "thinking", "model", "salt", "tenant", "picture", "picture", "finish_it", "batch"),
)


@dataclass(frozen=True)
class Kinds:
    """Which histories are drawn: proof level and connectors, and what varies besides."""

    proof: Proof
    p: ConnectorKind
    d: ConnectorKind
    templates: tuple[str, ...] = tuple(TEMPLATES)
    tokenizers: tuple[Kind, ...] = ("exact", "blurry")
    changes: tuple[str, ...] = _CHANGES


def _weighted(*branches: tuple[int, st.SearchStrategy[T]]) -> st.SearchStrategy[T]:
    """As `st.one_of`, which takes the same branch given twice for one."""
    order = [i for i, (weight, _) in enumerate(branches) for _ in range(weight)]
    return st.sampled_from(order).flatmap(lambda i: branches[i][1])


_TALKS = st.builds(
    Talk,
    api=st.sampled_from(["chat", "chat", "chat", "chat", "text", "ids"]),
    tenant=st.sampled_from([0, 0, 1]),
    model=st.sampled_from([MODEL, MODEL, MODEL, ADAPTER]),
    salt=st.sampled_from([None, None, "salt"]),
    tools=st.integers(0, len(TOOLS) - 1),
    system=st.integers(0, len(SYSTEMS) - 1),
)

_STYLES = st.sampled_from([Style(), Style(reasoning="drop")]) | st.builds(
    Style,
    reasoning=st.sampled_from(["keep", "drop", "old name"]),
    arguments=st.sampled_from(["as they came", "compact", "sorted"]),
    content=st.sampled_from(["text", "part", "parts"]),
    empty=st.sampled_from(["null", "text", "missing"]),
    json=st.sampled_from(["compact", "spaced", "ascii"]),
)


def _pauses() -> st.SearchStrategy[Pause]:
    passing = st.sampled_from([1.0, 16.0])  # over the end of a minute, and well within P's lease
    restarts = st.sampled_from(["P", "D", "router"])
    none: st.SearchStrategy[tuple[str | float, ...]] = st.just(())
    short: st.SearchStrategy[tuple[str | float, ...]] = none | st.tuples(passing)
    any_: st.SearchStrategy[tuple[str | float, ...]] = short | st.tuples(restarts) | st.tuples(passing, restarts)
    at_once = st.sampled_from(["go", "abort"])
    return st.one_of(
        st.builds(Pause, st.just("between"), meanwhile=any_, then=st.sampled_from(["go", "go", "later", "abort"])),
        st.builds(
            Pause, st.just("send"), st.integers(1, 9), any_, then=st.sampled_from(["later", "later", "go", "abort"])
        ),
        # In the midst of its work the node holds locks: others would wait for it, so it goes on at once. And a read
        # that has begun, once P saw that D still has time, is not made to last longer than what P allows for it.
        st.builds(Pause, st.just("P"), st.integers(1, 2), none | st.tuples(restarts), then=at_once),
        st.builds(Pause, st.just("D"), st.integers(1, 40), any_, then=at_once),
    )


def _turns(changes: tuple[str, ...], *, pauses: bool) -> st.SearchStrategy[Turn]:
    honest = changes == HONEST
    return st.builds(
        Turn,
        talk=st.sampled_from([0, 0, 0, 0, 1, 1, 2]),
        change=st.sampled_from(changes),
        at=st.integers(0, 11),
        text=st.integers(0, len(TEXTS) - 1),
        stream=st.booleans(),
        style=st.just(Style()) if honest else _STYLES,
        options=st.just(())
        if honest
        else st.just(()) | st.lists(st.integers(0, len(OPTIONS) - 1), max_size=2).map(tuple),
        cut=st.integers(0, 5),
        pause=_weighted((4, st.none()), (1, _pauses())) if pauses else st.none(),
    )


def _steps(changes: tuple[str, ...]) -> st.SearchStrategy[Step]:
    turn = _turns(changes, pauses=True)
    together = st.builds(Together, st.lists(_turns(changes, pauses=False), min_size=2, max_size=3).map(tuple))
    waits = st.builds(Wait, st.sampled_from([1.0, 44.0, 60.0, 420.0, 444.0, 464.0, 480.0, 86_400.0]))
    restarts = st.builds(Restart, st.sampled_from(["P", "D", "router"]))
    # D is not slow: its leg and a pause before it must not outlast P's lease.
    kinds: list[FaultKind] = ["status", "malformed", "drop", "omit_params"]
    statuses = st.sampled_from([500, 503, 400])
    fails = _weighted(
        (3, st.builds(Fail, st.just("P"), st.sampled_from([*kinds, "delay"]), statuses)),
        (1, st.builds(Fail, st.just("P"), st.sampled_from(kinds[:3]), statuses, st.just(value=True))),
        (1, st.builds(Fail, st.just("D"), st.sampled_from(kinds), statuses)),
    )
    return _weighted((12, turn), (1, together), (1, waits), (1, restarts), (1, fails))


def histories(kinds: Kinds, *, length: int = 14) -> st.SearchStrategy[History]:
    """Histories of up to `length` steps."""
    ttls = st.sampled_from(_TTLS)
    rooms = st.sampled_from([8.0, 1.5, 1.0, 1.0])
    setups = st.builds(
        lambda ttl, **rest: Setup(decoder_ttl=ttl[0], store_ttl=ttl[1], **rest),
        ttls,
        proof=st.just(kinds.proof),
        p=st.just(kinds.p),
        d=st.just(kinds.d),
        template=st.sampled_from(kinds.templates),
        tokenizer=st.sampled_from(kinds.tokenizers),
        p_cache=st.sampled_from([False, False, True]),
        d_cache=st.booleans(),
        p_room=rooms,
        d_room=rooms,
        block_size=st.sampled_from([16, 8, 5]),
        threshold=st.sampled_from([0, 16, 64]),
        pass_token_ids=st.sampled_from([True, True, False]),
        fallback=st.booleans(),
        secret=st.sampled_from(["", "shared"]),
        start=st.sampled_from(STARTS),
        modes=st.integers(0, 7),
        talks=st.lists(_TALKS, min_size=1, max_size=3).map(tuple),
    )
    steps = st.lists(_steps(kinds.changes), min_size=5, max_size=length).map(tuple)
    return st.builds(History, setups, steps)
