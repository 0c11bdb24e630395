"""Comparing what is known of several nodes."""

from collections.abc import Callable, Iterator, Sequence

from kvreturn.core.address import split_address
from kvreturn.doctor.flags import Flags
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn


def names(nodes: Sequence[Flags]) -> str:
    """Where they are."""
    return ", ".join(n.source for n in nodes)


def machine(source: str) -> str | None:
    """The machine of a node that runs; None for a file."""
    try:
        return split_address(source)[0]
    except ValueError:
        return None


def untold(nodes: Sequence[Flags], value: Callable[[Flags], object]) -> list[Flags]:
    """Nodes of which a flag is not known, nor from the file of another one in the same pool."""
    sides = {n.side for n in nodes if value(n) is not None and machine(n.source) is None}
    return [n for n in nodes if value(n) is None and n.side not in sides]


def same(
    nodes: Sequence[Flags],
    check: str,
    value: Callable[[Flags], object],
    remedy: str,
    *,
    only_warn: bool = False,
) -> Iterator[Finding]:
    """Check that a flag is the same on all nodes that tell it.

    Args:
        nodes: to compare.
        check: its name.
        value: the flag; None where it is not known.
        remedy: if they differ.
        only_warn: whether that is no failure.
    """
    known = {n.source: v for n in nodes if (v := value(n)) is not None}
    if len(set(known.values())) > 1:
        told = ", ".join(f"{source}: {v}" for source, v in known.items())
        yield (warn if only_warn else fail)(check, f"differs ({told})", remedy)
    elif len(known) > 1:
        yield ok(check, f"{next(iter(known.values()))} at {', '.join(known)}")
    elif nodes:
        yield skipped(check, "fewer than two nodes tell it", remedy="give --node-config FILE for each node")
