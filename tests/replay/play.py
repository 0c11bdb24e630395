"""Plays a history turn by turn through the core, between a client and nodes that know tokens."""

import asyncio
import itertools
import json
from collections import Counter
from dataclasses import dataclass, field

from kvreturn.core.capture import open_capture
from kvreturn.core.policy import Policy
from kvreturn.core.ports import Ask, Effect, Forward, Result, Take
from kvreturn.core.turn import Turn
from kvreturn.store.memory import MemoryStore
from replay.clients import Client
from replay.histories import Spoken
from replay.nodes import Nodes, with_handle
from replay.rendering import Json
from support.cuts import by
from support.turns import D1, SCOPE, Judge, compact


@dataclass
class Tally:
    """What could have been read, and was not.

    Attributes:
        turns: all of them.
        provable: those whose prompt shares enough with what D held.
        missed: those of them in which less was read.
        tokens: that could have been read.
        lost: those of them that were not.
        dear: those of the lost that P's own prefix cache would not have had either.
        outcomes: of the turns that missed.
    """

    turns: int = 0
    provable: int = 0
    missed: int = 0
    tokens: int = 0
    lost: int = 0
    dear: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        for name in ("turns", "provable", "missed", "tokens", "lost", "dear"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.outcomes += other.outcomes

    @property
    def share(self) -> float:
        """Of the tokens that could have been read, those that were not."""
        return self.lost / self.tokens if self.tokens else 0.0


def play(client: Client, nodes: Nodes, policy: Policy) -> Tally:
    """Play a client's whole history.

    Checks at every turn that nothing was read but what the prompt has, and that the client got D's bytes.
    """
    tally, clock = Tally(), itertools.count()
    store = MemoryStore(max_entries=1000, max_bytes=1 << 30, clock=lambda: float(next(clock)))
    for spoken in client.history.turns:
        client.say(spoken.inputs)
        body = client.body()
        prompt = nodes.tokens(client.api.path, body)
        best, cached = max(nodes.reusable(prompt).values(), default=0), nodes.cached(prompt)
        turn, forward = _request(client, body, nodes, policy, store)
        _count(tally, best, nodes.read, cached, turn)
        written = "".join(nodes.template.written(m) for m in client.said(spoken.items))
        handle = nodes.decode(client.api.path, json.loads(forward.body), written)
        _respond(turn, spoken, handle, store)
        client.heard(spoken.items)
    return tally


def _count(tally: Tally, best: int, read: int, cached: int, turn: Turn) -> None:
    assert read <= best, f"{read} tokens were read, and {best} could be proven"
    tally.turns += 1
    tally.tokens += best
    tally.lost += best - read
    tally.dear += max(best - max(read, cached), 0)
    tally.provable += best > 0
    if read < best:
        tally.missed += 1
        tally.outcomes[f"{turn.facts.outcome}/{turn.facts.detail}"] += 1


def _request(client: Client, body: Json, nodes: Nodes, policy: Policy, store: MemoryStore) -> tuple[Turn, Forward]:
    turn = Turn(client.api, SCOPE, lambda _: policy, Judge())
    steps = turn.request(compact(body))

    def results(effect: Effect) -> Result:
        if isinstance(effect, Take):
            return asyncio.run(store.take(effect.keys))
        assert isinstance(effect, Ask), "nothing is returned at once here"
        return nodes.prefill(effect)

    effect = next(steps)
    try:
        while True:
            effect = steps.send(results(effect))
    except StopIteration as stop:
        decision = stop.value
    assert isinstance(decision, Forward), decision
    forwarded = json.loads(decision.body)
    forwarded.pop("kv_transfer_params")
    assert forwarded == body
    return turn, decision


def _respond(turn: Turn, spoken: Spoken, handle: Json, store: MemoryStore) -> None:
    kind = "text/event-stream" if spoken.stream else "application/json"
    capture = open_capture(kind, turn.answer, event_bytes=1 << 20, response_bytes=1 << 20)
    sent = with_handle(spoken.answer, handle, stream=spoken.stream)
    got, put = b"", None
    for piece in by(1500, sent):
        got += capture.decode(piece)
        put = put or (turn.settle(capture, D1) if capture.handle else None)
    got += capture.flush()
    assert got == spoken.answer, "the client got other bytes than D's"
    put = put or turn.settle(capture, D1)
    assert put, "the turn left nothing"
    asyncio.run(store.put(put.keys, put.record))
