"""Whether router, nodes and this shell have the same secret, by the digests that router and nodes tell of theirs."""

from collections.abc import Iterator, Sequence

from kvreturn.config import Settings
from kvreturn.core.handle import secret_scope
from kvreturn.doctor.compare import names
from kvreturn.doctor.flags import Flags
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn

NONE = secret_scope(b"")
SAME = "set the same KVRETURN_SECRET (or `secret`) on the router and on all nodes"
_AT_RISK = "none on any node: handles are not signed, and a tenant could search for prompts with another one's digests"


def own_scope(settings: Settings) -> str:
    """Digest of the secret that the settings have with this shell's environment."""
    return secret_scope(settings.secret.get_secret_value().encode())


def shell(settings: Settings, router: str | None) -> Iterator[Finding]:
    """This shell's secret.

    Args:
        settings: with this shell's environment.
        router: digest of the running router's; None if it was not told.
    """
    check, own = "config.secret", own_scope(settings)
    if router not in {None, own}:
        what = "this shell's secret is another one than that of the router that runs"
        if own == NONE:
            what = "this shell has no secret, and the router that runs has one"
        elif router == NONE:
            what = "this shell has a secret, and the router that runs has none"
        remedy = "run this with the router's KVRETURN_SECRET (or `secret`); nodes are compared with the router's"
        yield fail(check, what, remedy)
    elif own == NONE:
        what = "no secret: fingerprints use a key of the process, so that a restart forgets all sessions"
        yield warn(check, what, "set KVRETURN_SECRET, the same on the router and on all nodes")
    elif router:
        yield ok(check, "this shell's is the router's")


def secrets(nodes: Sequence[Flags], settings: Settings, router: str | None) -> Iterator[Finding]:
    """Each node's secret is the router's.

    Args:
        nodes: to look at.
        settings: with this shell's environment, whose secret counts if the router tells nothing.
        router: digest of the running router's secret; None if it was not told.
    """
    check, ours = "flags.secret", router or own_scope(settings)
    known = [n for n in nodes if n.scope is not None]
    told = {n.scope for n in known}
    if told == {NONE} != {ours}:
        yield _none(check, known, settings)
        return
    if router is None and len(told) == 1 < len(known) and told != {ours}:
        here = "these settings have none" if ours == NONE else "these settings have another one"
        remedy = f"is this shell's the router's? give it the router's KVRETURN_SECRET, or {SAME}"
        yield fail(check, f"one and the same on all nodes, and {here}", remedy, names(known))
        return
    for n in known:
        if n.scope == NONE != ours:
            yield fail(check, "none, and the router has one", SAME, n.source)
        elif n.scope != ours:
            what = "one, and the router has none" if ours == NONE else "another one than the router's"
            yield fail(check, what, SAME, n.source)
    good = [n for n in known if n.scope == ours]
    if good:
        yield ok(check, f"{'none, as at the router,' if ours == NONE else 'as the router has it'} at {names(good)}")


def _none(check: str, nodes: Sequence[Flags], settings: Settings) -> Finding:
    """No node has one, and the router has: nodes still prove to each other, but nothing is proven to the router."""
    models = ("", *settings.models)
    if any(settings.proof_for(m) == "router" for m in models):
        return fail(check, "none, and with `proof: router` the router takes signed handles only", SAME, names(nodes))
    if any(settings.return_for(m) != "lazy" for m in models):
        what = "none, and what the router's secret does not prove is not sent back eagerly"
        return fail(check, what, SAME, names(nodes))
    return warn(check, _AT_RISK, SAME, names(nodes))


def of_handle(source: str, node: Flags | None, settings: Settings, router: str | None) -> Finding | None:
    """What is known of the secret of a decode node's handle without it: None if the handle itself has to tell.

    Args:
        source: which pair of nodes.
        node: the decode node.
        settings: with this shell's environment.
        router: digest of the running router's secret; None if it was not told.
    """
    check, own = "secret", own_scope(settings)
    scope = node.scope if node else None
    if scope is not None and scope != (router or own):
        return skipped(check, "see the check `flags.secret`", source)
    if router in {None, own}:
        return None
    if scope is not None:
        return ok(check, "the same on router and decode node, by their digests", source)
    return skipped(check, "this shell has not the router's: see the check `config.secret`", source)
