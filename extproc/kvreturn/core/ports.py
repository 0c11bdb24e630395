"""What the core asks of the world, and what it gets back. Adapters implement these; the core names them."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from kvreturn.core.handle import Handle
from kvreturn.core.outcome import Outcome
from kvreturn.core.returning import Job

T = TypeVar("T")


PRESENCE = 15.0
"""Seconds after which a router that no longer tells of itself is gone."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a finished turn.

    Attributes:
        ttl: seconds for which the handle may be used.
        handle: D's `kv_transfer_params`, raw; None if the turn left none. Empty for what is no turn, but is taken once
            like one.
        reason: why there is none; the outcome of the turn that looks for it.
        decode_node: address of the D that holds the conversation.
        prefill_node: address of the P that computed its prompt.
        prompt: tokens of its prompt, 0 if nobody told.
        turns: how many turns of the conversation are known, this one included.
        returned: tokens that went back to `prefill_node` at once (eager return), in place of a handle; 0 if none did.
        brought: how many of them P read from D for that; those before them it had itself.
        pending: whether they are still on their way.
        trace: names the turn's trace (a W3C `traceparent`), None if it left none.
    """

    ttl: float
    handle: bytes | None = None
    reason: Outcome | None = None
    decode_node: str | None = None
    prefill_node: str | None = None
    prompt: int = 0
    turns: int = 1
    returned: int = 0
    brought: int = 0
    pending: bool = False
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What the store had.

    Attributes:
        record: the record that was taken (a handle is gone from the store with it), or None.
        reason: if there is none: why the nearest one that was there cannot be used. None if nothing is known.
        age: seconds since the record was put.
        ticket: what `SessionStore.put` gave for it.
    """

    record: Record | None = None
    reason: Outcome | None = None
    age: float | None = None
    ticket: bytes | None = field(default=None, compare=False)  # names the record, and is no part of it


@dataclass(frozen=True, slots=True)
class Held:
    """A record as people may see it. None for what the store cannot tell cheaply.

    Attributes:
        name: digest that stands for it.
        conversation: digest of the client's own conversation, None if it named none.
        ttl: seconds until it goes.
        size: bytes of the handle.
        handle: whether there is one; otherwise it is a note (where a session or response is, why there is no handle).
        decode_node: address of the D that holds the conversation.
        prefill_node: address of the P that computed its prompt.
        turns: how many turns of the conversation are known.
    """

    name: str
    conversation: str | None
    ttl: float
    size: int
    handle: bool
    decode_node: str | None = None
    prefill_node: str | None = None
    turns: int | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """What a store holds.

    Attributes:
        kind: `memory` or `redis`.
        records: how many records; of Redis, how many keys its database has.
        size: bytes of the records; None if that is not known.
        some: some of the records, the newest first where the store knows.
    """

    kind: str
    records: int
    size: int | None
    some: Sequence[Held]


class SessionStore(Protocol):
    """Keeps records by key. Errors and delays are the caller's to bound."""

    async def put(self, keys: Sequence[bytes], record: Record, conversation: bytes | None = None) -> bytes:
        """Keep a record under all of these keys. Returns a ticket that names it.

        Args:
            keys: where it is looked for.
            record: the record.
            conversation: key of the client's own conversation that it belongs to, for `end`.
        """

    async def take(self, keys: Sequence[bytes]) -> Taken:
        """Take the record under the first of these keys that has one. Atomic: a handle is taken once."""

    async def end(self, conversation: bytes) -> Sequence[Taken]:
        """Take all records of a conversation, those without a handle too: of very many, the newest ones."""

    def take_all(self) -> AsyncIterator[Sequence[Taken]]:
        """Take all handles of all conversations, some at a time."""

    async def present(self) -> None:
        """Tell those who share the store that this router runs, for the next `PRESENCE` seconds."""

    async def leave(self) -> bool:
        """This router stops, or is about to. Returns whether no other one shares the store."""

    async def look(self, most: int) -> Holding:
        """What there is, for people to look at: as much as can be told cheaply, and at most so many records."""

    async def replace(self, ticket: bytes, record: Record) -> bool:
        """Put another record in the place of one that is still there. Atomic; False if it is not."""

    async def ping(self) -> None:
        """Return if the store answers, or raise."""

    async def aclose(self) -> None:
        """Let go of what the store holds open."""


