"""Rules over the flags of the nodes of one deployment: what must be equal, and what must fit the router's settings."""

import base64
from collections.abc import Callable, Iterator, Sequence

from kvreturn.config import Settings
from kvreturn.core import wire
from kvreturn.core.address import is_local, split_address
from kvreturn.doctor.flags import Flags
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn

MARGIN = 5.0  # seconds before D's expiry from which vLLM declines a read
_RDMA = {
    "rc",
    "rc_x",
    "rc_v",
    "rc_mlx5",
    "dc",
    "dc_x",
    "dc_mlx5",
    "ud",
    "ud_x",
    "ib",
    "rdmacm",
    "srd",
    "cuda_ipc",
    "all",
}
_TCP = {"tcp", "self", "sm", "shm", "posix", "sysv", "cma"}


def agree(nodes: Sequence[Flags], settings: Settings | None, kvreturn_version: str) -> Iterator[Finding]:
    """Check what is known of the nodes' flags against each other and against the router.

    Args:
        nodes: all of them, of both sides.
        settings: the router's, None if they could not be read.
        kvreturn_version: of the router.
    """
    if not any(n.connector for n in nodes):
        yield skipped("flags", "nothing is known of the nodes' flags", remedy="give --node-config FILE for each node")
        return
    yield from _bidirectional(nodes, settings)
    yield from _roles(nodes)
    yield from _proofs(nodes, settings)
    yield from _policies(nodes)
    yield from _equal(nodes)
    yield from _prefix_cache(nodes, settings)
    yield from _versions(nodes, kvreturn_version)
    if settings:
        yield from _secrets(nodes, settings)
        yield from _ttls(nodes, settings)
        yield from _thresholds(nodes, settings)
    yield from _side_channels(nodes)
    yield from _transports(nodes)
    yield from _seeds(nodes)


def _bidirectional(nodes: Sequence[Flags], settings: Settings | None) -> Iterator[Finding]:
    check, known = "flags.bidirectional_kv_xfer", [n for n in nodes if n.bidirectional is not None]
    off = [n for n in known if not n.bidirectional]
    remedy = "set bidirectional_kv_xfer to true in kv_connector_extra_config, on prefill and decode nodes alike"
    for n in off:
        if n.side == "decode":
            yield fail(check, "off: its turns leave no handle, so nothing ever comes back", remedy, n.source)
        elif n.connector == "stock" and settings and settings.return_for("") == "eager":
            yield ok(check, "off, as a stock prefill node with eager return only may have it", n.source)
        else:
            effect = "reads nothing back" if n.connector == "kvreturn" else "hangs on a handle in the published form"
            yield fail(check, f"off: this node {effect}", remedy, n.source)
    if known and not off:
        yield ok(check, f"on at {_names(known)}")
    missing = _untold(nodes, lambda n: n.bidirectional)
    if missing:
        why = "a stock node does not tell whether it is on"
        yield skipped(check, why, _names(missing), "give its command line by --node-config")


def _untold(nodes: Sequence[Flags], value: Callable[[Flags], object]) -> list[Flags]:
    """Nodes of which a flag is not known, nor from the file of another one in the same pool."""
    sides = {n.side for n in nodes if value(n) is not None and _host(n.source) is None}
    return [n for n in nodes if value(n) is None and n.side not in sides]


def _roles(nodes: Sequence[Flags]) -> Iterator[Finding]:
    check, wanted = "flags.kv_role", {"prefill": "kv_producer", "decode": "kv_consumer"}
    good = []
    for n in nodes:
        if n.role == "kv_both":
            what = "kv_both leaves open who reads from whom"
            remedy = "use kv_producer on prefill and kv_consumer on decode nodes"
            if n.connector == "kvreturn":
                yield fail(check, f"{what}: our connector does not start with it", remedy, n.source)
            else:
                yield warn(check, what, remedy, n.source)
        elif n.role and n.side and n.role != wanted[n.side]:
            yield fail(
                check,
                f"{n.role} on a node of pools.{n.side}",
                f"set kv_role to {wanted[n.side]} there, or move it to the other pool",
                n.source,
            )
        elif n.role:
            good.append(n)
    if good:
        yield ok(check, f"as its pool wants it at {_names(good)}")


