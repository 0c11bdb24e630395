"""What all exchanges of one router share."""

import hmac
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvreturn.config import Settings
from kvreturn.core.choice import Pressure
from kvreturn.core.cost import CostModel
from kvreturn.core.fingerprint import Scope, keyed_hash
from kvreturn.core.outcome import Outcome
from kvreturn.core.policy import Policy
from kvreturn.core.ports import Put, Record, SessionStore, Taken
from kvreturn.core.turn import Turn
from kvreturn.server.admission import Admission
from kvreturn.server.board import Board
from kvreturn.server.freeing import Freeing
from kvreturn.server.freshness import Freshness
from kvreturn.server.lifecycle import Lifecycle
from kvreturn.server.policies import policy_for
from kvreturn.server.quota import Quota
from kvreturn.server.returns import Returns
from kvreturn.server.tasks import Tasks
from kvreturn.store.factory import open_store
from kvreturn.store.guard import Guard
from kvreturn.telemetry.metrics import Metrics
from kvreturn.telemetry.tracing import Tracing
from kvreturn.upstream.client import PrefillClient
from kvreturn.upstream.forms import Forms
from kvreturn.upstream.judge import NodeJudge
from kvreturn.upstream.nodes import Nodes
from kvreturn.upstream.pool import Pool
from kvreturn.upstream.pressure import PressureWatch

log = logging.getLogger("kvreturn")
_KEPT_RESPONSE = 24 * 3600.0  # seconds; vLLM keeps responses until it is restarted
_SESSION = 3600.0  # seconds for which it is remembered where a session was last
_OVER = Record(0.001, reason=Outcome.OVER_LIMIT)  # in place of what goes, for just long enough that a store takes it
_CREDENTIALS = ("authorization", "x-api-key", "api-key")


class ForeignError(Exception):
    """A stored response is another tenant's."""


