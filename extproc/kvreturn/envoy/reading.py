"""Reading a parsed Envoy bootstrap: who wrote it does not matter, nor in which of the JSON spellings."""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvreturn.envoy import names

Doc = Mapping[str, Any]

BODY_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")
HEADER_MODES = ("DEFAULT", "SEND", "SKIP")
FULL_DUPLEX = "FULL_DUPLEX_STREAMED"

_DEFAULT_BUFFER = 1 << 20  # Envoy's per_connection_buffer_limit_bytes
_METHODS_WITHOUT_BODY = {"GET", "HEAD", "OPTIONS"}


@dataclass(frozen=True)
class Modes:
    """A processing mode with Envoy's defaults filled in."""

    request_body: str
    response_body: str
    request_header: str
    response_header: str
    request_trailer: str
    response_trailer: str

    @classmethod
    def read(cls, mode: Doc) -> "Modes":
        """Read a `processing_mode`."""

        def body(key: str) -> str:
            return _enum(mode.get(key, 0), BODY_MODES)

        def part(key: str) -> str:
            return _enum(mode.get(key, 0), HEADER_MODES)

        return cls(
            body("request_body_mode"),
            body("response_body_mode"),
            part("request_header_mode"),
            part("response_header_mode"),
            part("request_trailer_mode"),
            part("response_trailer_mode"),
        )


@dataclass(frozen=True)
class Route:
    """One route with what it inherits."""

    where: str
    route: Doc
    host: Doc
    table: Doc

    @property
    def levels(self) -> tuple[Doc, Doc, Doc]:
        """The most specific first."""
        return self.route, self.host, self.table

    @cached_property
    def action(self) -> Doc | None:
        """What it does with a request that it sends to a cluster."""
        return self.route.get("route")

    @cached_property
    def clusters(self) -> set[str]:
        """The clusters it names; one that is named by a header is not among them."""
        action = self.action or {}
        weighted = action.get("weighted_clusters", {}).get("clusters", [])
        return {c for c in (action.get("cluster"), *(w.get("name") for w in weighted)) if c}

    @cached_property
    def without_body(self) -> bool:
        """Whether it takes only requests whose method has no body."""
        return any(_methods(m) <= _METHODS_WITHOUT_BODY for m in self.route.get("match", {}).get("headers", []))

    def takes(self, path: str) -> bool:
        """Whether it takes requests for whatever is below a path, as far as its prefix tells."""
        return path.startswith(self.route.get("match", {}).get("prefix", path + "/"))

    def filter_config(self, name: str) -> Doc:
        """The most specific per-route configuration of a filter; `disabled` in it, however that was written."""
        for level in self.levels:
            config = level.get("typed_per_filter_config", {}).get(name)
            if config is not None:
                inner = config.get("config", {}) if is_type(config, "config.route.v3.FilterConfig") else config
                return {**inner, "disabled": config.get("disabled", inner.get("disabled", False))}
        return {}

    def passes(self, http_filter: Doc) -> bool:
        """Whether a filter of the chain applies here."""
        config = self.filter_config(http_filter.get("name", ""))
        if config:
            return not config["disabled"]
        return not http_filter.get("disabled", False)

    def body_limit(self, listener: Doc) -> int:
        """Bytes of a request body that Envoy buffers."""
        connection = int(listener.get("per_connection_buffer_limit_bytes", _DEFAULT_BUFFER))
        for level in (self.route, self.host):
            if "request_body_buffer_limit" in level:
                return int(level["request_body_buffer_limit"])
            if "per_request_buffer_limit_bytes" in level:
                return min(int(level["per_request_buffer_limit_bytes"]), connection)
        return connection