def _proofs(nodes: Sequence[Flags], settings: Settings | None) -> Iterator[Finding]:
    check, proof = "flags.connector", settings.proof if settings else "connector"
    ours = '"kv_connector_module_path": "kvreturn_connector.connector" and kv_connector "NixlConnector"'
    install = f"install kvreturn-connector in its image, and set {ours}"
    good = []
    for n in nodes:
        if n.connector in {"none", "other"}:
            what = "no KV connector" if n.connector == "none" else "another connector than NixlConnector"
            yield fail(check, f"{what}: no blocks go either way", install, n.source)
        elif n.connector == "stock" and n.side == "decode" and proof in {"connector", "router"}:
            yield fail(check, f"stock connector: its handles prove nothing, and proof is `{proof}`", install, n.source)
        elif n.connector == "stock" and n.side == "prefill" and proof == "connector":
            what = "stock connector: it ignores sealed handles, so that lazy turns are computed"
            yield warn(check, what, f"{install}; or set proof to `router` in the settings", n.source)
        elif n.connector:
            good.append(n)
    if good:
        yield ok(check, ", ".join(f"{n.source}: {n.connector}" for n in good))


def _policies(nodes: Sequence[Flags]) -> Iterator[Finding]:
    check = "flags.kv_load_failure_policy"
    for n in nodes:
        if n.connector == "kvreturn":
            yield ok(check, "our connector computes what cannot be read, whatever is set", n.source)
        elif n.policy == "recompute":
            what = "recompute: on stock vLLM 0.32.0 a request whose read fails hangs until its client leaves"
            yield fail(check, what, "set it to fail, or install kvreturn-connector there", n.source)
        elif n.policy:
            yield ok(check, n.policy, n.source)
    missing = _untold([n for n in nodes if n.connector == "stock"], lambda n: n.policy)
    if missing:
        remedy = "make sure that it is not recompute: give its command line by --node-config"
        yield skipped(check, "a stock node does not tell it", _names(missing), remedy)


def _equal(nodes: Sequence[Flags]) -> Iterator[Finding]:
    yield from _same(
        nodes,
        "flags.block_size",
        lambda n: n.block_size,
        "handles are of no use across block sizes (outcome `unproven`): start all nodes with the same --block-size",
    )
    yield from _same(
        nodes,
        "flags.kv_cache_dtype",
        lambda n: n.kv_cache_dtype,
        "NIXL refuses the handshake: start all nodes with the same --kv-cache-dtype",
    )
    yield from _same(
        nodes,
        "flags.tensor_parallel_size",
        lambda n: n.tp,
        "vLLM can read across tensor parallel sizes, but read-back was not tried with it: compare answers first",
        only_warn=True,
    )


def _same(
    nodes: Sequence[Flags],
    check: str,
    value: Callable[[Flags], object],
    remedy: str,
    *,
    only_warn: bool = False,
) -> Iterator[Finding]:
    known = {n.source: v for n in nodes if (v := value(n)) is not None}
    if len(set(known.values())) > 1:
        told = ", ".join(f"{source}: {v}" for source, v in known.items())
        yield (warn if only_warn else fail)(check, f"differs ({told})", remedy)
    elif len(known) > 1:
        yield ok(check, f"{next(iter(known.values()))} at {', '.join(known)}")
    elif nodes:
        yield skipped(check, "fewer than two nodes tell it", remedy="give --node-config FILE for each node")


def _prefix_cache(nodes: Sequence[Flags], settings: Settings | None) -> Iterator[Finding]:
    check = "flags.prefix_caching"
    eager = settings is not None and settings.return_for("") != "lazy"
    for n in nodes:
        if n.prefix_caching is False and n.side == "prefill" and eager:
            what = "off: eager return reads into the prefix cache, and here nothing stays"
            yield fail(check, what, "start it with --enable-prefix-caching, or set `return: lazy`", n.source)
        elif n.prefix_caching is False:
            what = "off: each turn moves or computes the whole prompt"
            yield warn(check, what, "start it with --enable-prefix-caching", n.source)
    on = [n for n in nodes if n.prefix_caching]
    if on:
        yield ok(check, f"on at {_names(on)}")


def _versions(nodes: Sequence[Flags], kvreturn_version: str) -> Iterator[Finding]:
    yield from _same(
        nodes,
        "versions.vllm",
        lambda n: n.vllm,
        "NIXL's handshake compares vLLM versions and refuses others: run the same on all nodes",
    )
    ours = [n for n in nodes if n.connector == "kvreturn"]
    check = "versions.connector"
    for n in ours:
        if n.connector_version and _release(n.connector_version) != _release(kvreturn_version):
            what = f"connector {n.connector_version}, router {kvreturn_version}"
            yield fail(check, what, "run connector and router of the same release", n.source)
    if any(n.connector_version for n in ours):
        remedy = "run the same connector on all nodes"
        yield from _same(ours, check, lambda n: n.connector_version, remedy, only_warn=True)


def _release(version: str) -> list[str]:
    return version.split(".")[:2]


