"""Rules over the flags of the nodes of one deployment: what must be equal, and what must fit the router's settings."""

from collections.abc import Iterator, Sequence

from kvreturn.config import Settings
from kvreturn.doctor.compare import names, same, untold
from kvreturn.doctor.flags import Flags
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn
from kvreturn.doctor.network import seeds, side_channels, transports
from kvreturn.doctor.router import thresholds, ttls
from kvreturn.doctor.secret import secrets


def agree(
    nodes: Sequence[Flags], settings: Settings | None, kvreturn_version: str, router_scope: str | None = None
) -> Iterator[Finding]:
    """Check what is known of the nodes' flags against each other and against the router.

    Args:
        nodes: all of them, of both sides.
        settings: the router's, None if they could not be read.
        kvreturn_version: of the router.
        router_scope: digest of the running router's secret; None if it was not told.
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
        yield from secrets(nodes, settings, router_scope)
        yield from ttls(nodes, settings)
        yield from thresholds(nodes, settings)
    yield from side_channels(nodes)
    yield from transports(nodes)
    yield from seeds(nodes)


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
        yield ok(check, f"on at {names(known)}")
    missing = untold(nodes, lambda n: n.bidirectional)
    if missing:
        why = "a stock node does not tell whether it is on; a decode node that leaves a handle (`streams`) has it"
        yield skipped(check, why, names(missing), "give its command line by --node-config")


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
        yield ok(check, f"as its pool wants it at {names(good)}")


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
    missing = untold([n for n in nodes if n.connector == "stock"], lambda n: n.policy)
    if missing:
        remedy = "make sure that it is not recompute: give its command line by --node-config"
        yield skipped(check, "a stock node does not tell it", names(missing), remedy)


def _equal(nodes: Sequence[Flags]) -> Iterator[Finding]:
    yield from same(
        nodes,
        "flags.block_size",
        lambda n: n.block_size,
        "handles are of no use across block sizes (outcome `unproven`): start all nodes with the same --block-size",
    )
    yield from same(
        nodes,
        "flags.kv_cache_dtype",
        lambda n: n.kv_cache_dtype,
        "NIXL refuses the handshake: start all nodes with the same --kv-cache-dtype",
    )
    yield from same(
        nodes,
        "flags.tensor_parallel_size",
        lambda n: n.tp,
        "vLLM can read across tensor parallel sizes, but read-back was not tried with it: compare answers first",
        only_warn=True,
    )


def _prefix_cache(nodes: Sequence[Flags], settings: Settings | None) -> Iterator[Finding]:
    check = "flags.prefix_caching"
    eager = settings is not None and settings.return_for("") != "lazy"
    for n in nodes:
        if n.prefix_caching is False and n.side == "prefill" and eager:
            what = "off: eager return reads into the prefix cache, and here nothing stays"
            yield fail(check, what, "start it with --enable-prefix-caching, or set `return: lazy`", n.source)
        elif n.prefix_caching is False:
            what = "off: each turn pulls its whole prompt from the prefill node"
            if n.side == "prefill":
                what = "off: what is not read back is computed in each turn, also prompts that all conversations share"
            remedy = "start it with --enable-prefix-caching, if this is not to show what reading back alone saves"
            yield warn(check, what, remedy, n.source)
    on = [n for n in nodes if n.prefix_caching]
    if on:
        yield ok(check, f"on at {names(on)}")


def _versions(nodes: Sequence[Flags], kvreturn_version: str) -> Iterator[Finding]:
    yield from same(
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
        yield from same(ours, check, lambda n: n.connector_version, remedy, only_warn=True)


def _release(version: str) -> list[str]:
    return version.split(".")[:2]
