"""The ways to run: proof level and connectors, what of it is tried how often, and what must come of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvreturn.settings.types import Return
from property.draw import Kinds
from property.history import SecondP


@dataclass(frozen=True)
class Level:
    """A way to run.

    Attributes:
        kinds: histories.
        share: how many of them, for each template and tokenizer.
        outcomes: how many turns must end so at least.
        read: tokens that must be read back at least; 0 forbids it.
        returns: how many eager returns must end so at least; without any, there must be none.
    """

    kinds: Kinds
    share: int
    outcomes: Mapping[str, int]
    read: int = 0
    returns: Mapping[str, int] = field(default_factory=dict)


# About a quarter of what the default run has; of what is rare there, one.
_COMMON = {"first_turn": 14, "rejected": 1}
_RARE = ("no_handle_from_decode", "below_threshold", "read_failed", "multiple_choices", "cancelled")
_OFTEN = {"hit": 20, "partial_hit": 20, "not_a_continuation": 10, "already_taken": 5, "expired": 3}
_REUSE = {**_COMMON, **_OFTEN, **dict.fromkeys(_RARE, 1)}

_RETURNED = {**_COMMON, "hit": 12, "not_a_continuation": 4, "no_handle_from_decode": 5}
_MIXED: tuple[Return, ...] = ("lazy", "lazy", "lazy", "lazy", "eager", "auto")
_EAGER: tuple[Return, ...] = ("eager", "auto", "eager", "lazy")
_CACHED = (True, True, True, False)
_OWN, _FLAGGED, _BARE = SecondP(), SecondP("stock"), SecondP("stock", flag=False)

LEVELS = {
    "connector": Level(
        Kinds("connector", "kvreturn", "kvreturn", returns=_MIXED, others=(None, None, _OWN, _BARE)),
        6,
        {**_REUSE, "local_hit": 4, "node_gone": 1, "return_failed": 1, "evicted": 5},
        read=6_000,
        returns={"returned": 14, "timeout": 1},
    ),
    "router": Level(
        Kinds("router", "stock", "kvreturn", returns=_MIXED, others=(None, None, _FLAGGED)),
        6,
        {**_REUSE, "unproven": 3, "evicted": 5, "below_threshold": 0},
        read=8_000,
        returns={"returned": 14, "taken": 1},
    ),
    "stock P": Level(Kinds("connector", "stock", "kvreturn"), 3, {**_COMMON, "unproven": 30}),
    "stock D": Level(Kinds("connector", "kvreturn", "stock"), 2, {**_COMMON, "unproven": 10}),
    "router beside a connector": Level(Kinds("router", "kvreturn", "kvreturn"), 2, {**_COMMON, "unproven": 10}),
    "off": Level(Kinds("off", "stock", "stock"), 3, {"disabled": 60, "rejected": 1}),
    "eager": Level(
        Kinds("connector", "kvreturn", "kvreturn", returns=_EAGER, others=(None, _OWN, _FLAGGED), p_cache=_CACHED),
        3,
        {**_RETURNED, "partial_hit": 1, "evicted": 2, "local_hit": 1},
        read=1_500,
        returns={"returned": 25, "local": 5, "taken": 1, "timeout": 1, "busy": 1},
    ),
    "eager, router": Level(
        Kinds("router", "stock", "kvreturn", returns=_EAGER, others=(None, _FLAGGED, _OWN), p_cache=_CACHED),
        3,
        {**_RETURNED, "partial_hit": 1, "evicted": 2, "expired": 1},
        read=2_500,
        returns={"returned": 25, "taken": 1, "timeout": 1, "busy": 1},
    ),
    "eager, all stock": Level(
        Kinds("off", "stock", "stock", returns=_EAGER, flag=True, others=(None, _FLAGGED, _BARE), p_cache=_CACHED),
        3,
        {**_RETURNED, "disabled": 15, "evicted": 1},
        read=1_200,
        returns={"returned": 20, "timeout": 1},
    ),
    "eager, all stock, P without the flag": Level(
        Kinds("off", "stock", "stock", returns=_EAGER, flag=False, others=(None, _BARE, _FLAGGED), p_cache=_CACHED),
        3,
        {**_RETURNED, "disabled": 15, "return_failed": 1},
        read=2_000,
        returns={"returned": 20, "timeout": 1},
    ),
}
