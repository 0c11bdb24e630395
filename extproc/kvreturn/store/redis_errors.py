"""How Redis fails, by our names."""

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions as errors

from kvreturn.store.errors import StoreError

_KINDS: tuple[tuple[type[Exception], str, bool], ...] = (  # the first that fits: error, kind, whether the store is down
    (errors.AuthenticationError, "auth", True),
    (errors.AuthorizationError, "auth", True),
    (errors.NoPermissionError, "auth", True),
    (errors.BusyLoadingError, "loading", True),
    (errors.MaxConnectionsError, "busy", False),
    (errors.ReadOnlyError, "read_only", True),
    (errors.OutOfMemoryError, "full", False),  # what is there can still be taken
    (errors.ClusterDownError, "cluster_down", True),
    (errors.TimeoutError, "timeout", True),
    (errors.ConnectionError, "connection", True),
    (OSError, "connection", True),
    (errors.RedisError, "refused", False),
)


@contextmanager
def named() -> Iterator[None]:
    """The client's errors by our names; their texts may hold addresses."""
    try:
        yield
    except (errors.RedisError, OSError) as e:
        kind, down = next((kind, down) for error, kind, down in _KINDS if isinstance(e, error))
        raise StoreError(kind, down=down) from None
