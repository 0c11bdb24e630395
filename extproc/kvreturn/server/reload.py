"""Settings that change while the router runs: which of them may, and how a changed file is noticed."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from kvreturn.config import ConfigError, Settings
from kvreturn.server.freshness import ENVOY, moves
from kvreturn.server.world import World

log = logging.getLogger("kvreturn")
_INTERVAL = 1.0  # seconds between looks at the file
# What `World.apply` changes. Whatever is not named here needs a restart, also a setting that is added one day. It may
# be part of a socket, of a connection or of Envoy's bootstrap, or say whose conversations are whose.
_LIVE = frozenset(
    {
        "pools",
        "proof",
        "return",
        "models",
        "session_header",
        "tenant_cache_salt",
        "drain_timeout",
        "breaker.failures",
        "breaker.window",
        "health.path",
        "health.interval",
        "health.timeout",
        "health.errors",
        "limits.response_bytes",
        "limits.history",
        "limits.live_turns",
        "limits.live_turns_per_tenant",
        "limits.sessions_per_tenant",
        "limits.min_tokens",
        "prefill.on_failure",
        "prefill.pass_token_ids",
        "returns.concurrency",
        "returns.queue",
        "returns.per_tenant",
        "returns.max_tokens",
        "returns.prefill_load",
        "returns.rate",
        "returns.patience",
        "returns.deadline",
        "returns.wait",
        "returns.ttl",
        "returns.priority",
        "store.ttl",
        "store.deadline",
        "store.breaker_failures",
        "store.breaker_probe",
    }
)


class Reloader:
    """Reads the settings again, and has a router go by them.

    Args:
        world: the router's.
        load: reads the settings of all workers.
        settings: the ones that it read last.
    """

    def __init__(self, world: World, load: Callable[[], Settings], settings: Settings) -> None:
        self._world = world
        self._load = load
        self._settings = settings
        world.metrics.configured.set(time.time())

    def reload(self) -> None:
        """Apply what has changed and may change now, and say what has not been applied.

        If the file is wrong, all stays as it is.
        """
        try:
            wanted = self._load()
            held = [path for path in _differences(self._settings, wanted) if path not in _LIVE]
            merged = _keep(self._settings, wanted, held)
        except ConfigError as e:
            self._world.metrics.reloads.labels("refused").inc()
            self._world.freshness.refused = str(e)
            log.error("the settings stay as they were: %s", e)  # noqa: TRY400 - the operator's mistake, not ours
            return
        changed = list(_differences(self._settings, merged))
        moved = moves(self._settings, merged)
        self._world.freshness.refused, self._world.freshness.held = None, held
        if held:
            log.warning("needs a restart: %s", ", ".join(held))
        if changed:
            self._world.apply(merged.worker(self._world.worker))
            self._settings = merged
        self._world.metrics.reloads.labels("in_part" if held else "applied" if changed else "unchanged").inc()
        self._world.metrics.configured.set(time.time())
        nodes = f"; {moved}" if moved else ""
        log.info("settings reloaded; changed: %s%s", ", ".join(changed) or "nothing", nodes)
        if moved and self._world.freshness.unknown_to_envoy():
            log.warning(ENVOY)

    async def watch(self, path: Path, interval: float = _INTERVAL) -> None:
        """Reload whenever the file holds something else than before, for ever.

        The path is followed each time: Kubernetes changes a mounted ConfigMap by pointing a symbolic link elsewhere.
        What was changed within the last interval is not looked at yet, as it may be half written.

        Args:
            path: of the file.
            interval: seconds between looks.
        """
        stat, text = _stat(path), _text(path)
        while True:
            await asyncio.sleep(interval)
            before, stat = stat, _stat(path)
            gone = stat is None and before is None
            self._look(path, gone=gone)
            if gone:
                text = None  # when it is back it is read, whatever it holds: a reload may have failed meanwhile
            if stat is None or stat != before:
                continue  # it is being replaced
            now = _text(path)
            if now is not None and now != text:
                text = now
                self.reload()

    def _look(self, path: Path, *, gone: bool) -> None:
        """Say once that the file is not there. It may be so for a moment while it is replaced."""
        freshness = self._world.freshness
        if gone and not freshness.missing:
            log.warning("%s is not there any more: the settings stay as they are", path)
        freshness.missing = path if gone else None


def _differences(old: BaseModel, new: BaseModel, prefix: str = "") -> Iterator[str]:
    """The names of settings that differ, as in `store.ttl`. Of what holds lists and mappings, the whole."""
    for name, field in type(old).model_fields.items():
        path = prefix + (field.alias or name)
        a, b = getattr(old, name), getattr(new, name)
        if a == b:
            continue
        if path not in _LIVE and isinstance(a, BaseModel) and isinstance(b, BaseModel):
            yield from _differences(a, b, f"{path}.")
        else:
            yield path


def _keep(old: Settings, new: Settings, held: list[str]) -> Settings:
    """The new settings with the old values of some.

    Raises:
        ConfigError: they do not fit together.
    """
    data, source = new.model_dump(by_alias=True), old.model_dump(by_alias=True)
    for path in held:
        *sections, name = path.split(".")
        to: dict[str, Any] = data
        since: dict[str, Any] = source
        for section in sections:
            to, since = to[section], since[section]
        to[name] = since[name]
    try:
        return Settings.model_validate(data)
    except ValidationError as e:
        reasons = "; ".join(str(error["msg"]).removeprefix("Value error, ") for error in e.errors())
        raise ConfigError(f"without a restart, {', '.join(held)} cannot change, and then: {reasons}") from None


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _text(path: Path) -> bytes | None:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None
