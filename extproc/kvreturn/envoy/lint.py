"""Finds what Envoy accepts in a bootstrap but what breaks read-back, or lets a client past the router, silently.

A rule's name starts with the number of the field report that it comes from, or with `p` where it follows from how the
router and Envoy work together. envoy/README.md has the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvreturn.envoy import lane_rules, unread_rules
from kvreturn.envoy.reading import Doc, chains, clusters, endpoints, is_type, normalise
from kvreturn.envoy.rules import RULES
from kvreturn.envoy.subject import Subject
from kvreturn.settings.limits import Limits
from kvreturn.settings.nodes import Prefill

_OURS = "kvreturn"
_RULES = RULES | unread_rules.RULES | lane_rules.RULES


@dataclass(frozen=True)
class Problem:
    """One broken rule.

    Attributes:
        rule: its name.
        where: path into the document.
        what: what is wrong, what it leads to, and what to do.
    """

    rule: str
    where: str
    what: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.rule}: {self.where}: {self.what}"


def lint(
    bootstrap: Mapping[str, Any],
    *,
    service: str | None = None,
    prefill_timeout: float = Prefill().timeout,
    request_bytes: int = Limits().request_bytes,
) -> list[Problem]:
    """Check every ext_proc filter that calls our service, and what stands around it.

    Listeners, routes and clusters that a management server sends are not in the document, so they are not checked.

    Args:
        bootstrap: the parsed document, its members in snake or camel case.
        service: address of the ext_proc server, `host:port` or `unix:/path`. A filter is ours if its cluster has this
            endpoint, or `kvreturn` in its name.
        prefill_timeout: the router's `prefill.timeout`, in seconds.
        request_bytes: the router's `limits.request_bytes`.

    Returns:
        The problems, rule by rule; empty if there are none.
    """
    doc = normalise(bootstrap)
    known = clusters(doc)
    everything = list(chains(doc))
    ours = [
        Subject(chain, index, known, everything, prefill_timeout, request_bytes)
        for chain in everything
        for index, http_filter in enumerate(chain.filters)
        if _is_ours(http_filter.get("typed_config", {}), known, service)
    ]
    if not ours:
        what = (
            "no ext_proc filter calls kvreturn. If one should: put `kvreturn` into its cluster's name, or give the "
            "router's address"
        )
        return [Problem("p-no-filter", "static_resources.listeners", what)]
    return [
        Problem(name, where, what) for subject in ours for name, rule in _RULES.items() for where, what in rule(subject)
    ]


def _is_ours(config: Doc, known: Mapping[str, Doc], service: str | None) -> bool:
    if not is_type(config, "ext_proc.v3.ExternalProcessor"):
        return False
    grpc = config.get("grpc_service", {})
    name = grpc.get("envoy_grpc", {}).get("cluster_name", "")
    target = grpc.get("google_grpc", {}).get("target_uri", "")
    addresses = [target.removeprefix("dns:///"), *endpoints(known.get(name, {}))]
    return _OURS in name or _OURS in target or (service is not None and service in addresses)
