"""What all exchanges of one router share."""

import asyncio
import hmac
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvreturn.config import Settings
from kvreturn.core.cost import CostModel
from kvreturn.core.fingerprint import Scope, keyed_hash
from kvreturn.core.outcome import Outcome
from kvreturn.core.policy import Policy
from kvreturn.core.ports import Put, Record, SessionStore, Taken
from kvreturn.server.returns import Returns
from kvreturn.store.memory import MemoryStore
from kvreturn.telemetry.metrics import Metrics
from kvreturn.telemetry.tracing import Tracing
from kvreturn.upstream.client import PrefillClient
from kvreturn.upstream.forms import Forms
from kvreturn.upstream.judge import NodeJudge
from kvreturn.upstream.pool import Pool
from kvreturn.upstream.pressure import PressureWatch

log = logging.getLogger("kvreturn")
_KEPT_RESPONSE = 24 * 3600.0  # seconds; vLLM keeps responses until it is restarted
_CREDENTIALS = ("authorization", "x-api-key", "api-key")


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(slots=True)
class World:
    """Settings, and the live things made from them.

    Attributes:
        store: what finished turns leave.
        owners: which decode node keeps which response; records without a handle.
    """

    settings: Settings
    store: SessionStore
    owners: SessionStore
    prefill: Pool
    decode: Pool
    forms: Forms
    cost: CostModel
    judge: NodeJudge
    client: PrefillClient
    metrics: Metrics
    key: bytes
    clock: Callable[[], float]
    new_id: Callable[[], str] = _new_id
    pressure: PressureWatch | None = None
    tracing: Tracing = field(default_factory=Tracing)
    returns: Returns = field(init=False)
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Start what needs the rest."""
        self.returns = Returns(self)
        self.metrics.watch("returns_waiting", "Eager returns that wait for their turn.", lambda: self.returns.waiting)
        self.metrics.watch("returns_running", "Eager returns that are under way.", lambda: self.returns.running)

    @classmethod
    def create(
        cls, settings: Settings, clock: Callable[[], float] = time.monotonic, tracing: Tracing | None = None
    ) -> "World":
        """Make everything. `client` must be entered before use."""
        secret = settings.secret.get_secret_value().encode()
        prefill, decode = Pool(settings.pools.prefill, clock), Pool(settings.pools.decode, clock)
        store = MemoryStore(max_entries=settings.store.max_entries, max_bytes=settings.store.max_bytes, clock=clock)
        owners = MemoryStore(max_entries=settings.store.max_entries, max_bytes=settings.store.max_bytes, clock=clock)
        metrics = Metrics(settings.models)
        forms, cost = Forms(), CostModel()
        judge = NodeJudge(decode, forms, cost, settings.breaker, clock)
        metrics.watch("sessions", "Records in the session store.", lambda: len(store))
        metrics.watch("sessions_bytes", "Bytes of the records in the session store.", lambda: store.bytes)
        metrics.watch("sessions_evicted", "Records that left for want of room.", lambda: store.evicted)
        metrics.watch("sessions_expired", "Handles that nobody took in time.", lambda: store.expired)
        metrics.watch("breakers_open", "Decode engines whose handles are not used.", lambda: len(judge.open_breakers()))
        through = settings.envoy.prefill_listen if settings.prefill.via == "envoy" else None
        interval = settings.returns.pressure_interval
        pools = settings.pools
        return cls(
            settings=settings,
            store=store,
            owners=owners,
            prefill=prefill,
            decode=decode,
            forms=forms,
            cost=cost,
            judge=judge,
            client=PrefillClient(prefill, through),
            tracing=tracing or Tracing(),
            pressure=PressureWatch(pools.prefill, pools.decode, through, clock=clock, interval=interval)
            if settings.any_auto
            else None,
            metrics=metrics,
            # Fingerprints must not tell contents to a reader of the store, so they always have a key.
            key=hmac.digest(secret, b"fingerprints", "sha256") if secret else os.urandom(32),
            clock=clock,
        )

    def policy(self, model: str) -> Policy:
        """The policy for a model's turns."""
        settings = self.settings
        return Policy(
            proof=settings.proof_for(model),
            min_tokens=settings.limits.min_tokens,
            fallback=settings.prefill.on_failure == "fallback",
            ttl=settings.store.ttl,
            pass_token_ids=settings.prefill.pass_token_ids,
            returns=settings.return_for(model),
            secret=settings.secret.get_secret_value().encode(),
        )

    def scope(self, headers: Mapping[str, str]) -> Scope:
        """Whose request this is, by the configured tenant header, else by its credential."""
        name = self.settings.tenant_header
        if name:
            return Scope(self.key, b"tenant\0" + headers.get(name.lower(), "").encode())
        credentials = "\0".join(headers.get(h, "") for h in _CREDENTIALS)
        return Scope(self.key, b"credential\0" + keyed_hash(self.key, credentials.encode()))

    def warn_once(self, text: str) -> None:
        """Say what an operator should know, once in this process."""
        if text not in self._said:
            self._said.add(text)
            log.warning(text)

    async def take(self, keys: Sequence[bytes]) -> Taken:
        """Take from the store, within its deadline."""
        return await self._take(self.store, keys)

    async def put(self, put: Put) -> bytes | None:
        """Put into the store, within its deadline. Returns the ticket if it is there."""
        return await self._put(self.store, put)

    async def owner(self, scope: Scope, response_id: str) -> str | None:
        """The decode node that keeps a response of this tenant, None if that is not known."""
        record = (await self._take(self.owners, [scope.response_key(response_id)])).record
        return record.decode_node if record else None

    async def set_owner(self, scope: Scope, response_id: str, node: str) -> None:
        """Remember which decode node keeps a response."""
        record = Record(_KEPT_RESPONSE, decode_node=node)
        await self._put(self.owners, Put([scope.response_key(response_id)], record))

    async def _take(self, store: SessionStore, keys: Sequence[bytes]) -> Taken:
        try:
            async with asyncio.timeout(self.settings.store.deadline):
                return await store.take(keys)
        except Exception as e:  # noqa: BLE001 - whatever the store does, the turn goes on
            self._store_failed("take", e)
            return Taken(None, Outcome.STORE_UNAVAILABLE)

    async def _put(self, store: SessionStore, put: Put) -> bytes | None:
        try:
            async with asyncio.timeout(self.settings.store.deadline):
                return await store.put(put.keys, put.record)
        except Exception as e:  # noqa: BLE001 - as above
            self._store_failed("put", e)
            return None

    async def replace(self, ticket: bytes, record: Record) -> bool:
        """Replace a record in the store, within its deadline. Returns whether it was still there."""
        try:
            async with asyncio.timeout(self.settings.store.deadline):
                return await self.store.replace(ticket, record)
        except Exception as e:  # noqa: BLE001 - as above
            self._store_failed("replace", e)
            return False

    def _store_failed(self, operation: str, error: Exception) -> None:
        self.metrics.store_errors.labels(operation).inc()
        log.warning("store %s failed: %s", operation, type(error).__name__)
