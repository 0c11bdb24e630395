"""What the router decides: which nodes, whether to read, when to return. The decisions are its own code's."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvreturn.core.choice import Choice, Chooser, Fate, Moment
from kvreturn.core.cost import CostModel
from kvreturn.core.turn import SLACK_TOKENS
from kvreturn.core.unseen import Unseen
from kvreturn.settings.returns import Returns
from scale.loop import Loop
from scale.memory import BLOCK
from scale.nodes import DecodeNode, Node, Pin, PrefillNode, Talk

N = TypeVar("N", bound=Node)
Mode = Literal["lazy", "eager", "auto"]

SETTINGS = Returns()  # the product's defaults
LOOK = SETTINGS.pressure_interval
_SLACK_REQUESTS = 16  # as core/turn.py has it for a D whose blocks a conversation has
_SHORTER, _MARGIN = 30 / 480, 5.0  # the router's TTL is that share shorter than D's; vLLM reads nothing in the last 5 s
_FINAL = {"small", "slow_link"}  # why a turn stays on D even if that has no room


@dataclass(frozen=True, slots=True)
class Way:
    """A way to serve.

    Attributes:
        name: in tables.
        mode: how KV goes back; None if it does not.
        affinity: whether a conversation's turns go to the same nodes.
    """

    name: str
    mode: Mode | None
    affinity: bool = True


WAYS = (
    Way("spread", None, affinity=False),
    Way("one-way", None),
    Way("lazy", "lazy"),
    Way("eager", "eager"),
    Way("auto", "auto"),
)


def choose_node(nodes: Sequence[N], prefer: N | None, slack: int, order: "itertools.count[int]") -> N:
    """The rule of `kvreturn.upstream.pool.Pool.choose` for nodes that are all well, without its bookkeeping.

    Args:
        nodes: to choose from.
        prefer: where the conversation was.
        slack: how much busier than the idlest one that may be.
        order: counts choices.
    """
    if prefer is None or prefer.load > slack:  # none has less than nothing to do
        least = min([node.load for node in nodes])
        if prefer is None or prefer.load > least + slack:
            prefer = min([node for node in nodes if node.load == least], key=lambda node: node.chosen)
    prefer.chosen = next(order)
    return prefer


class Router:
    """One router process for all nodes.

    Args:
        loop: time.
        way: how it serves.
        prefill: prefill nodes.
        decode: decode nodes.
        ttl: seconds for which D keeps blocks.
    """

    def __init__(self, loop: Loop, way: Way, prefill: list[PrefillNode], decode: list[DecodeNode], ttl: float) -> None:
        self._loop = loop
        self._way = way
        self._prefill, self._decode = prefill, decode
        self._margin = max(_SHORTER * ttl, _MARGIN)
        self._ttl = max(ttl - self._margin, 0.0)
        self._orders = itertools.count(1), itertools.count(1)
        self._chooser = Chooser()
        self._unseen = Unseen(self._chooser)
        self._cost = CostModel()
        self.choices: Counter[str] = Counter()

    # --- nodes ---

    def prefill(self, talk: Talk) -> PrefillNode:
        """Where a turn's prompt goes."""
        prefer = talk.prefill if self._way.affinity else None
        return choose_node(self._prefill, prefer, SLACK_TOKENS[0], self._orders[0])

    def decode(self, talk: Talk) -> DecodeNode:
        """Where it is answered."""
        prefer = talk.decode if self._way.affinity else None
        return choose_node(self._decode, prefer, _SLACK_REQUESTS, self._orders[1])

    # --- a turn ---

    def objection(self, talk: Talk, pin: Pin) -> str:
        """Why not to use a handle, empty if nothing speaks against it."""
        assert talk.keeper
        assert talk.prefill
        if pin.gone or self._loop.now > pin.expires - self._margin:
            return pin.gone or "expired"
        return "" if self._worth_reading(talk.prefill, talk.keeper, pin.tokens) else "slower"

    def prefilled(self, node: PrefillNode, keeper: DecodeNode | None, computed: int, read: int, seconds: float) -> None:
        """P has answered: learn what that took."""
        decode = keeper.name if keeper and read else None
        self._cost.observe(node.name, decode, computed=computed, read=read, seconds=seconds)

    def came(self, talk: Talk, node: PrefillNode, local: int, returned: int, before: int) -> str:
        """The next turn of a return came: what P had of it, as an outcome.

        Args:
            talk: the conversation.
            node: the P that had the turn.
            local: tokens that it had.
            returned: tokens that had gone back.
            before: tokens of the prompt before.
        """
        if node is not talk.prefill:
            return "node_gone"
        fate: Fate = "used" if local + BLOCK >= returned or (local and local + BLOCK >= before) else "evicted"
        self._unseen.came(talk.ticket, fate, self._loop.now)
        if fate == "evicted":
            return "evicted"
        return "hit" if local + BLOCK >= returned else "partial_hit"

    def noticed(self, node: PrefillNode, *, kept: bool) -> None:
        """A turn showed what P kept of its lazy predecessor."""
        self._chooser.noticed(node.name, kept=kept, now=self._loop.now)

    # --- what it leaves ---

    def choose(self, talk: Talk, pin: Pin, finish: str, gap: float | None) -> Choice:
        """Whether a turn's KV goes back at once."""
        now, mode = self._loop.now, self._way.mode
        assert mode
        assert talk.prefill
        assert talk.decode
        for _, node, reason in self._unseen.give_up(now):
            self._chooser.learned(node, reason, "unused", now)
        moment = Moment(
            finish_reason=finish,
            tokens=pin.tokens,
            gap=gap,
            turns=talk.turns,
            prefill=talk.prefill.pressure,
            decode=talk.decode.pressure,
            decode_node=talk.decode.name,
            ttl=self._ttl,
            worth_reading=mode != "auto" or self._worth_reading(talk.prefill, talk.decode, pin.tokens),
        )
        choice = self._chooser.choose(mode, moment, talk.prefill.name, now)
        self.choices[f"{'eager' if choice.eager else 'lazy'} {choice.why}"] += 1
        pin.recallable = mode == "auto" and not choice.eager and choice.why not in _FINAL
        return choice

    def returned(self, talk: Talk, node: PrefillNode, finish: str) -> None:
        """A return has arrived."""
        self._unseen.add(talk.ticket, node.name, finish, self._loop.now)

    def recalls(self, talk: Talk, node: DecodeNode) -> bool:
        """Whether what was left on this D goes back after all."""
        assert talk.prefill
        assert node.pressure
        return self._chooser.recalls(talk.prefill.name, node.name, node.pressure, self._loop.now)

    def _worth_reading(self, prefill: PrefillNode, decode: DecodeNode, tokens: int) -> bool:
        return self._cost.worth_reading(prefill.name, decode.name, tokens, self._loop.now)
