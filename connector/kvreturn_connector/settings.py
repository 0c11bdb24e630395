"""What `kv_connector_extra_config` may hold, and saying so when it holds something else."""

import difflib
import inspect
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

SECRET_ENV = "KVRETURN_SECRET"  # noqa: S105 - the name of a variable
_RENAMED = {"remote_pull_threshold": "kv_recompute_threshold"}  # an older name that vLLM no longer reads
_TTL_MARGIN = 5.0  # seconds before D's expiry from which vLLM 0.32.0 declines reads


class ConfigurationError(ValueError):
    """A configuration that would fail silently later."""


@dataclass(frozen=True)
class Settings:
    """Our own members of `kv_connector_extra_config`, and what else we need of vLLM's configuration.

    Attributes:
        bidirectional: vLLM's `bidirectional_kv_xfer`.
        allowed_peers: networks and host names that a handle may send us to. Empty: private and loopback addresses.
        retention_budget: share of D's KV blocks that finished turns may keep pinned, 0 to 1.
        claim_timeout: seconds that P waits for D to confirm a pin before it computes instead.
        ttl: seconds for which D keeps a finished turn's blocks (vLLM's `decoder_kv_blocks_ttl`).
        threshold: tokens below which P computes rather than reads (vLLM's `kv_recompute_threshold`).
        secret: shared by router and nodes, empty where none is configured.
    """

    bidirectional: bool
    allowed_peers: tuple[str, ...] = ()
    retention_budget: float = 0.5
    claim_timeout: float = 1.0
    ttl: float = 480.0
    threshold: int = 64
    secret: bytes = b""


OWN_KEYS = ("allowed_peers", "retention_budget", "claim_timeout")


def keys_read_by(modules: Iterable[ModuleType]) -> set[str]:
    """The members that these modules of the installed vLLM read, found in their source."""
    pattern = re.compile(r'get_from_extra_config\(\s*"([a-z_0-9]+)"')
    return {key for module in modules for key in pattern.findall(inspect.getsource(module))}


def read_settings(
    extra: Mapping[str, Any], role: str | None, vllm_keys: Iterable[str], environ: Mapping[str, str] = os.environ
) -> Settings:
    """Check and read the configuration.

    Args:
        extra: `kv_connector_extra_config`.
        role: `kv_role`.
        vllm_keys: members that vLLM itself reads.
        environ: where the secret may be.

    Raises:
        ConfigurationError: with what to write instead.
    """
    known = {*vllm_keys, *OWN_KEYS}
    unknown = sorted(set(extra) - known)
    if unknown:
        raise ConfigurationError("; ".join(_unknown(key, known) for key in unknown))
    if role == "kv_both":
        raise ConfigurationError(
            "kv_role=kv_both leaves open who reads from whom: use kv_producer for prefill, kv_consumer for decode nodes"
        )
    if "bidirectional_kv_xfer" not in extra:
        raise ConfigurationError(
            "the kvreturn connector does nothing without bidirectional_kv_xfer: set it to true on prefill and decode "
            "nodes alike (or to false, to say that it is off on purpose)"
        )
    settings = Settings(
        bidirectional=_typed(extra, "bidirectional_kv_xfer", bool, default=False),
        allowed_peers=tuple(_typed(extra, "allowed_peers", list, [])),
        retention_budget=float(_typed(extra, "retention_budget", (int, float), 0.5)),
        claim_timeout=float(_typed(extra, "claim_timeout", (int, float), 1.0)),
        ttl=float(_typed(extra, "decoder_kv_blocks_ttl", (int, float), 480)),
        threshold=int(_typed(extra, "kv_recompute_threshold", (int, float), 64)),
        secret=environ.get(SECRET_ENV, "").encode(),
    )
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    if not 0.0 <= settings.retention_budget <= 1.0:
        raise ConfigurationError("retention_budget is a share of the KV cache: a number from 0 to 1")
    if settings.claim_timeout <= 0:
        raise ConfigurationError("claim_timeout must be above 0 seconds")
    if settings.ttl <= _TTL_MARGIN:
        raise ConfigurationError(
            f"decoder_kv_blocks_ttl={settings.ttl:g}: vLLM declines every read within {_TTL_MARGIN:g} s of the expiry, "
            "so nothing would ever be read; the default is 480"
        )
    for peer in settings.allowed_peers:
        if not peer or type(peer) is not str:
            raise ConfigurationError(
                "allowed_peers must be a list of host names, addresses or networks like 10.0.0.0/8"
            )
        if "/" in peer:
            try:
                ipaddress.ip_network(peer)
            except ValueError as e:
                raise ConfigurationError(f"allowed_peers: {e}") from None


def _unknown(key: str, known: set[str]) -> str:
    close = [_RENAMED[key]] if key in _RENAMED else difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"kv_connector_extra_config.{key} is not known to this vLLM or to kvreturn, and would be ignored{hint}"


def _typed(extra: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    value = extra.get(key, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigurationError(f"kv_connector_extra_config.{key}={value!r} has the wrong type")
    return value


def peer_allowed(host: str, allowed: Iterable[str]) -> bool:
    """Whether a handle may send us to `host`.

    Names count only if they are listed: resolving one that a handle brought would already be a request to a stranger.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in allowed or (host == "localhost" and not any(allowed))
    networks = [p for p in allowed if _is_network(p)]
    if not allowed:
        return address.is_private or address.is_loopback
    return any(address in ipaddress.ip_network(n) for n in networks)


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True