@dataclass(frozen=True)
class Chain:
    """One HTTP connection manager."""

    where: str
    listener: Doc
    manager: Doc

    @cached_property
    def filters(self) -> list[Doc]:
        """Its HTTP filters, in order; one that is wrapped with a matcher as it is inside, with the `xds_matcher`."""
        return [_unwrapped(f) for f in self.manager.get("http_filters", [])]

    @cached_property
    def routes(self) -> list[Route]:
        """Its routes; those that a management server sends are not seen."""
        table = self.manager.get("route_config", {})
        return [
            Route(f"{self.where}.route_config.virtual_hosts[{i}].routes[{j}]", route, host, table)
            for i, host in enumerate(table.get("virtual_hosts", []))
            for j, route in enumerate(host.get("routes", []))
        ]

    @property
    def local_only(self) -> bool:
        """Whether only this machine reaches it."""
        address = self.listener.get("address", {})
        if "socket_address" not in address:
            return "pipe" in address or "internal_listener" in self.listener
        host = address["socket_address"].get("address", "")
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def normalise(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Write every member's name in snake case, and leave out nulls: Envoy takes camel case too, and null for absent."""
    if isinstance(value, Mapping):
        return {_snake(str(k)): normalise(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [normalise(v) for v in value]
    return value


def chains(doc: Doc) -> Iterator[Chain]:
    """Every HTTP connection manager of a normalised bootstrap."""
    for i, listener in enumerate(doc.get("static_resources", {}).get("listeners", [])):
        groups = [(f"filter_chains[{j}]", c) for j, c in enumerate(listener.get("filter_chains", []))]
        if "default_filter_chain" in listener:
            groups.append(("default_filter_chain", listener["default_filter_chain"]))
        for name, group in groups:
            for k, network in enumerate(group.get("filters", [])):
                config = network.get("typed_config", {})
                if is_type(config, "HttpConnectionManager"):
                    yield Chain(f"listeners[{i}].{name}.filters[{k}]", listener, config)


def clusters(doc: Doc) -> dict[str, Doc]:
    """The static clusters of a normalised bootstrap, by name."""
    return {c.get("name", ""): c for c in doc.get("static_resources", {}).get("clusters", [])}


def endpoints(cluster: Doc) -> list[str]:
    """The addresses of a cluster's endpoints: `host:port`, or `unix:/path`."""
    found = []
    for locality in cluster.get("load_assignment", {}).get("endpoints", []):
        for endpoint in locality.get("lb_endpoints", []):
            address = endpoint.get("endpoint", {}).get("address", {})
            socket = address.get("socket_address", {})
            if "pipe" in address:
                found.append(f"unix:{address['pipe'].get('path')}")
            elif socket:
                host = socket.get("address", "")
                found.append(
                    f"[{host}]:{socket.get('port_value')}" if ":" in host else f"{host}:{socket['port_value']}"
                )
    return found


def override_hosts(cluster: Doc) -> Iterator[Doc]:
    """A cluster's `override_host` policies."""
    for policy in cluster.get("load_balancing_policy", {}).get("policies", []):
        config = policy.get("typed_extension_config", {}).get("typed_config", {})
        if is_type(config, "override_host.v3.OverrideHost"):
            yield config


def our_key(metadata: Doc) -> str | None:
    """Which key of our namespace a MetadataKey is."""
    path = [step.get("key") for step in metadata.get("path", [])]
    return path[0] if metadata.get("key") == names.METADATA_NAMESPACE and len(path) == 1 else None


def is_type(config: Doc, suffix: str) -> bool:
    """Whether a typed configuration is of a message type, given by the end of its name."""
    return str(config.get("@type", "")).endswith(f".{suffix}")


def seconds(duration: object, default: float) -> float:
    """A Duration in its JSON form, `1.5s`."""
    return float(str(duration).removesuffix("s")) if duration is not None else default


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])[A-Z]", lambda m: f"_{m[0].lower()}", name) if name.isidentifier() else name


def _unwrapped(http_filter: Doc) -> Doc:
    """Routes know a filter by its outer name."""
    config = http_filter.get("typed_config", {})
    if not is_type(config, "common.matching.v3.ExtensionWithMatcher"):
        return http_filter
    inner = config.get("extension_config", {}).get("typed_config", {})
    return {**http_filter, "typed_config": inner, "xds_matcher": config.get("xds_matcher", {})}


def _enum(value: object, known: tuple[str, ...]) -> str:
    return known[value] if isinstance(value, int) and 0 <= value < len(known) else str(value)


def _methods(matcher: Doc) -> set[str]:
    """The methods that a header matcher lets through; one that is no method at all where that cannot be told."""
    anything = {"*"}
    if matcher.get("name") != ":method" or matcher.get("invert_match"):
        return anything
    text = matcher.get("string_match", matcher)
    exact = text.get("exact", text.get("exact_match"))
    if exact is not None:
        return {exact}
    regex = text.get("safe_regex", text.get("safe_regex_match", {})).get("regex", "*")
    return set(re.sub(r"^\^?\(?(.*?)\)?\$?$", r"\1", regex).split("|"))
