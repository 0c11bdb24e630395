"""What is varied: deployments, loads, conversations."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from scale.figures import Figures, Tally
from scale.rates import Rates, fitted
from scale.router import Way
from scale.serving import Deployment, Serving
from scale.workload import Arrivals, Habits, Spread, Workload, habits

_WARM_UP = 0.35  # of a run, which is not counted: longer than the default TTL
_REST = 60.0  # seconds in which those are answered that have asked before the end
_PAIRS = 2
_RATE = 0.5  # conversations per second and pair: P computes for 40 % of the time without read-back
_MEMORIES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
_LINKS = (1.0, 1 / 4, 1 / 10, 1 / 25, 1 / 100)


@dataclass(frozen=True, slots=True)
class Point:
    """One thing that is modelled, in all ways.

    Attributes:
        label: in tables.
        value: on an axis.
        deployment: of nodes.
        workload: conversations.
        seconds: that they take to arrive.
    """

    label: str
    value: float
    deployment: Deployment
    workload: Workload
    seconds: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points along an axis.

    Attributes:
        title: what is varied.
        axis: with its unit.
        points: in order.
    """

    title: str
    axis: str
    points: tuple[Point, ...]


def serve(point: Point, way: Way) -> Figures:
    """Run the model once."""
    tally = Tally(_WARM_UP * point.seconds, point.seconds)
    return Serving(point.deployment, way, tally).run(point.workload, point.seconds + _REST)


def sweeps(size: float = 1.0, seed: int = 0) -> dict[str, Sweep]:
    """All of them.

    Args:
        size: of the runs: 1 is 1,600 conversations for each pair, 102,400 for 64 pairs, and half as many for 2 pairs.
        seed: of everything.
    """
    rates, agent = fitted(), habits("agent")
    most = max(round(1_600 * size), 20)

    def point(
        label: str,
        value: float,
        *,
        pairs: int = _PAIRS,
        rate: float = _RATE,
        kind: Habits = agent,
        **deployment: float | Rates,
    ) -> Point:
        conversations = most if pairs != _PAIRS else most // 2  # there are many such points
        arrivals = Arrivals(kind, pairs * conversations, rate * pairs, seed)
        on = replace(Deployment(rates, pairs, shared=kind.shared), **deployment)  # type: ignore[arg-type]
        return Point(label, value, on, arrivals, conversations / rate)

    def along(title: str, axis: str, make: Callable[[float], Point], values: tuple[float, ...]) -> Sweep:
        return Sweep(title, axis, tuple(map(make, values)))

    def room(share: float) -> Point:
        tokens = int(rates.room * share)
        return point(f"{tokens / 1e3:,.0f}k", tokens, prefill_room=tokens)

    def link(share: float) -> Point:
        slower = rates.prefill.transfer_rate * share
        timing = replace(rates.prefill, transfer_rate=slower), replace(rates.decode, transfer_rate=slower)
        return point(f"{slower / 1e9:.3g}", slower / 1e9, rates=replace(rates, prefill=timing[0], decode=timing[1]))

    return {
        "pairs": along("Pairs of P and D", "pairs", lambda n: point(f"{n:g}", n, pairs=int(n)), (1, 4, 16, 64)),
        "ttl": along(
            "How long D keeps blocks, P's cache an eighth",
            "TTL, s",
            lambda s: point(f"{s:g}", s, ttl=s, prefill_room=rates.room // 8),
            (15, 30, 60, 120, 240, 480, 960),
        ),
        "cache": along("P's KV cache", "tokens on each P", room, _MEMORIES),
        "load": along(
            "Load", "conversations/s and pair", lambda r: point(f"{r:g}", r, rate=r), (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
        ),
        "answers": along(
            "Length of answers",
            "median tokens of an answer that calls a tool",
            lambda n: point(f"{n:g}", n, rate=0.2, kind=replace(agent, call=Spread(n, 0.33, 4 * n))),
            (30, 90, 300, 1_000, 2_000),
        ),
        "link": along("Link between P and D", "GB/s", link, _LINKS),
        "regimes": Sweep("Regimes", "", tuple(_regimes(point, agent))),
    }


def _regimes(point: Callable[..., Point], agent: Habits) -> list[Point]:
    chat = habits("chat")
    small = int(fitted().room / 16)
    short = replace(agent, first=Spread(900, 0.3, 2_000), tool=Spread(40, 0.5, 200))
    slow = replace(agent, tool_gap=Spread(900, 0.5, 3_600))
    wordy = replace(agent, call=Spread(1_500, 0.33, 6_000))
    single = replace(chat, goes_on=0.0)
    return [
        point("agents", 0),
        point("agents, P's cache a sixteenth", 1, rate=0.2, prefill_room=small),
        point("agents that think aloud (1,500 tokens a call)", 2, rate=0.2, kind=wordy),
        point("the same, P's cache a sixteenth", 3, rate=0.1, kind=wordy, prefill_room=small),
        point("chats with people", 4, rate=1.5, kind=chat),
        point("single turns", 5, rate=2.0, kind=single),
        point("short prompts (1k, tools answer 40 tokens)", 6, kind=short),
        point("tools that take 15 minutes", 7, kind=slow),
    ]
