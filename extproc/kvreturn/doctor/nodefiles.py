"""Checks of `--node-config` files by themselves: names that vLLM does not know, and vLLM's own refusals."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvreturn.doctor import keys
from kvreturn.doctor.files import Launch, NodeFileError, read_launches
from kvreturn.doctor.flags import Flags, from_transfer
from kvreturn.doctor.model import Finding, fail, ok, warn

CHECK = "node_config"
_KEYS = f"{CHECK}.keys"
_SOURCE = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"


def read_files(paths: Sequence[Path]) -> tuple[list[Flags], list[Finding]]:
    """Read all files.

    Returns:
        The flags of the nodes in them, and what is wrong with each by itself.
    """
    flags, findings = list[Flags](), list[Finding]()
    for path in paths:
        try:
            launches = read_launches(path)
        except NodeFileError as e:
            remedy = "give a vLLM command line, its --kv-transfer-config as JSON, or a Kubernetes or Compose file"
            findings.append(fail(CHECK, str(e), remedy, str(path)))
            continue
        for launch in launches:
            flags.append(from_transfer(launch.source, launch.transfer, launch.options, launch.environ))
            findings += _check(launch, flags[-1])
    return flags, findings


def _check(launch: Launch, flags: Flags) -> Iterator[Finding]:
    source, transfer = launch.source, launch.transfer
    if not transfer:
        yield fail(CHECK, "no --kv-transfer-config: this node moves no KV", "add one; connector/README.md", source)
        return
    yield ok(CHECK, f"{flags.side or 'a'} node with {transfer.get('kv_connector')}", source)
    for key in sorted({str(k) for k in transfer} - keys.TRANSFER):
        close = keys.meant(key, keys.TRANSFER)
        what = f"vLLM does not start with {key} in --kv-transfer-config"
        yield fail(_KEYS, what, f"write {close}" if close else "remove it", source)
    extra = transfer.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        yield fail(_KEYS, "kv_connector_extra_config is no object", "write it as a JSON object", source)
        return
    if flags.connector in {"stock", "kvreturn"}:
        yield from _extra(extra, flags)
    if flags.connector == "kvreturn" and flags.secret is None:
        yield warn(
            f"{CHECK}.secret",
            "KVRETURN_SECRET is not set here: handles have no MAC, and digests no key",
            "set it, the same on all nodes and the router, if it does not come from elsewhere",
            source,
        )


def _extra(extra: Mapping[str, object], flags: Flags) -> Iterator[Finding]:
    known = keys.EXTRA | keys.OURS if flags.connector == "kvreturn" else keys.EXTRA
    unknown = sorted({str(k) for k in extra} - known)
    for key in unknown:
        close = keys.meant(key, known)
        remedy = f"write {close}" if close else f"remove it; known are {', '.join(sorted(known))}"
        what = (
            f"kv_connector_extra_config.{key} is read by nothing in vLLM {keys.VLLM} ({_SOURCE})"
            if key not in keys.OURS
            else f"kv_connector_extra_config.{key} is read by the kvreturn connector only, and this node is stock"
        )
        ignored = "our connector does not start with it" if flags.connector == "kvreturn" else "ignored without a word"
        yield fail(_KEYS, f"{what}: {ignored}", remedy, flags.source)
    if flags.connector == "kvreturn" and "bidirectional_kv_xfer" not in extra:
        what = "our connector does not start without bidirectional_kv_xfer"
        yield fail(_KEYS, what, "set it to true", flags.source)
    elif not unknown:
        yield ok(_KEYS, f"all known to vLLM {keys.VLLM}", flags.source)
    value = extra.get("bidirectional_kv_xfer", False)
    if not isinstance(value, bool):
        what = f"bidirectional_kv_xfer is {value!r}, which is no boolean of JSON"
        yield fail(_KEYS, what, "write true, without quotes", flags.source)
