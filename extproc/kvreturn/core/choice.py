"""Per turn: is the KV that D holds to be returned to P at once (eager), or read by the next turn (lazy)?

`auto` weighs three scarce things: D's blocks, which a lazy turn keeps pinned; P's prefix cache, in which a returned
conversation must live until its next turn; and the link, which carries a return even if nobody comes for it. The rules,
in the order in which they are asked (docs/return.md has them as a table; core/standing.py the thresholds of nodes):

- `small`: below vLLM's `kv_recompute_threshold` (64 tokens) P computes rather than reads, so a return moves nothing.
- `slow_link`: P computes faster than it reads (core/cost.py).
- `decode_pressure` if D is starved: nothing stops a deployment as surely, and the leases of the requests that wait for
  it fill P too, so this goes before P's own pressure.
- `prefill_pressure`: what is returned would be pushed out, or wait in a queue.
- `decode_pressure` if D is full. Before all that is about the conversation: even a return that is lost or that nobody
  uses has freed D's blocks.
- `decode_pins`: pins crowd each other on D, which has room otherwise.
- `wasted`: turns that end so had no next one lately.
- `slow_gap`: the conversation paused for longer than D keeps blocks. Lazy has nothing to read then; P may still.
- `tool_calls`: all but promises a next turn, as soon as the tool is done.
- `quick_gap`: agents that speak of tools in plain text end with `stop`. People take longer than 30 s.
- `long_lived`: by the rule of succession a conversation of n turns goes on with probability n / (n + 1): 4 of 5.
- `used`: turns that end so had a next one lately.
- `default`: lazy. D is calm, so a pin for nothing costs less than a return for nothing.
- `evicted`, against any of the six since `decode_pins` that say eager: P lost returns lately, or would have lost them.

Of what `wasted`, `default` and `evicted` keep back, one turn in twenty is returned all the same (`exploring`), or
nothing would ever show that they have become untrue. Pressure needs no trials: the nodes tell when it eases.

A choice for lazy lasts as long as D has room. Once D is starved or full, what was left there goes back too, the oldest
first: a new turn's return frees its own blocks only, and conversations that are over keep theirs for minutes.
"""

from dataclasses import dataclass, field
from typing import Literal

from kvreturn.core.recent import Recent
from kvreturn.core.standing import DecodeStanding, Fate, Habit, PrefillStanding, Pressure, Verdict

__all__ = ["Choice", "Chooser", "Fate", "HabitView", "Moment", "NodeView", "Pressure", "View", "Why"]

Why = Literal[
    "fixed",
    "small",
    "slow_link",
    "decode_pressure",
    "prefill_pressure",
    "decode_pins",
    "wasted",
    "slow_gap",
    "tool_calls",
    "quick_gap",
    "long_lived",
    "used",
    "default",
    "evicted",
    "exploring",
]

_MIN_TOKENS = 64  # vLLM's kv_recompute_threshold, its default
_QUICK = 30.0  # seconds
_LONG_LIVED = 4  # turns
_NODES = 256  # of a kind; their standings are a few kB each


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known when a turn has ended.

    Attributes:
        finish_reason: as vLLM says it: `stop`, `length`, `tool_calls`...
        tokens: how many D holds.
        gap: seconds between the previous turn's end and this turn's start; None on a first turn.
        turns: turns of this conversation that are known, this one included.
        prefill: pressure of the P that would get the return, None if not known.
        decode: pressure of the D that holds the blocks, None if not known.
        decode_node: address of that D.
        ttl: seconds for which the blocks can be read if the turn stays lazy.
        worth_reading: whether P reads these tokens faster than it computes them.
    """

    finish_reason: str | None
    tokens: int
    gap: float | None
    turns: int
    prefill: Pressure | None
    decode: Pressure | None
    decode_node: str = ""
    ttl: float = 450.0
    worth_reading: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with a turn's KV, and the rule that said so."""

    eager: bool
    why: Why


@dataclass(frozen=True, slots=True)
class NodeView:
    """A prefill node as the admin page shows it.

    Attributes:
        last: the latest choice in `auto`, None if there was none.
        pressed: whether its metrics speak against returns.
        evicts: whether it lately lost what was returned to it, or would have lost it.
        fates: how many of the latest returns that somebody came for, and of the latest lazy turns, had which fate.
    """

    last: Choice | None
    pressed: bool
    evicts: bool
    fates: dict[Fate, int]


@dataclass(frozen=True, slots=True)
class HabitView:
    """What was learned of turns with one finish reason, and from how many fates of each kind."""

    verdict: Verdict | None
    fates: dict[Fate, int]


@dataclass(frozen=True, slots=True)
class View:
    """All that `auto` goes by.

    Attributes:
        prefill: by address.
        decode: by address, in one word.
        habits: by finish reason.
    """

    prefill: dict[str, NodeView]
    decode: dict[str, Literal["starved", "full", "crowded", "calm"]]
    habits: dict[str, HabitView]


@dataclass(slots=True)
class _PrefillNode:
    standing: PrefillStanding = field(default_factory=PrefillStanding)
    last: Choice | None = None


