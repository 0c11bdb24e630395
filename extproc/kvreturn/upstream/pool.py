"""A pool of nodes: choosing one, and keeping away from one that cannot be reached."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvreturn.core.address import is_ip, split_address

_BACKOFF = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds out of the pool after the 1st, 2nd, ... failure in a row


@dataclass(slots=True)
class _Node:
    address: str
    load: int = 0
    failures: int = 0
    out_until: float = 0.0
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, for people to look at.

    Attributes:
        address: `host:port`.
        state: `out`: it could not be reached lately.
        load: of the requests that it has not answered yet: tokens of a prefill node, requests of a decode node.
        failures: in a row.
    """

    address: str
    state: str
    load: int
    failures: int


class Pool:
    """Nodes of one kind.

    Args:
        addresses: `host:port` of each.
        clock: monotonic seconds.
    """

    def __init__(self, addresses: Iterable[str], clock: Callable[[], float]) -> None:
        self._nodes: dict[str, _Node] = {}
        self._named = False
        self._clock = clock
        self._choices = itertools.count(1)
        self.update(addresses)

    def update(self, addresses: Iterable[str]) -> None:
        """These are the nodes from now on. Those that stay keep what is known of them."""
        self._nodes = {a: self._nodes.get(a) or _Node(a) for a in addresses}
        self._named = not all(is_ip(split_address(a)[0]) for a in self._nodes)

    def __contains__(self, address: object) -> bool:
        """Whether the node is in the pool, reachable or not.

        Envoy tells a node's IP address, whatever name the pool has for it: then every node may be in it.
        """
        return self._named or address in self._nodes

    def choose(self, prefer: str | None = None, avoid: str | None = None, slack: int | None = None) -> str | None:
        """The address of a node: the preferred one if it is well, else the one with the least outstanding tokens.

        A node that failed lately is chosen only if there is no other, and `avoid` only if it is the last one. With
        `slack`, the preferred one must not have more outstanding tokens than the idlest one and so many. Of equals it
        is the one that was not chosen for longest, so that idle nodes all get to keep some conversations.
        """
        if self._named and prefer is not None and prefer not in self._nodes and prefer != avoid:
            return prefer  # an address behind one of the names, which Envoy told, and knows
        now = self._clock()
        least = min((n.load for n in self._nodes.values() if n.out_until <= now), default=0)
        if slack is not None and prefer is not None and self.load(prefer) > least + slack:
            prefer = None

        def rank(node: _Node) -> tuple[bool, bool, bool, int, int]:
            return node.address == avoid, node.out_until > now, node.address != prefer, node.load, node.chosen

        if not self._nodes:
            return None
        node = min(self._nodes.values(), key=rank)
        node.chosen = next(self._choices)
        return node.address

    def snapshot(self) -> list[NodeView]:
        """All nodes as they are now."""
        now = self._clock()
        return [
            NodeView(n.address, "out" if n.out_until > now else "up", n.load, n.failures) for n in self._nodes.values()
        ]

    def load(self, address: str) -> int:
        """Tokens of the requests that the node has not answered yet, about."""
        node = self._nodes.get(address)
        return node.load if node else 0

    def started(self, address: str, tokens: int) -> None:
        """A request of about this many tokens went to the node."""
        if address in self._nodes:
            self._nodes[address].load += tokens

    def finished(self, address: str, tokens: int) -> None:
        """It is over."""
        node = self._nodes.get(address)
        if node:
            node.load = max(node.load - tokens, 0)  # it may have left and come back meanwhile

    def unreachable(self, address: str) -> None:
        """The node could not be reached, or did not answer in time: out for a while, longer each time in a row."""
        node = self._nodes.get(address)
        if node and node.out_until <= self._clock():  # requests that were under way together count once
            node.out_until = self._clock() + _BACKOFF[min(node.failures, len(_BACKOFF) - 1)]
            node.failures += 1

    def reachable(self, address: str) -> None:
        """The node answered."""
        if address in self._nodes:
            self._nodes[address].failures = 0
            self._nodes[address].out_until = 0.0
