"""Rules over the nodes' flags and the router's settings: what must fit."""

from collections.abc import Iterator, Sequence

from kvreturn.config import Settings
from kvreturn.doctor.flags import Flags
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn

MARGIN = 5.0  # seconds before D's expiry from which vLLM declines a read


def ttls(nodes: Sequence[Flags], settings: Settings) -> Iterator[Finding]:
    """The router lets go of handles before D does."""
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


def thresholds(nodes: Sequence[Flags], settings: Settings) -> Iterator[Finding]:
    """P reads every handle that the router attaches."""
    check, least = "flags.kv_recompute_threshold", settings.limits.min_tokens
    known = [n for n in nodes if n.threshold is not None and n.side == "prefill"]
    for n in known:
        if n.threshold is not None and n.threshold > least:
            what = f"{n.threshold:g} tokens, limits.min_tokens {least}: handles between the two are spent unread"
            yield warn(check, what, f"set limits.min_tokens to {n.threshold:g}", n.source)
        else:
            yield ok(check, f"{n.threshold:g} tokens, limits.min_tokens {least}", n.source)
