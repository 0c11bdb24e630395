"""The settings of one router: what `kvreturn.yaml` holds."""

import itertools
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from kvreturn.core.address import are_told_apart, moved, shifted, split_address
from kvreturn.settings.envoy import Envoy
from kvreturn.settings.limits import Limits
from kvreturn.settings.nodes import Breaker, Health, Prefill
from kvreturn.settings.pools import Pools
from kvreturn.settings.returns import Returns
from kvreturn.settings.store import Store
from kvreturn.settings.types import Address, Count, Listen, Positive, Proof, Return, Section

_CALLS = -1000  # from `listen` to `calls`, in ports
SECRET_ENV = "KVRETURN_SECRET"  # noqa: S105 - the name of a variable, not a secret


class ConfigError(Exception):
    """A configuration that cannot be used; the message has one line per problem, with file and line number."""


class Model(Section):
    """What differs for one model."""

    proof: Proof | None = Field(None, description="As the top-level `proof`, for this model.")
    return_: Return | None = Field(None, alias="return", description="As the top-level `return`, for this model.")


class Settings(Section):
    """Everything one router needs to know."""

    listen: Listen = Field(
        "127.0.0.1:9090", description="Where Envoy reaches the ext_proc server: `host:port` or `unix:/path`."
    )
    calls: Listen | None = Field(
        None,
        description="Where Envoy's scripts reach the router in the fast lane, over HTTP (docs/lanes.md): `host:port` "
        "or `unix:/path`. Unset: 1000 ports below `listen` (above it, where there are not as many), or `PATH.calls`. "
        "Other routers have theirs as far from their `listen`: set it in the files of all of them, or in none.",
    )
    admin: Address | None = Field(
        "127.0.0.1:9091",
        description="Metrics, health, a page that shows what goes on, and the end of conversations (docs/admin.md); "
        "null for none. Keep it off public networks.",
    )
    workers: Count = Field(
        1,
        description="Processes of `kvreturn serve`, each good for one core. Each next one listens two ports further "
        "on, `calls` and `admin` too (a Unix socket: `PATH.1`). More than one need `store.url` (docs/operations.md).",
    )
    pools: Pools
    prefill: Prefill = Prefill()
    store: Store = Store()
    proof: Proof = Field(
        "connector",
        description="What proves that the decode node's blocks are the new prompt's prefix. `connector`: the kvreturn "
        "connector on both nodes; the handle is sealed, so that a stock prefill node ignores it. `router`: connector "
        "on the decode node, stock prefill node with `bidirectional_kv_xfer`; the router compares tokens from the "
        "prefill node's `/tokenize`. `trusted`: no proof, equal messages only; see the README before you use it. "
        "`off`: no handle is ever attached.",
    )
    return_: Return = Field(
        "lazy",
        alias="return",
        description="How a turn's KV goes back. `lazy`: the decode node keeps it until the next turn, and the prefill "
        "node reads it then. `eager`: the prefill node reads it right after the turn, into its prefix cache. `auto`: "
        "decided turn by turn (docs/return.md). With `proof: off`, `auto` means `eager`: nothing is read lazily there.",
    )
    returns: Returns = Returns()
    models: dict[str, Model] = Field({}, description="Exceptions by model name.")
    secret: SecretStr = Field(
        SecretStr(""),
        description="Key for fingerprints, tenants, digests and handle MACs. All routers need the same; if nodes have "
        f"one, all nodes and the router need the same. Better given as ${SECRET_ENV}. Empty: fingerprints use a random "
        "key of this process.",
    )
    tenant_header: str | None = Field(
        None,
        description="Header that your auth filter sets to the caller's tenant, over whatever the client sent; a turn "
        "without it is refused (403). Unset: tenants are told apart by a keyed hash of the credential, and all who "
        "send none are one tenant.",
    )
    tenant_cache_salt: bool = Field(
        default=False,
        description="Give each tenant's turns a `cache_salt` of their own, made from `secret`, so that the engines' "
        "prefix caches are separate too. A client's own `cache_salt` still tells its requests apart.",
    )
    session_header: str | None = Field(
        None,
        description="Header with the client's session id, looked at before those that known clients send "
        "(docs/identity.md).",
    )
    limits: Limits = Limits()
    breaker: Breaker = Breaker()
    health: Health = Health()
    drain_timeout: Positive = Field(30.0, description="Seconds for which running streams may end after SIGTERM.")
    envoy: Envoy = Envoy()

    @model_validator(mode="after")
    def _workers_share_a_store(self) -> Self:
        if self.workers > 1 and not self.store.url:
            raise ValueError(
                f"workers: {self.workers} processes need a session store that they share. In its own memory each would "
                "find only the turns that it served itself. Set `store.url` to a Redis or Valkey, or `workers: 1`"
            )
        return self

    @model_validator(mode="after")
    def _distinct_ports(self) -> Self:
        for (a, where), (b, there) in itertools.combinations(self.listens().items(), 2):
            if where == there:
                hint = "" if self.calls else " (`calls`, if unset, goes by `listen`)"
                raise ValueError(f"{a} and {b}: both are {where}; give each its own{hint * ('calls' in a + b)}")
        return self

    @model_validator(mode="after")
    def _calls_go_where_listen_does(self) -> Self:
        if self.calls and self.calls.startswith("unix:") != self.listen.startswith("unix:"):
            raise ValueError(f"calls: {self.calls}: it must be a port if `listen` is one, and a Unix socket if that is")
        try:
            called = [self.calls_of(listen) for listen in self.routers()]
        except ValueError as e:
            raise ValueError(f"calls, envoy.routers: {e}") from None
        for both in set(called) & set(self.routers()):
            raise ValueError(
                f"calls, envoy.routers: {both} is where one router listens and another one is called; choose ports "
                "that are further apart, or nearer"
            )
        if self.calls and self.calls != self.calls_of(self.listen):
            raise ValueError(
                f"calls: {self.calls}: with envoy.routers, which have theirs as far from their `listen`, Envoy looks "
                f"for it at {self.calls_of(self.listen)}; take that, or leave it unset"
            )
        return self

    @model_validator(mode="after")
    def _shared_store_has_a_secret(self) -> Self:
        if self.store.url and not self.secret.get_secret_value():
            raise ValueError(
                f"store.url needs `secret` (or ${SECRET_ENV}), the same on all routers: without it, each router looks "
                "for sessions under keys that no other one and no later run of it knows"
            )
        return self

    @model_validator(mode="after")
    def _bootstrap_can_name_nodes(self) -> Self:
        for kind, source in self.pools.sources.items():
            if source.endpoint_slices and self.endpoints == "bootstrap":
                raise ValueError(
                    f"envoy.endpoints: bootstrap does not go with pools.{kind}.endpoint_slices, which Envoy does not "
                    "ask: say `router`, or nothing"
                )
        return self

    @model_validator(mode="after")
    def _salts_are_stable(self) -> Self:
        if self.tenant_cache_salt and not self.secret.get_secret_value():
            raise ValueError(f"tenant_cache_salt needs `secret` (or ${SECRET_ENV}): routers must make the same salts")
        return self

    def worker(self, index: int) -> "Settings":
        """The settings of one of the workers.

        Args:
            index: from 0.

        Raises:
            ValueError: there is no such port.
        """
        return self.model_copy(
            update={
                "listen": shifted(self.listen, index),
                "calls": self.calls and shifted(self.calls, index),
                "admin": self.admin and shifted(self.admin, index),
            }
        )

    def listens(self) -> dict[str, str]:
        """All addresses that the router and Envoy listen on, by what asks for them."""
        found: dict[str, str] = {}
        for i in range(self.workers):
            whose = f" of worker {i}" if i else ""
            found[f"listen{whose}"] = shifted(self.listen, i)
            found[f"calls{whose}"] = self.calls_of(found[f"listen{whose}"])
            if self.admin:
                found[f"admin{whose}"] = shifted(self.admin, i)
        envoy = self.envoy
        found |= {"envoy.listen": envoy.listen, "envoy.prefill_listen": envoy.prefill_listen}
        if envoy.orchestrated:
            found["envoy.orchestrated.prefill_listen"] = envoy.orchestrated.prefill_listen
            found["envoy.orchestrated.decode_listen"] = envoy.orchestrated.decode_listen
        return found | {"envoy.admin": envoy.admin}

    def router_listens(self) -> list[str]:
        """Where the workers of this file listen for Envoy."""
        return [shifted(self.listen, i) for i in range(self.workers)]

    def routers(self) -> list[str]:
        """Where the routers listen that Envoy may call."""
        return self.envoy.routers or self.router_listens()

    @property
    def fast_lane(self) -> bool:
        """Whether Envoy gets the scripts. It must tell the routers apart, of which only one knows a turn."""
        return self.envoy.lane == "fast" and are_told_apart(self.routers())

    def calls_of(self, listen: str) -> str:
        """Where a router that listens there is called by Envoy's scripts.

        Raises:
            ValueError: there is no such port.
        """
        ours = [] if self.envoy.routers else self.router_listens()
        if self.calls and listen in ours:
            return shifted(self.calls, ours.index(listen))
        if listen.startswith("unix:"):
            return f"{listen}.calls"
        told = self.calls and not self.calls.startswith("unix:")
        return moved(listen, _port(self.calls or "") - _port(self.listen) if told else _CALLS)

    @property
    def calls_listen(self) -> str:
        """Where this router listens for Envoy's scripts."""
        return self.calls_of(self.listen)

    def return_for(self, model: str) -> Return:
        """How turns of `model` go back."""
        special = self.models.get(model)
        chosen = (special and special.return_) or self.return_
        return "eager" if chosen == "auto" and self.proof_for(model) == "off" else chosen

    @property
    def any_auto(self) -> bool:
        """Whether some model's turns go back by `auto`."""
        return any(self.return_for(model) == "auto" for model in ("", *self.models))

    @property
    def endpoints(self) -> Literal["router", "bootstrap"]:
        """Who tells Envoy the nodes: its bootstrap, unless they cannot stand there."""
        static = all(source.static for source in self.pools.sources.values())
        return self.envoy.endpoints or ("bootstrap" if static else "router")

    def proof_for(self, model: str) -> Proof:
        """The proof level that applies to `model`."""
        special = self.models.get(model)
        return special.proof if special and special.proof else self.proof


def _port(address: str) -> int:
    return split_address(address)[1]
