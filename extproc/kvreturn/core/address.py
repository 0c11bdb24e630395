"""`host:port` addresses, IPv6 included."""

import ipaddress


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`.

    Returns:
        The host without brackets, and the port.

    Raises:
        ValueError: no host, no port, or a port out of 1..65535.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ipaddress.IPv6Address(host)
    elif ":" in host:
        raise ValueError(f"{address!r}: write an IPv6 address as [address]:port")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):  # noqa: PLR2004
        raise ValueError(f"{address!r} is no host:port")
    return host, int(port)


def is_local(host: str) -> bool:
    """Whether `host` names no machine to anybody else: loopback, unspecified, or empty."""
    if host in {"", "localhost"}:
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.is_loopback or ip.is_unspecified
