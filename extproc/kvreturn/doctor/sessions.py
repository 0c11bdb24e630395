"""The session store: is it there, new enough, set up for handles, and quick enough?"""

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvreturn.doctor.context import Context, reason
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn
from kvreturn.store.url import parse_store_url

CHECK = "store"
_PINGS = 9
_OLDEST = (7, 0)
_SKEW = 0.5  # seconds; the store's own bound (kvreturn.store.redis)


async def check_store(ctx: Context) -> list[Finding]:
    """Ask Redis or Valkey, if the settings have one."""
    own, routers = ctx.settings.store, ctx.settings.envoy.routers
    if own.url is None:
        if len(routers) > 1:
            what = f"{len(routers)} routers, and each keeps its sessions in its own memory"
            return [fail(CHECK, what, "set store.url to a Redis 7 or Valkey that all of them use")]
        return [ok(CHECK, "the memory of the router: a restart forgets all handles")]
    try:
        from redis import exceptions  # noqa: PLC0415 - an extra, needed here only

        from kvreturn.store.client import close, connect  # noqa: PLC0415
    except ModuleNotFoundError:
        return [
            fail(
                CHECK,
                "the Redis client is not installed here",
                "run pip install '.[redis]' in kvreturn's source folder",
            )
        ]
    url = parse_store_url(own.url.get_secret_value())
    client: Any = connect(url, pool_size=4, connect_timeout=ctx.seconds)
    try:
        async with asyncio.timeout(ctx.seconds):
            await client.ping()
            took = [await _ping(client) for _ in range(_PINGS)]
            info = _one(await client.info())
            begun = time.time()
            told = _one(await client.time())
            skew = told[0] + told[1] / 1e6 - (begun + time.time()) / 2
        return [ok(CHECK, f"answers ({url.form})"), *judge(info, statistics.median(took), own.deadline, skew)]
    except TimeoutError:
        return [fail(CHECK, f"no answer within {ctx.seconds:g} s", "start it, or correct store.url")]
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as e:
        return [fail(CHECK, f"refuses us: {type(e).__name__}", "correct user and password in store.url")]
    except (exceptions.RedisError, OSError) as e:
        cause = next((c for c in (e, e.__cause__, e.__context__) if isinstance(c, OSError) and c.strerror), e)
        what = reason(cause) if isinstance(cause, OSError) and cause.strerror else type(e).__name__
        return [fail(CHECK, f"cannot be reached: {what}", "start it, or correct store.url")]
    finally:
        await close(client)


async def _ping(client: Any) -> float:  # noqa: ANN401 - redis-py's clients have no common type
    begun = time.perf_counter()
    await client.ping()
    return time.perf_counter() - begun


def _one(reply: Any) -> Any:  # noqa: ANN401 - redis-py's
    """A cluster answers once for each node; its nodes are set up alike."""
    if (
        isinstance(reply, Mapping)
        and reply
        and all(":" in str(k) and isinstance(v, Mapping | tuple | list) for k, v in reply.items())
    ):
        return next(iter(reply.values()))
    return reply


def judge(info: Mapping[str, Any], seconds: float, deadline: float, skew: float) -> Iterator[Finding]:
    """Judge a store.

    Args:
        info: what it answers to INFO.
        seconds: that a ping takes.
        deadline: for a call, seconds.
        skew: seconds that its clock is ahead of ours.
    """
    valkey = info.get("valkey_version")
    version, name = str(valkey or info.get("redis_version", "")), "Valkey" if valkey else "Redis"
    parts = [int(p) for p in version.split(".")[:2] if p.isdigit()]
    if not parts:
        yield skipped("store.version", "it does not tell its version")
    elif tuple(parts) < _OLDEST:
        yield fail("store.version", f"{name} {version}", "run Redis 7.0 or newer, or Valkey")
    else:
        yield ok("store.version", f"{name} {version}")
    policy = info.get("maxmemory_policy")
    if policy == "noeviction":
        yield ok("store.eviction", "noeviction")
    elif policy:
        what = f"maxmemory-policy {policy}: handles that it evicts look as if they had been taken"
        yield warn("store.eviction", what, "CONFIG SET maxmemory-policy noeviction")
    else:
        yield skipped("store.eviction", "it does not tell its maxmemory-policy")
    kept = "append-only file; " if info.get("aof_enabled") else ""
    what = f"{kept}handles live for minutes, so it need not be kept on disk; a lost one costs one prefill"
    yield ok("store.persistence", what)
    if seconds > deadline:
        what = f"{seconds * 1e3:.1f} ms for a ping, store.deadline is {deadline * 1e3:g} ms: turns go cold"
        yield fail("store.latency", what, "move it nearer, or raise store.deadline")
    elif seconds > deadline / 2:
        what = f"{seconds * 1e3:.1f} ms for a ping, half of store.deadline ({deadline * 1e3:g} ms) or more"
        yield warn("store.latency", what, "move it nearer, or raise store.deadline")
    else:
        yield ok("store.latency", f"{seconds * 1e3:.2f} ms for a ping, store.deadline is {deadline * 1e3:g} ms")
    if abs(skew) > _SKEW:
        what = f"its clock is {skew:+.1f} s off this machine's: handles expire too early or too late"
        yield fail("store.clock", what, "run NTP on the store's and the routers' machines")
    else:
        yield ok("store.clock", f"{skew * 1e3:+.0f} ms against this machine")