def _folded(credential: str) -> str:
    """A credential without what may be written in several ways: the case of its scheme, and white space."""
    first, *rest = credential.split() or [""]
    return " ".join([first.lower(), *rest]) if rest else first


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(slots=True)
class World:
    """Settings, and the live things made from them.

    Attributes:
        store: what finished turns leave.
        guard: the way to it.
        quota: how much of it is whose.
        admission: counts live turns.
        tasks: store calls that no answer waits for.
        worker: which of `settings.workers` this process is, from 0.
    """

    settings: Settings
    store: SessionStore
    guard: Guard
    prefill: Pool
    decode: Pool
    forms: Forms
    cost: CostModel
    judge: NodeJudge
    client: PrefillClient
    nodes: Nodes
    metrics: Metrics
    key: bytes
    clock: Callable[[], float]
    pressure: PressureWatch
    new_id: Callable[[], str] = _new_id
    tracing: Tracing = field(default_factory=Tracing)
    tasks: Tasks = field(default_factory=Tasks)
    returns: Returns = field(init=False)
    quota: Quota = field(init=False)
    admission: Admission = field(init=False)
    freeing: Freeing = field(init=False)
    lifecycle: Lifecycle = field(init=False)
    board: Board = field(init=False)
    freshness: Freshness = field(init=False)
    worker: int = 0
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Start what needs the rest."""
        self.returns = Returns(self)
        self.freeing = Freeing(self)
        self.lifecycle = Lifecycle(self)
        self.board = Board(self.clock)
        self.freshness = Freshness(self.settings, self.settings)
        self.freshness.tell(self.metrics)
        self.quota = Quota(self.settings.limits.sessions_per_tenant, self.clock)
        self.admission = Admission(self.settings.limits)
        self.pressure.told = self._felt
        for pool in (self.prefill, self.decode):
            pool.changed.append(self._watch)
        self._watch()
        for name, doc, value, unit in (
            ("live_turns", "Turns that are being processed.", lambda: self.admission.live, "{turn}"),
            ("returns_waiting", "Eager returns that wait for their turn.", lambda: self.returns.waiting, "{return}"),
            ("returns_running", "Eager returns that are under way.", lambda: self.returns.running, "{return}"),
        ):
            self.metrics.watch(name, doc, value, unit=unit)
        self.metrics.describe(self._described)

    def _described(self) -> tuple[str, ...]:
        own = self.settings
        return own.proof, own.return_, "redis" if own.store.url else "memory", own.prefill.via

    @classmethod
    def create(
        cls, settings: Settings, clock: Callable[[], float] = time.monotonic, tracing: Tracing | None = None
    ) -> "World":
        """Make everything. `client` must be entered before use."""
        secret = settings.secret.get_secret_value().encode()
        metrics = Metrics(settings.models)
        through = settings.envoy.prefill_listen if settings.prefill.via == "envoy" else None
        nodes = Nodes(settings, metrics, clock, through)
        prefill, decode = nodes.prefill, nodes.decode
        store = open_store(settings, metrics, clock)
        forms, cost = Forms(), CostModel()
        judge = NodeJudge(decode, forms, cost, settings.breaker, clock)
        prefill.engines = decode.engines = judge.engines.of
        metrics.watch(
            "breakers_open",
            "Decode engines whose handles are not used.",
            lambda: len(judge.open_breakers()),
            unit="{engine}",
        )
        interval = settings.returns.pressure_interval
        return cls(
            settings=settings,
            store=store,
            guard=Guard(store, settings.store, metrics),
            prefill=prefill,
            decode=decode,
            forms=forms,
            cost=cost,
            judge=judge,
            client=PrefillClient(prefill, through),
            nodes=nodes,
            tracing=tracing or Tracing(),
            pressure=PressureWatch((), (), through, clock=clock, interval=interval),
            metrics=metrics,
            # Fingerprints must not tell contents to a reader of the store, so they always have a key.
            key=hmac.digest(secret, b"fingerprints", "sha256") if secret else os.urandom(32),
            clock=clock,
        )

    @property
    def policy(self) -> Callable[[str], Policy]:
        """Gives the policy for a model's turns, by the settings of this moment: whoever has it keeps them."""
        return partial(policy_for, self.settings)

    def _watch(self) -> None:
        """Look at the nodes that there are now, if their state matters."""
        prefill, decode = (self.prefill.addresses(), self.decode.addresses()) if self.settings.any_auto else ((), ())
        self.pressure.watch(prefill, decode)

    def _felt(self, node: str, pressure: Pressure) -> None:
        """A node has told how pressed it is, for all of its engines."""
        for seat in self.decode.seats(node):
            self.returns.felt(seat, pressure)

    def apply(self, settings: Settings) -> None:
        """Go by other settings from now on. Turns under way keep their policy and their limits.

        All at once: there is no await in it. Settings that `kvreturn.server.reload` does not name as live must be the
        same as before.
        """
        self.settings = self.freshness.now = settings
        self.nodes.apply(settings)
        self._watch()
        self.judge.apply(settings.breaker)
        self.guard.apply(settings.store)
        self.quota.apply(settings.limits.sessions_per_tenant)
        self.admission.apply(settings.limits)
        self.returns.apply(settings.returns)
        self.metrics.know(settings.models)

    def scope(self, headers: Mapping[str, str]) -> Scope:
        """Whose request this is, by the configured tenant header, else by its credential."""
        name = self.settings.tenant_header
        if name:
            return Scope(self.key, b"tenant\0" + headers.get(name.lower(), "").encode())
        credentials = "\0".join(_folded(headers.get(h, "")) for h in _CREDENTIALS)
        return Scope(self.key, b"credential\0" + keyed_hash(self.key, credentials.encode()))

    @property
    def warnings(self) -> list[str]:
        """What has been said so."""
        return sorted(self._said)

    def warn_once(self, text: str) -> None:
        """Say what an operator should know, once in this process."""
        if text not in self._said:
            self._said.add(text)
            log.warning(text)

    async def take(self, keys: Sequence[bytes], *, hurry: bool = True) -> Taken:
        """Take from the store, within its deadline; without `hurry` no turn waits for it."""
        taken = await self.guard.take(keys, hurry=hurry)
        self.took(taken)
        return taken

    def took(self, taken: Taken) -> None:
        """Something was taken from the store: who keeps account of it is told."""
        if taken.ticket is None:
            return
        if taken.record and taken.record.handle is not None:
            self.quota.gone(taken.ticket)
        self.returns.taken(taken.ticket)

    async def put(self, put: Put, tenant: bytes) -> bytes | None:
        """Put a tenant's record into the store, within its deadline. Returns the ticket if it is there.

        One store call, as the client's answer waits for it. What must go to make room goes behind its back.
        """
        ticket = await self.guard.put(put)
        if ticket is not None:
            over = self.quota.put(tenant, ticket, put.record.ttl)
            if over:
                self.tasks.start(self._drop(over))
        return ticket

    async def _drop(self, tickets: Sequence[bytes]) -> None:
        for ticket in tickets:
            self.metrics.over_limit.inc(await self.replace(ticket, _OVER))

    async def recall(self, session: bytes) -> Taken:
        """Which nodes a session used last."""
        return await self.take([session])

    async def note_session(self, turn: Turn, record: Record) -> None:
        """Remember which nodes a turn's session used."""
        key = turn.session_key
        if key is None:
            return
        seen, nodes = await self.recall(key), (record.decode_node, record.prefill_node)
        known = seen.record and (seen.record.decode_node, seen.record.prefill_node) == nodes
        if known and (seen.age or 0.0) < _SESSION / 2:
            return
        note = Record(_SESSION, decode_node=record.decode_node, prefill_node=record.prefill_node)
        if seen.ticket is None or not await self.replace(seen.ticket, note):
            await self.put(Put([key], note), turn.tenant)

    async def owner(self, scope: Scope, response_id: str) -> str | None:
        """The decode node that keeps a response of this tenant, None if that is not known.

        Raises:
            ForeignError: it is another tenant's.
        """
        record = (await self.take([scope.response_key(response_id)])).record
        if record is None and (await self.take([scope.anybodys_key(response_id)])).record:
            raise ForeignError
        return record.decode_node if record else None

    async def set_owner(self, scope: Scope, response_id: str, node: str) -> None:
        """Remember which decode node keeps a response."""
        record = Record(_KEPT_RESPONSE, decode_node=node)
        keys = [scope.response_key(response_id), scope.anybodys_key(response_id)]
        await self.put(Put(keys, record), scope.tenant)

    async def replace(self, ticket: bytes, record: Record) -> bool:
        """Replace a record in the store, within its deadline. Returns whether it was still there."""
        self.quota.renewed(ticket, record.ttl)
        return await self.guard.replace(ticket, record)