class Judge(Protocol):
    """What is known of nodes."""

    def objection(self, record: Record, handle: Handle, age: float | None = None) -> Outcome | None:
        """Why this handle, captured so many seconds ago, should not be attached now, or None."""

    def read_failed(self, handle: Handle, *, hung: bool = False) -> None:
        """A request that carried this handle failed on P."""

    def read_succeeded(self, handle: Handle) -> None:
        """A request that carried this handle was answered by P."""

    def prefilled(self, node: str, engine: str, *, proves: bool) -> None:
        """P answered. `engine` is its engine id, which changes with a restart; `proves`: it runs our connector."""

    def decoded(self, node: str, engine: str) -> str:
        """D answered with a handle of this engine. Returns the engine's place: the node, or one rank of it."""


class Failure(Enum):
    """How a request to a node failed without an answer."""

    CONNECT = "connect"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Take:
    """Effect: take from the store. Answered by `Taken`."""

    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Ask:
    """Effect: send a request to a prefill node. Answered by `Reply`.

    Attributes:
        path: of the request.
        body: JSON.
        tokens: a guess at the prompt's length, for choosing a node by load.
        prefer: address of the node to choose if it is well.
        avoid: address of a node not to choose if there is another.
        last: whether all the time that is left may be spent; otherwise some is kept for another try.
        within: seconds that it may take in any case; None for no limit of its own.
        only: whether no other node than `prefer` will do.
        first: whether the first event of a streamed answer is enough: the request is then closed.
        slack: how many more tokens `prefer` may have to compute than the idlest node; None for any number.
    """

    path: str
    body: bytes
    tokens: int = 0
    prefer: str | None = None
    avoid: str | None = None
    last: bool = False
    within: float | None = None
    only: bool = False
    first: bool = False
    slack: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A prefill node's answer.

    Attributes:
        node: address of the node that was asked, None if there is none to ask.
        status: HTTP status, 0 if there was no answer.
        body: of the answer.
        content_type: of the answer.
        failure: how it failed, if there was no answer.
        headers: others of the answer that mean something to a client that is refused.
    """

    node: str | None
    status: int = 0
    body: bytes = b""
    content_type: str = "application/json"
    failure: Failure | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Await:
    """Effect: wait until an eager return has ended, for a bounded time. Answered by `Awaited`.

    Attributes:
        ticket: of its record.
    """

    ticket: bytes


@dataclass(frozen=True, slots=True)
class Awaited:
    """An eager return is over, or is not waited for any longer.

    Attributes:
        reason: one word if it failed or is late; None if it went well.
        brought: see `Record`; 0 if nobody knows.
        elsewhere: whether it was another router's, which may have died over it: nobody waited, and P may have nothing.
    """

    reason: str | None = None
    brought: int = 0
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Recall:
    """Effect: look up which nodes a session used last. Answered by `Taken`, whose record has no handle.

    Attributes:
        key: of the session.
    """

    key: bytes


Effect = Take | Ask | Await | Recall
Result = Taken | Reply | Awaited


@dataclass(frozen=True, slots=True)
class Forward:
    """Decision: send this body to a decode node.

    Attributes:
        body: the rewritten body.
        decode_node: address of the node to choose if it is well.
        slack: how many more requests it may have than the idlest node; None for any number.
    """

    body: bytes
    decode_node: str | None = None
    slack: int | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Decision: answer the client at once.

    Attributes:
        status: HTTP status.
        body: of the answer.
        content_type: of the answer.
        headers: further ones of the answer.
        why: one word of a few, for the metric and for Envoy's access log.
    """

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    why: str = "refused"


@dataclass(frozen=True, slots=True)
class Put:
    """Effect at the end of a turn: put a record into the store.

    Attributes:
        keys: where.
        record: what.
        job: how P would get back at once what D holds, if the policy allows it and the tokens are known.
        conversation: key of the client's own conversation, None if it named none.
    """

    keys: Sequence[bytes]
    record: Record
    job: Job | None = None
    conversation: bytes | None = None


def expect(kind: type[T], value: object) -> T:
    """The result of an effect, which must be of the kind that answers it."""
    assert isinstance(value, kind), f"sent a {type(value).__name__} where {kind.__name__} was asked for"
    return value
