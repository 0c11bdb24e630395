"""A pool of nodes: choosing one, and keeping away from one that fails or drains."""

import itertools
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Literal

from kvreturn.core.address import is_ip, seat, split_address, split_seat
from kvreturn.upstream.node import Engine, Node, NodeView, Reason, State

log = logging.getLogger("kvreturn.pool")
Kind = Literal["prefill", "decode"]
_WORDS: dict[Reason, str] = {
    "connect": "cannot be reached, or did not answer in time",
    "errors": "answers with errors of its own",
    "health": "fails its health checks",
    "probe": "still fails its health check",
}


class Pool:
    """Nodes of one kind.

    A node with several engines (data parallel) has a name for each: `host:port#rank`, and takes part with each of them.

    Args:
        addresses: `host:port` of each.
        clock: monotonic seconds.
        kind: of the nodes, for the log.

    Attributes:
        ranks: engines behind each address; a change holds from the next `update` on.
        errors: answers of 5xx in a row that take a node out.
        changed: called when a node came, left, or began or ended to drain.
        ejected: told of each node that goes out: why.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        clock: Callable[[], float],
        *,
        kind: Kind = "prefill",
        ranks: int = 1,
        errors: int = 5,
    ) -> None:
        self.kind: Kind = kind
        self.changed: list[Callable[[], None]] = []
        self.ejected: Callable[[Reason], None] = lambda _: None
        self.engines: Callable[[str], Collection[str]] = lambda _: ()
        self.ranks = ranks
        self.errors = errors
        self._clock = clock
        self._choices = itertools.count(1)
        self._nodes: dict[str, Node] = {}
        self._named = False
        self.update(addresses)

    # --- who is in it ---

    def update(self, addresses: Iterable[str], terminating: Collection[str] = ()) -> None:
        """These are the nodes now. Of those that stay, all that is known stays too.

        Args:
            addresses: `host:port` of each.
            terminating: those of them that are being taken away: they drain.
        """
        before = {a: n.draining for a, n in self._nodes.items()}
        self._nodes = {a: self._node(a) for a in addresses}
        self._named = not all(is_ip(split_address(a)[0]) for a in self._nodes)
        for address, node in self._nodes.items():
            node.terminating = address in terminating
        if before != {a: n.draining for a, n in self._nodes.items()}:
            self._tell()

    def drain(self, address: str) -> bool:
        """Send the node no more requests; what it holds can still be read from it. False: there is no such node."""
        return self._drain(address, drained=True)

    def undrain(self, address: str) -> bool:
        """Take `drain` back. False: there is no such node."""
        return self._drain(address, drained=False)

    def addresses(self) -> dict[str, bool]:
        """All nodes, and whether they drain."""
        return {a: n.draining for a, n in self._nodes.items()}

    def snapshot(self) -> list[NodeView]:
        """All nodes as they are now."""
        now = self._clock()
        return [
            NodeView(
                address=node.address,
                state=node.state(now),
                load=sum(e.load for e in node.engines),
                failures=node.failures,
                engines=tuple(self.engines(node.address)),
                loads=tuple(e.load for e in node.engines),
                unseen=node.unseen,
            )
            for node in self._nodes.values()
        ]

    def states(self) -> dict[str, State]:
        """State by address."""
        now = self._clock()
        return {a: n.state(now) for a, n in self._nodes.items()}

    def __contains__(self, name: object) -> bool:
        """Whether the node is in the pool, reachable or not.

        Envoy tells a node's IP address, whatever name the pool has for it: then every node may be in it.
        """
        if not isinstance(name, str):
            return False
        address, rank = split_seat(name)
        node = self._nodes.get(address)
        return self._named or (node is not None and (rank or 0) < len(node.engines))

    def has(self, name: str) -> bool:
        """Whether the pool knows a node by just this name, or one of its engines."""
        return split_seat(name)[0] in self._nodes

    def seats(self, address: str) -> list[str]:
        """The names of all engines behind an address."""
        node = self._nodes.get(address)
        return node.seats() if node else [address]

    def seat(self, address: str, rank: int | None) -> str:
        """The name of an engine behind an address, as far as ranks mean anything there.

        Nodes that are started one by one as ranks of one deployment tell ranks too, each behind an address of its own.
        """
        node = self._nodes.get(split_seat(address)[0])
        if node is None or rank is None or len(node.engines) == 1 or rank >= len(node.engines):
            return address
        return seat(node.address, rank)

    # --- choosing one ---

    def choose(self, prefer: str | None = None, avoid: str | None = None, slack: int | None = None) -> str | None:
        """The name of an engine: the preferred one if it is well, else the one with the least outstanding.

        A node that drains or has failed lately is chosen only if there is no other, and `avoid` only if it is the last
        one. With `slack`, the preferred one must not have more outstanding than the idlest one and so much. Of equals
        it is the one that was not chosen for longest, so that idle nodes all get to keep some conversations.

        Args:
            prefer: an engine; or an address, for any engine behind it.
            avoid: an engine; its whole node is avoided.
            slack: tokens or requests, as `started` counts them. None for any number, and also if the node drains: what
                is asked for is there and nowhere else.
        """
        if self._named and prefer is not None and prefer not in self._nodes and prefer != avoid:
            return prefer  # an address behind one of the names, which Envoy told, and knows
        if not self._nodes:
            return None
        now = self._clock()
        well = [n for n in self._nodes.values() if n.usable(now) and not n.draining]
        least = min((e.load for n in well for e in n.engines), default=0)
        if slack is not None and prefer is not None and self.load(prefer) > least + slack:
            prefer = None
        shunned = split_seat(avoid)[0] if avoid else None

        def rank(choice: tuple[str, Node, Engine]) -> tuple[bool, bool, bool, bool, int, int]:
            name, node, engine = choice
            preferred = prefer in {name, node.address}
            drains = node.draining and not (preferred and slack is None)
            bad = node.address == shunned, not node.usable(now), drains
            return *bad, not preferred, engine.load, engine.chosen

        name, _, engine = min(
            ((name, n, e) for n in self._nodes.values() for name, e in zip(n.seats(), n.engines, strict=True)),
            key=rank,
        )
        engine.chosen = next(self._choices)
        return name

    def load(self, name: str) -> int:
        """What an engine has not answered yet, about."""
        engine = self._engine(name)
        return engine.load if engine else 0

    def started(self, name: str, tokens: int) -> None:
        """A request of about this many tokens (prefill) or one request (decode) went to the engine."""
        if engine := self._engine(name):
            engine.load += tokens

    def finished(self, name: str, tokens: int) -> None:
        """It is over."""
        if engine := self._engine(name):
            engine.load = max(engine.load - tokens, 0)  # it may have left and come back meanwhile

    # --- what became of requests and health checks ---

    def unreachable(self, name: str) -> None:
        """The node could not be reached, or did not answer in time: out for a while, longer each time in a row."""
        if node := self._nodes.get(split_seat(name)[0]):
            self._eject(node, "connect")

    def failed(self, name: str) -> None:
        """The node answered a request with a 5xx."""
        node = self._nodes.get(split_seat(name)[0])
        if node and node.erred(self.errors):
            self._eject(node, "errors")

    def reachable(self, name: str) -> None:
        """The node answered a request well."""
        node = self._nodes.get(split_seat(name)[0])
        if node and node.answered():
            self._back(node)

    def checked(self, address: str, *, well: bool) -> None:
        """A health check of the node has ended."""
        node, now = self._nodes.get(address), self._clock()
        if node is None:
            return
        if well:
            if node.passed_check(now):
                self._back(node)
        elif reason := node.failed_check(now):
            self._eject(node, reason)

    def known(self, address: str) -> bool:
        """Whether a health check of the node has ever gone well."""
        node = self._nodes.get(address)
        return node is not None and node.checked

    # --- inside ---

    def _node(self, address: str) -> Node:
        """What is known of the node, or a new one."""
        node = self._nodes.get(address) or Node(address)
        if len(node.engines) != self.ranks:
            node.engines = [Engine() for _ in range(self.ranks)]
        return node

    def _engine(self, name: str) -> Engine | None:
        address, rank = split_seat(name)
        node = self._nodes.get(address)
        if node is None or (rank is None and len(node.engines) > 1) or (rank or 0) >= len(node.engines):
            return None
        return node.engines[rank or 0]

    def _drain(self, address: str, *, drained: bool) -> bool:
        node = self._nodes.get(address)
        if node is None:
            return False
        before, node.drained = node.draining, drained
        if before != node.draining:
            what = "drains until this process restarts or is told otherwise" if drained else "drains no longer"
            log.info("%s node %s %s", self.kind, address, what)
            self._tell()
        return True

    def _eject(self, node: Node, reason: Reason) -> None:
        was = node.out
        if not node.eject(self._clock()):
            return
        self.ejected(reason)
        if not was:
            log.warning("%s node %s is out: it %s", self.kind, node.address, _WORDS[reason])

    def _back(self, node: Node) -> None:
        log.warning("%s node %s is back", self.kind, node.address)

    def _tell(self) -> None:
        for tell in self.changed:
            tell()
