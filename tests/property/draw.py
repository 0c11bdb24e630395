"""How hypothesis draws histories."""

from dataclasses import dataclass
from typing import Literal, TypeVar

from hypothesis import strategies as st

from kvreturn.settings.types import Proof, Return
from kvreturn.sim import TEMPLATES
from kvreturn.sim.config import ConnectorKind
from kvreturn.sim.faults import FaultKind
from kvreturn.sim.tokenizer import Kind
from property.history import (
    STARTS,
    Away,
    Back,
    Fail,
    History,
    Pause,
    Restart,
    SecondP,
    Setup,
    Step,
    Style,
    Talk,
    Together,
    Turn,
    Wait,
)
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
    """Which histories are drawn: proof level and connectors, and what varies besides.

    Attributes:
        returns: `return` of the models.
        flag: the first P's; see `Setup`.
        others: second prefill nodes; None for none.
        p_cache: whether P has a prefix cache. Without one, what P has not computed it has read.
    """

    proof: Proof
    p: ConnectorKind
    d: ConnectorKind
    templates: tuple[str, ...] = tuple(TEMPLATES)
    tokenizers: tuple[Kind, ...] = ("exact", "blurry")
    changes: tuple[str, ...] = _CHANGES
    returns: tuple[Return, ...] = ("lazy",)
    flag: bool | None = None
    others: tuple[SecondP | None, ...] = (None,)
    p_cache: tuple[bool, ...] = (False, False, True)


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


# A killed router's exchanges would fail, and show nothing that an aborted one does not.
_RESTARTS = st.sampled_from(["P", "D", "router"])


def _backs() -> st.SearchStrategy[Back]:
    none: st.SearchStrategy[tuple[str | float, ...]] = st.just(())
    restarts = st.sampled_from(["P", "D", "router", "killed router"])
    meanwhile = none | st.tuples(st.sampled_from([1.0, 16.0, 444.0]) | restarts)
    thens = st.sampled_from(["go", "later", "later", "late"])
    return st.one_of(
        st.builds(Back, st.just("queue"), st.just(1), meanwhile, thens),
        st.builds(Back, st.sampled_from(["sent", "come"]), st.integers(1, 2), meanwhile, thens),  # a probe comes first
        # In the midst of its work the node holds locks, as above.
        st.builds(Back, st.just("P"), st.integers(1, 3), none | st.tuples(restarts), st.sampled_from(["go", "late"])),
    )


def _pauses() -> st.SearchStrategy[Pause]:
    passing = st.sampled_from([1.0, 16.0])  # over the end of a minute, and well within P's lease
    restarts = _RESTARTS
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


def _turns(kinds: Kinds, *, pauses: bool) -> st.SearchStrategy[Turn]:
    honest, eager = kinds.changes == HONEST, kinds.returns != ("lazy",)
    return st.builds(
        Turn,
        talk=st.sampled_from([0, 0, 0, 0, 1, 1, 2]),
        change=st.sampled_from(kinds.changes),
        at=st.integers(0, 11),
        text=st.integers(0, len(TEXTS) - 1),
        stream=st.booleans(),
        style=st.just(Style()) if honest else _STYLES,
        options=st.just(())
        if honest
        else st.just(()) | st.lists(st.integers(0, len(OPTIONS) - 1), max_size=2).map(tuple),
        cut=st.integers(0, 5),
        pause=_weighted((4, st.none()), (1, _pauses())) if pauses else st.none(),
        back=_weighted((1, st.none()), (1, _backs())) if eager and pauses else st.none(),
    )


def _steps(kinds: Kinds) -> st.SearchStrategy[Step]:
    turn = _turns(kinds, pauses=True)
    together = st.builds(Together, st.lists(_turns(kinds, pauses=False), min_size=2, max_size=3).map(tuple))
    waits = st.builds(Wait, st.sampled_from([1.0, 44.0, 60.0, 420.0, 444.0, 464.0, 480.0, 86_400.0]))
    several: tuple[Literal["P", "P2"], ...] = ("P", "P2") if any(kinds.others) else ("P",)
    some_p = st.sampled_from(several)
    restarts = st.builds(Restart, _RESTARTS)
    # D is not slow: its leg and a pause before it must not outlast P's lease.
    faults: list[FaultKind] = ["status", "malformed", "drop", "omit_params"]
    statuses = st.sampled_from([500, 503, 400])
    # Whether a stock P has the flag is seen by the parameters in its answer to a probe: it does not leave them out.
    probed = kinds.returns != ("lazy",) and "stock" in {kinds.p, *(p2.connector for p2 in kinds.others if p2)}
    aways: st.SearchStrategy[Step] = st.builds(Away, some_p)
    fails = _weighted(
        (3, st.builds(Fail, some_p, st.sampled_from([*(faults[:3] if probed else faults), "delay"]), statuses)),
        (1, st.builds(Fail, st.just("P"), st.sampled_from(faults[:3]), statuses, st.just(value=True))),
        (1, st.builds(Fail, st.just("D"), st.sampled_from(faults), statuses)),
        (1 if any(kinds.others) else 0, aways),
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
        returns=st.sampled_from(kinds.returns),
        adapter_returns=st.sampled_from(kinds.returns),
        waits=st.booleans(),
        concurrency=st.sampled_from([1, 2]),
        p=st.just(kinds.p),
        flag=st.just(kinds.flag),
        p2=st.sampled_from(kinds.others),
        d=st.just(kinds.d),
        template=st.sampled_from(kinds.templates),
        tokenizer=st.sampled_from(kinds.tokenizers),
        p_cache=st.sampled_from(kinds.p_cache),
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
    steps = st.lists(_steps(kinds), min_size=5, max_size=length).map(tuple)
    return st.builds(History, setups, steps)
