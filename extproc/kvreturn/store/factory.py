"""The session store that the settings ask for."""

import importlib
import time
from collections.abc import Callable

from kvreturn.config import Settings
from kvreturn.core.ports import SessionStore
from kvreturn.store.memory import MemoryStore
from kvreturn.store.url import parse_store_url
from kvreturn.telemetry.metrics import Metrics


def open_store(settings: Settings, metrics: Metrics, clock: Callable[[], float]) -> SessionStore:
    """A store; it connects when it is first used.

    Args:
        settings: of the router.
        metrics: where the memory store tells how full it is.
        clock: monotonic seconds, for the memory store.

    Raises:
        ModuleNotFoundError: the settings ask for Redis, and the extra `redis` is not installed.
    """
    own = settings.store
    if own.url is None:
        return _memory(settings, metrics, clock)
    from kvreturn.store.client import connect  # noqa: PLC0415 - an extra, needed here only
    from kvreturn.store.codec import Codec  # noqa: PLC0415
    from kvreturn.store.redis import RedisStore  # noqa: PLC0415

    url = parse_store_url(own.url.get_secret_value())
    key = own.encryption_key.get_secret_value() or settings.secret.get_secret_value()
    return RedisStore(
        connect(url, pool_size=own.pool_size, connect_timeout=own.connect_timeout),
        Codec(key.encode()),
        max_record_bytes=own.max_record_bytes,
        clock=time.time,
    )


def check_installed(settings: Settings) -> None:
    """See that the client of the store is there, before anything is started.

    Raises:
        ModuleNotFoundError: as for `open_store`.
    """
    if settings.store.url:
        for module in ("client", "codec"):
            importlib.import_module(f"kvreturn.store.{module}")


def _memory(settings: Settings, metrics: Metrics, clock: Callable[[], float]) -> MemoryStore:
    store = MemoryStore(max_entries=settings.store.max_entries, max_bytes=settings.store.max_bytes, clock=clock)
    metrics.watch("sessions", "Records in the session store.", lambda: len(store), unit="{record}")
    metrics.watch("sessions.size_bytes", "Bytes of the records in the session store.", lambda: store.bytes)
    for name, doc, total in (
        ("sessions_evicted", "Records that left for want of room.", lambda: store.evicted),
        ("sessions_expired", "Handles that nobody took in time.", lambda: store.expired),
    ):
        metrics.watch(name, doc, total, unit="{record}", total=True)
    return store