class Chooser:
    """Chooses, and learns from what became of it. One per router process; all times are one monotonic clock's."""

    def __init__(self) -> None:
        self._prefill: Recent[str, _PrefillNode] = Recent(_NODES, _PrefillNode)
        self._decode: Recent[str, DecodeStanding] = Recent(_NODES, DecodeStanding)
        self._habits = {reason: Habit() for reason in ("stop", "length", "tool_calls", "other")}

    def choose(self, mode: Literal["lazy", "eager", "auto"], moment: Moment, node: str, now: float) -> Choice:
        """Choose for a turn that has ended.

        Args:
            mode: the model's setting.
            moment: the turn, and the nodes' state.
            node: address of the P that would get the return.
            now: monotonic seconds.
        """
        if mode != "auto":
            return Choice(mode == "eager", "fixed")
        prefill, decode = self._prefill.of(node), self._decode.of(moment.decode_node)
        prefill.standing.feel(moment.prefill, now)
        decode.feel(moment.decode, now)
        prefill.last = self._auto(moment, prefill.standing, decode)
        return prefill.last

    def recalls(self, prefill_node: str, decode_node: str, decode: Pressure, now: float) -> bool:
        """Whether a turn that was left on D is to go back after all, by the rules that hold for one that ends now.

        Args:
            prefill_node: address of the P that would get it.
            decode_node: address of the D that holds it.
            decode: that D's pressure.
            now: monotonic seconds.
        """
        standing = self._decode.of(decode_node)
        standing.feel(decode, now)
        return standing.starved.on or (standing.full.on and not self._prefill.of(prefill_node).standing.pressed.on)

    def learned(self, node: str, finish_reason: str | None, fate: Fate, now: float) -> None:
        """Tell what became of a return, once for each.

        Args:
            node: address of the P that got it.
            finish_reason: of the turn that was returned.
            fate: `used`: the next turn came and P still had it; `evicted`: it came and P no longer had it; `unused`:
                nobody came within the record's life.
            now: monotonic seconds.
        """
        self._habit(finish_reason).learn(fate, now)
        if fate != "unused":  # else nobody looked whether P still had it
            self._prefill.of(node).standing.learn(fate, now)

    def learned_elsewhere(self, finish_reason: str | None, now: float) -> None:
        """Tell that the next turn of a return came to another router."""
        self._habit(finish_reason).learn("used", now)

    def noticed(self, node: str, *, kept: bool, now: float) -> None:
        """Tell what a turn showed of P's prefix cache whose predecessor was lazy, or another router's.

        Args:
            node: address of the P that had both turns.
            kept: whether it still had the predecessor.
            now: monotonic seconds.
        """
        self._prefill.of(node).standing.learn("used" if kept else "evicted", now)

    def view(self) -> View:
        """What it goes by."""
        nodes = {
            address: NodeView(n.last, n.standing.pressed.on, n.standing.evicts.on, n.standing.fates.tally())
            for address, n in self._prefill.items()
        }
        habits = {reason: HabitView(habit.verdict, habit.fates.tally()) for reason, habit in self._habits.items()}
        return View(nodes, {address: standing.word for address, standing in self._decode.items()}, habits)

    def _auto(self, moment: Moment, prefill: PrefillStanding, decode: DecodeStanding) -> Choice:
        if moment.tokens < _MIN_TOKENS:
            return Choice(eager=False, why="small")
        if not moment.worth_reading:
            return Choice(eager=False, why="slow_link")
        if decode.starved.on:
            return Choice(eager=True, why="decode_pressure")
        if prefill.pressed.on:
            return Choice(eager=False, why="prefill_pressure")
        if decode.full.on:
            return Choice(eager=True, why="decode_pressure")
        habit = self._habit(moment.finish_reason)
        wish = Choice(eager=True, why="decode_pins") if decode.crowded.on else _wish(moment, habit.verdict)
        if not wish.eager and habit.explorer.due():
            wish = Choice(eager=True, why="exploring")
        if wish.eager and prefill.evicts.on:
            return Choice(eager=True, why="exploring") if prefill.explorer.due() else Choice(eager=False, why="evicted")
        return wish

    def _habit(self, finish_reason: str | None) -> Habit:
        return self._habits.get(finish_reason or "other", self._habits["other"])


def _wish(moment: Moment, verdict: Verdict | None) -> Choice:
    """What is best for the conversation, as long as no node is pressed."""
    if verdict == "wasted":
        return Choice(eager=False, why="wasted")
    if moment.gap is not None and moment.gap >= moment.ttl:
        return Choice(eager=True, why="slow_gap")
    if moment.finish_reason == "tool_calls":
        return Choice(eager=True, why="tool_calls")
    if moment.gap is not None and moment.gap <= _QUICK:
        return Choice(eager=True, why="quick_gap")
    if moment.turns >= _LONG_LIVED:
        return Choice(eager=True, why="long_lived")
    return Choice(eager=verdict == "used", why=verdict or "default")
