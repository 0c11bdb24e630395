"""One ext_proc filter as the lint's rules see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvreturn.envoy import names
from kvreturn.envoy.reading import Chain, Doc, Modes, Route
from kvreturn.envoy.scripts import calls, source, takes_requests

Finding = tuple[str, str]
"""Path into the document; what is wrong, what it leads to, what to do."""


@dataclass(frozen=True)
class Subject:
    """One ext_proc filter and what stands around it.

    Attributes:
        chain: where it is.
        index: its place among the HTTP filters.
        clusters: the document's static clusters.
        everything: all chains of the document.
        prefill_timeout: the router's, in seconds.
        request_bytes: the router's limit.
    """

    chain: Chain
    index: int
    clusters: Mapping[str, Doc]
    everything: Sequence[Chain]
    prefill_timeout: float
    request_bytes: int

    @property
    def where(self) -> str:
        """Path of the filter."""
        return f"{self.chain.where}.http_filters[{self.index}]"

    @property
    def entry(self) -> Doc:
        """The filter's entry in the chain."""
        return self.chain.filters[self.index]

    @property
    def config(self) -> Doc:
        """The filter's configuration."""
        config: Doc = self.entry.get("typed_config", {})
        return config

    @cached_property
    def called(self) -> list[str]:
        """The scripts behind the filter by which the router hears of requests, in place of the filter."""
        return [source(f) for f in self.chain.filters[self.index + 1 :] if takes_requests(f)]

    def reads(self, route: Route, chain: Chain | None = None, *, bodiless: bool = False) -> bool:
        """Whether requests of a route come to the router, by a script or else by the filter.

        Args:
            route: one of the chain's.
            chain: this filter's own one if it is None.
            bodiless: whether requests without a body must come there too.
        """
        chain = chain or self.chain
        by_script = calls(chain, route, bodiless=bodiless)
        if by_script is not None:
            return by_script
        return any(route.passes(f) for f in chain.filters if f.get("name") == self.entry.get("name"))

    @cached_property
    def routes(self) -> list[Route]:
        """The routes to clusters of whose requests the router hears."""
        return [r for r in self.chain.routes if r.action is not None and self.reads(r)]

    @cached_property
    def overrides(self) -> list[tuple[str, Doc]]:
        """What routes override, with the route's path."""
        name = self.entry.get("name", "")
        return [(r.where, r.filter_config(name).get("overrides", {})) for r in self.routes]

    @cached_property
    def modes(self) -> list[tuple[str, Modes]]:
        """The filter's processing mode, and those of routes that have their own."""
        own = [(where, o["processing_mode"]) for where, o in self.overrides if "processing_mode" in o]
        return [(w, Modes.read(m)) for w, m in [(self.where, self.config.get("processing_mode", {})), *own]]

    def node_key(self, route: Route) -> str:
        """The key of the metadata by which the router names a node there, as its role has it."""
        override = route.filter_config(self.entry.get("name", "")).get("overrides", {})
        said = [*override.get("grpc_initial_metadata", []), *self._grpc.get("initial_metadata", [])]
        role = next((h.get("value") for h in said if h.get("key", "").lower() == names.ROLE_HEADER), None)
        return names.PREFILL_NODE_KEY if role == names.PREFILL else names.DECODE_NODE_KEY

    @property
    def _grpc(self) -> Doc:
        service: Doc = self.config.get("grpc_service", {})
        return service

    @cached_property
    def guarded(self) -> set[str]:
        """The clusters that may only be reached through the filter."""
        return {c for r in self.routes for c in r.clusters}
