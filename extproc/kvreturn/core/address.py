"""`host:port` addresses, IPv6 included."""

import ipaddress
import re
from collections.abc import Sequence

_LAST_PORT = 65535
RANK_HEADER = "x-data-parallel-rank"
"""Request header that chooses one of the engines behind vLLM's server: `--data-parallel-size` (vLLM 0.32.0)."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`.

    Returns:
        The host without brackets, and the port.

    Raises:
        ValueError: no host, no port, or a port out of 1..65535.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ipaddress.IPv6Address(host)
    elif ":" in host:
        raise ValueError(f"{address!r}: write an IPv6 address as [address]:port")
    elif not _NAME.fullmatch(host):
        raise ValueError(f"{address!r} is no host:port")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT):
        raise ValueError(f"{address!r} is no host:port")
    return host, int(port)


def shifted(listen: str, index: int) -> str:
    """Where worker `index` listens, of several that share a setting: two ports further on each, or `PATH.index`.

    Raises:
        ValueError: there is no such port.
    """
    if index == 0:
        return listen
    if listen.startswith("unix:"):
        return f"{listen}.{index}"
    try:
        return moved(listen, 2 * index)
    except ValueError:
        message = f"workers: from {listen} on there is no port for worker {index}; choose a lower one"
        raise ValueError(message) from None


def moved(address: str, by: int) -> str:
    """The same host, so many ports further on, or in the other direction where there are not as many.

    Raises:
        ValueError: there is no such port.
    """
    head, _, port = address.rpartition(":")
    there = int(port) + by if int(port) + by > 0 else int(port) - by
    if not 0 < there <= _LAST_PORT:
        raise ValueError(f"there is no port {by} from {address}; choose another one")
    return f"{head}:{there}"


def is_local(host: str) -> bool:
    """Whether `host` names no machine to anybody else: loopback, unspecified, or empty."""
    if host.lower() in {"", "localhost"}:
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    return ip.is_loopback or ip.is_unspecified


def is_ip(host: str) -> bool:
    """Whether `host` is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def are_told_apart(listens: Sequence[str]) -> bool:
    """Whether each of these (`host:port` or `unix:/path`) is one server: a name may stand for several."""
    hosts = [split_address(listen)[0] for listen in listens if not listen.startswith("unix:")]
    return all(is_ip(host) or host == "localhost" for host in hosts)


def seat(address: str, rank: int | None) -> str:
    """The name of one engine behind an address: `host:port#rank`; the address itself where there is just one.

    Args:
        address: `host:port` of the server.
        rank: data-parallel rank of the engine, None if the server has one engine, or if the rank does not matter.
    """
    return address if rank is None else f"{address}#{rank}"


def split_seat(name: str) -> tuple[str, int | None]:
    """The address and the data-parallel rank of what `seat` has named."""
    address, _, rank = name.partition("#")
    return address, int(rank) if rank.isdecimal() else None


def host_of(name: str) -> str:
    """The host of an address, or of what `seat` has named."""
    return split_address(split_seat(name)[0])[0]
