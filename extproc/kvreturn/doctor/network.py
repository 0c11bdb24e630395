"""Rules over what nodes tell of the way between them: side channels, NIXL's backends, UCX's transports."""

from collections.abc import Iterator, Sequence

from kvreturn.core.address import is_local
from kvreturn.doctor.compare import machine, same
from kvreturn.doctor.flags import Flags
from kvreturn.doctor.model import Finding, fail, ok, warn

# UCX's names, in UCX_TLS.
_RDMA = {
    *("rc", "rc_x", "rc_v", "rc_mlx5", "dc", "dc_x", "dc_mlx5"),
    *("ud", "ud_x", "ib", "rdmacm", "srd", "cuda_ipc", "all"),
}
_TCP = {"tcp", "self", "sm", "shm", "posix", "sysv", "cma"}


def side_channels(nodes: Sequence[Flags]) -> Iterator[Finding]:
    """Nodes on other machines can reach them."""
    check = "side_channel.host"
    hosts = {host for n in nodes if (host := machine(n.source)) is not None}
    apart = len(hosts) > 1
    for n in nodes:
        host = n.side_host
        if host is None:
            continue
        if not is_local(host):
            yield ok(check, host, n.source)
        elif apart:
            what = f"{host or 'empty'}: nodes on other machines cannot reach it"
            remedy = "set VLLM_NIXL_SIDE_CHANNEL_HOST to the address by which the other nodes reach this one"
            yield fail(check, what, remedy, n.source)
        else:
            yield ok(check, f"{host}: good as long as all nodes are on one machine", n.source)


def transports(nodes: Sequence[Flags]) -> Iterator[Finding]:
    """KV goes over a fabric, the same everywhere."""
    check = "transport"
    yield from same(nodes, check, lambda n: n.backends and ",".join(n.backends), "give all nodes the same `backends`")
    for n in nodes:
        if n.backends is None or "UCX" not in n.backends:
            continue  # another backend, or not told
        named = {part.strip() for part in (n.ucx_tls or "").split(",") if part.strip()}
        if not named or any(part.startswith("^") for part in named):
            what = f"UCX_TLS={n.ucx_tls}" if n.ucx_tls else "UCX_TLS is unset"
            yield ok(check, f"{what}: UCX takes the best it finds; UCX_LOG_LEVEL=info tells which in the log", n.source)
        elif named <= _TCP:
            what = f"UCX_TLS={n.ucx_tls}: KV goes over TCP, the fallback"
            yield warn(check, what, "unset UCX_TLS, or add the transports of your fabric (rc, cuda_copy)", n.source)
        elif named & _RDMA:
            yield ok(check, f"UCX_TLS={n.ucx_tls}", n.source)
        else:
            what = f"UCX_TLS={n.ucx_tls} names no transport of a fabric"
            yield warn(check, what, "add the transports of your fabric (rc, cuda_copy)", n.source)


def seeds(nodes: Sequence[Flags]) -> Iterator[Finding]:
    """PYTHONHASHSEED, for the record."""
    seeds = {n.source: n.hash_seed for n in nodes if n.connector == "kvreturn" or n.hash_seed is not None}
    if len(seeds) > 1:
        told = ", ".join(f"{source}: {seed if seed is not None else 'unset'}" for source, seed in seeds.items())
        yield ok("flags.hash_seed", f"PYTHONHASHSEED {told}; read-back does not depend on it")
