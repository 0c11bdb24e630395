"""Addresses on this machine: reachable how, and free or not."""

import ipaddress
import socket
from collections.abc import Mapping, Sequence

from kvreturn.core.address import are_told_apart, is_ip, split_address

NAMED = (
    "envoy.lane: fast has no effect: there are names among envoy.routers, and each may stand for several routers, of "
    "which only one knows a turn. Give IP addresses or Unix sockets, or set envoy.lane: portable"
)
"""What to do where routers cannot be told apart."""


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches what listens on `host:port`."""
    host, _ = split_address(address)
    return host == "localhost" or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


def is_unspecified(address: str) -> bool:
    """Whether what listens on `host:port` does so on all addresses of this machine."""
    host, _ = split_address(address)
    return is_ip(host) and ipaddress.ip_address(host).is_unspecified


def reachable(listen: str) -> str:
    """The address by which to reach a server on this machine that binds `listen` (`host:port` or `unix:/path`)."""
    if listen.startswith("unix:"):
        return listen
    if not is_unspecified(listen):
        return listen
    host, port = split_address(listen)
    return f"[::1]:{port}" if ":" in host else f"127.0.0.1:{port}"


def is_own(host: str) -> bool:
    """Whether an IP address is one of this machine's: only those can be bound."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def may_be_several(listens: Sequence[str]) -> bool:
    """Whether more than one server may be behind these: a name stands for all its addresses (a headless Service)."""
    return len(listens) > 1 or not are_told_apart(listens)


def as_envoy_knows(listen: str) -> str:
    """A router's address as Envoy writes it, by which it finds the router among others."""
    host = reachable(listen).removeprefix("unix:")
    return f"127.0.0.1:{split_address(host)[1]}" if host.startswith("localhost:") else host


def unavailable(listens: Mapping[str, str]) -> list[str]:
    """Try to bind addresses.

    Envoy and gRPC share a port with another process that allows it (SO_REUSEPORT), without a word, and connections go
    to either. So it takes a look beforehand to find a second instance.

    Args:
        listens: `host:port` or `unix:/path` by the name of the setting that it comes from.

    Returns:
        A sentence for each that cannot be bound.
    """
    found = []
    for setting, listen in listens.items():
        reason = _socket_file_in_use(listen) if listen.startswith("unix:") else _cannot_bind(listen)
        if reason:
            found.append(f"{listen} ({setting}): {reason}; free it, or choose another one")
    return found


def _cannot_bind(listen: str) -> str | None:
    host, port = split_address(listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger do not count
            probe.bind(address)
    except OSError as e:
        return e.strerror or str(e)
    return None


def _socket_file_in_use(listen: str) -> str | None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(listen.removeprefix("unix:"))
        except OSError:
            return None  # nobody listens; a file that was left behind is replaced
    return "Address already in use"