def _secrets(nodes: Sequence[Flags], settings: Settings) -> Iterator[Finding]:
    check, secret = "flags.secret", settings.secret.get_secret_value().encode()
    ours, none = _scope_of(secret), _scope_of(b"")
    remedy = "set the same KVRETURN_SECRET (or `secret`) on the router and on all nodes"
    good = []
    for n in nodes:
        if n.scope is None:
            continue
        if n.scope == ours:
            good.append(n)
        elif n.scope == none:
            yield fail(check, "none, and the router has one", remedy, n.source)
        else:
            yield fail(
                check, "another one than the router's" if secret else "one, and the router has none", remedy, n.source
            )
    if good:
        yield ok(check, f"{'as the router has it' if secret else 'none, as at the router,'} at {_names(good)}")


def _scope_of(secret: bytes) -> str:
    """What a node with this secret tells as `scope`."""
    return base64.b64encode(wire.scope_tag(wire.chain_seed(secret))).decode()


def _ttls(nodes: Sequence[Flags], settings: Settings) -> Iterator[Finding]:
    check, ours = "ttl", settings.store.ttl
    known = [n for n in nodes if n.ttl is not None and n.side == "decode"]
    for n in known:
        assert n.ttl is not None
        sums = f"store.ttl {ours:g} s + margin {MARGIN:g} s against decoder_kv_blocks_ttl {n.ttl:g} s"
        if n.ttl <= MARGIN:
            what = f"decoder_kv_blocks_ttl {n.ttl:g} s: vLLM declines reads within {MARGIN:g} s of the end, so all"
            yield fail(check, what, "raise it; the default is 480", n.source)
        elif ours + MARGIN >= n.ttl:
            remedy = f"set store.ttl below {n.ttl - MARGIN:g}, or raise decoder_kv_blocks_ttl above {ours + MARGIN:g}"
            what = f"{sums}: the router would hand out handles that the prefill node declines"
            yield fail(check, what, remedy, n.source)
        else:
            yield ok(check, sums, n.source)
    if not known:
        yield skipped(
            check,
            "no decode node tells its decoder_kv_blocks_ttl",
            remedy=f"keep it above {ours + MARGIN:g} s; give --node-config",
        )


def _thresholds(nodes: Sequence[Flags], settings: Settings) -> Iterator[Finding]:
    check, least = "flags.kv_recompute_threshold", settings.limits.min_tokens
    known = [n for n in nodes if n.threshold is not None and n.side == "prefill"]
    for n in known:
        if n.threshold is not None and n.threshold > least:
            what = f"{n.threshold:g} tokens, limits.min_tokens {least}: handles between the two are spent unread"
            yield warn(check, what, f"set limits.min_tokens to {n.threshold:g}", n.source)
        else:
            yield ok(check, f"{n.threshold:g} tokens, limits.min_tokens {least}", n.source)


def _side_channels(nodes: Sequence[Flags]) -> Iterator[Finding]:
    check = "side_channel.host"
    hosts = {host for n in nodes if (host := _host(n.source)) is not None}
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


def _host(source: str) -> str | None:
    """The machine of a node that runs; None for a file."""
    try:
        return split_address(source)[0]
    except ValueError:
        return None


def _transports(nodes: Sequence[Flags]) -> Iterator[Finding]:
    check = "transport"
    yield from _same(nodes, check, lambda n: n.backends and ",".join(n.backends), "give all nodes the same `backends`")
    for n in nodes:
        named = {part.strip().lstrip("^") for part in (n.ucx_tls or "").split(",") if part.strip()}
        if n.backends is not None and "UCX" in n.backends and n.ucx_tls and not n.ucx_tls.startswith("^"):
            if named <= _TCP:
                what = f"UCX_TLS={n.ucx_tls}: KV goes over TCP, the fallback"
                yield warn(check, what, "unset UCX_TLS, or add the transports of your fabric (rc, cuda_copy)", n.source)
            elif named & _RDMA:
                yield ok(check, f"UCX_TLS={n.ucx_tls}", n.source)
            else:
                what = f"UCX_TLS={n.ucx_tls} names no transport of a fabric"
                yield warn(check, what, "add the transports of your fabric (rc, cuda_copy)", n.source)


def _seeds(nodes: Sequence[Flags]) -> Iterator[Finding]:
    seeds = {n.source: n.hash_seed for n in nodes if n.connector == "kvreturn" or n.hash_seed is not None}
    if len(seeds) > 1:
        told = ", ".join(f"{source}: {seed if seed is not None else 'unset'}" for source, seed in seeds.items())
        yield ok("flags.hash_seed", f"PYTHONHASHSEED {told}; read-back does not depend on it")


def _names(nodes: Sequence[Flags]) -> str:
    return ", ".join(n.source for n in nodes)
