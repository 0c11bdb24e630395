"""Clients for the forms of a store's URL."""

from typing import Any

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff

from kvreturn.store.url import StoreURL

Client = Redis | RedisCluster


def connect(url: StoreURL, *, pool_size: int, connect_timeout: float) -> Client:
    """A client, which connects when it is first used.

    Args:
        url: where to.
        pool_size: connections at most, to each server.
        connect_timeout: seconds for one connection.
    """
    tls: dict[str, Any] = {k: v for k, v in url.options.items() if k.startswith("ssl_")}
    if url.tls:
        tls["ssl"] = True
    # Calls are bounded by their callers, and nothing is sent twice (see `kvreturn.store.redis`). RESP 2, because RESP 3
    # costs each connection two round trips more and gives nothing that is used here.
    common: dict[str, Any] = {
        "username": url.username,
        "password": url.password,
        "socket_connect_timeout": connect_timeout,
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "max_connections": pool_size,
        "driver_info": None,
        **tls,
    }
    if url.form == "unix":
        return Redis(unix_socket_path=url.path, db=url.db, **common)
    if url.form == "sentinel":
        # One after the other is asked; the time for a connection has to be enough for all.
        patience = connect_timeout / len(url.hosts)
        own: dict[str, Any] = {
            "username": url.options.get("sentinel_username"),
            "password": url.options.get("sentinel_password"),
            "socket_connect_timeout": patience,
            "socket_timeout": patience,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            **tls,
        }
        sentinel: Any = Sentinel(list(url.hosts), sentinel_kwargs=own)  # type: ignore[no-untyped-call] # redis-py's
        primary: Redis = sentinel.master_for(url.service, db=url.db, **common)
        return primary
    if url.form == "cluster":
        nodes = [ClusterNode(host, port) for host, port in url.hosts]
        return RedisCluster(startup_nodes=nodes, **common)
    ((host, port),) = url.hosts
    return Redis(host=host, port=port, db=url.db, **common)


async def close(client: Client) -> None:
    """Close a client and all that belongs to it."""
    await client.aclose()
    if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
        await client.connection_pool.sentinel_manager.aclose()
