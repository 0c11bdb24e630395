"""The ways to run: proof level and connectors, what of it is tried how often, and what must come of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from property.draw import Kinds


@dataclass(frozen=True)
class Level:
    """A way to run.

    Attributes:
        kinds: histories.
        share: how many of them, for each template and tokenizer.
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
_REUSE = {**_SESSIONS, "hit": 40, "partial_hit": 40, "no_handle_from_decode": 2, "read_failed": 2, "below_threshold": 2}

LEVELS = {
    "connector": Level(
        Kinds("connector", "kvreturn", "kvreturn"), 6, {**_REUSE, "local_hit": 10, "node_gone": 2}, read=15_000
    ),
    "router": Level(Kinds("router", "stock", "kvreturn"), 6, {**_REUSE, "unproven": 5}, read=15_000),
    "stock P": Level(Kinds("connector", "stock", "kvreturn"), 3, {**_SESSIONS, "unproven": 50}),
    "stock D": Level(Kinds("connector", "kvreturn", "stock"), 2, {**_COMMON, "unproven": 10}),
    "router beside a connector": Level(Kinds("router", "kvreturn", "kvreturn"), 2, {**_COMMON, "unproven": 10}),
    "off": Level(Kinds("off", "stock", "stock"), 3, {"disabled": 200, "rejected": 5}),
}
