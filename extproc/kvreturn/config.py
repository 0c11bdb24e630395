"""The settings model."""

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)

from kvreturn.core.address import split_address
from kvreturn.store.url import parse_store_url

SECRET_ENV = "KVRETURN_SECRET"  # noqa: S105 - the name of a variable, not a secret
STORE_URL_ENV = "KVRETURN_STORE_URL"
STORE_KEY_ENV = "KVRETURN_STORE_ENCRYPTION_KEY"


class ConfigError(Exception):
    """A configuration that cannot be used; the message has one line per problem, with file and line number."""


def _address(value: str) -> str:
    if "://" in value:
        raise ValueError(f"{value!r}: write host:port, without a scheme")
    split_address(value)
    return value


def _listen(value: str) -> str:
    return value if value.startswith("unix:/") else _address(value)


def _store_url(value: SecretStr) -> SecretStr:
    parse_store_url(value.get_secret_value())
    return value


Address = Annotated[str, AfterValidator(_address), Field(examples=["10.0.0.7:8000", "[fd00::7]:8000"])]
Listen = Annotated[str, AfterValidator(_listen)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Proof = Annotated[
    Literal["connector", "router", "trusted", "off"],
    BeforeValidator(lambda value: "off" if value is False else value),  # YAML 1.1 reads a bare `off` as false
]


Return = Literal["lazy", "eager", "auto"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pools(_Model):
    """The vLLM nodes."""

    prefill: list[Address] = Field(min_length=1, description="Prefill nodes, `host:port` of their OpenAI server.")
    decode: list[Address] = Field(min_length=1, description="Decode nodes, `host:port` of their OpenAI server.")


class Prefill(_Model):
    """The prefill leg."""

    via: Literal["envoy", "direct"] = Field(
        "envoy",
        description="`envoy`: through the loopback prefill listener, so that mTLS, circuit breaking, access logs and "
        "tracing apply. `direct`: the router connects to the node itself.",
    )
    timeout: Positive = Field(60.0, description="Seconds for the whole leg, its one cold retry included.")
    on_failure: Literal["fallback", "error"] = Field(
        "fallback",
        description="When prefill failed twice: `fallback` lets the decode node do the turn alone, `error` answers 502 "
        "or 504.",
    )

    pass_token_ids: bool = Field(
        default=True,
        description="Have the prefill node tell the decode node the token ids of a text chat's prompt: it need not "
        "tokenize again, and both mean the same prompt even if the template puts in the time of day.",
    )


class Store(_Model):
    """The session store."""

    ttl: Positive = Field(
        450.0,
        description="Seconds for which a handle may be used. Keep it below vLLM's `decoder_kv_blocks_ttl` (default "
        "480) by more than the 5 s margin within which a prefill node declines a read.",
    )
    max_entries: Count = Field(
        100_000, description="Upper bound of handles in this process's memory; the oldest go first."
    )
    max_bytes: Count = Field(
        1 << 30, description="Upper bound of bytes of handles in this process's memory; the oldest go first."
    )
    deadline: Positive = Field(0.02, description="Seconds a store call may take before the turn goes on without it.")
    url: Annotated[SecretStr, AfterValidator(_store_url)] | None = Field(
        None,
        description="Redis 7.0+ or Valkey, which several routers share and which outlives them: "
        "`redis://user:password@host:6379/0`, `unix:///path`, `redis+sentinel://host1,host2/SERVICE`, "
        "`redis+cluster://host1,host2`; `rediss` is TLS, with `?ssl_ca_certs=PATH`, `ssl_certfile` and `ssl_keyfile`. "
        f"Better given as ${STORE_URL_ENV}. Needs `secret` and `pip install '.[redis]'`. None: the memory of "
        "this process.",
    )
    encryption_key: SecretStr = Field(
        SecretStr(""),
        description="What records in Redis are encrypted with (AES-256-GCM), the same on all routers. Better given as "
        f"${STORE_KEY_ENV}. Empty: a key made from `secret`, which the nodes may know too.",
    )
    connect_timeout: Positive = Field(
        1.0, description="Seconds to connect to Redis in the background; a turn waits for `deadline` at most."
    )
    pool_size: Count = Field(32, description="Store calls at a time, and connections to each Redis server.")
    max_record_bytes: Count = Field(1 << 20, description="Largest record that goes to Redis.")
    breaker_failures: Count = Field(5, description="So many store calls that fail in a row stop further ones.")
    breaker_probe: Positive = Field(
        0.5, description="Seconds after which a store that failed is asked in the background whether it is back."
    )


class Returns(_Model):
    """Eager return: reading back right after a turn, before the next one asks."""

    concurrency: Count = Field(2, description="Returns that one prefill node runs at a time.")
    queue: Count = Field(1_000, description="Returns that may wait; beyond it, turns stay lazy.")
    per_tenant: Count = Field(100, description="Returns of one tenant that may wait or run.")
    max_tokens: Count = Field(262_144, description="Longer conversations stay lazy.")
    prefill_load: Count = Field(
        32_768, description="A return waits while the prefill node has more tokens of clients' prompts before it."
    )
    rate: Positive | None = Field(
        None, description="Tokens per second that go back to one prefill node, on average; none for no bound."
    )
    patience: Positive = Field(5.0, description="Seconds for which a return waits for its turn; then it stays lazy.")
    deadline: Positive = Field(30.0, description="Seconds that a return may take.")
    wait: Positive = Field(
        2.0, description="Seconds that the next turn waits for a return that is under way, before it goes on without."
    )
    ttl: Positive = Field(
        3600.0, description="Seconds for which the router remembers which prefill node a conversation went back to."
    )
    pressure_interval: Positive = Field(
        2.0, description="Seconds between two looks at each node's `/metrics`, for `return: auto`."
    )
    priority: int | None = Field(
        None,
        description="vLLM's `priority` for returns (higher is later), for prefill nodes with `--scheduling-policy "
        "priority`.",
    )


class Model(_Model):
    """What differs for one model."""

    proof: Proof | None = Field(None, description="As the top-level `proof`, for this model.")
    return_: Return | None = Field(None, alias="return", description="As the top-level `return`, for this model.")


class Limits(_Model):
    """Upper bounds."""

    request_bytes: Count = Field(32 << 20, description="Largest request body; beyond it the client gets 413.")
    event_bytes: Count = Field(
        4 << 20,
        description="Largest response event that is parsed. A larger one is passed on as it comes, without its handle.",
    )
    response_bytes: Count = Field(16 << 20, description="As `event_bytes`, for a JSON response body.")
    header_bytes: Annotated[int, Field(ge=1024, le=8 << 20)] = Field(
        56 << 10, description="Largest request headers, names and values together; beyond it the client gets 431."
    )
    history: Count = Field(50_000, description="Messages or input items of the longest request; beyond it, 413.")
    live_turns: Count = Field(10_000, description="Turns at a time; beyond it the client gets 503.")
    live_turns_per_tenant: Count = Field(1_000, description="Turns of one tenant at a time; beyond it, 429.")
    sessions_per_tenant: Count = Field(
        10_000,
        description="Turns of one tenant that may wait for their continuation, as far as one router knows; beyond it "
        "that tenant's oldest goes (outcome `over_limit`).",
    )
    min_tokens: Annotated[int, Field(ge=0)] = Field(
        64, description="Handles for fewer tokens are not attached (vLLM's `kv_recompute_threshold`, same default)."
    )


class Breaker(_Model):
    """Stops attaching the handles of a decode engine whose reads fail (field report 83)."""

    failures: Count = Field(5, description="So many failed reads of one engine's handles within `window` open it.")
    window: Positive = Field(60.0, description="Seconds over which failures count, and for which it stays open.")


class Envoy(_Model):
    """What `kvreturn envoy-config` and `kvreturn up` put into Envoy's bootstrap."""

    listen: Address = Field("127.0.0.1:8000", description="Where clients connect.")
    prefill_listen: Address = Field(
        "127.0.0.1:8001", description="The router's way to prefill nodes; keep it on a loopback address."
    )
    admin: Address = Field("127.0.0.1:9901", description="Envoy's admin port; keep it on a loopback address.")
    request_body_mode: Literal["BUFFERED", "FULL_DUPLEX_STREAMED"] = Field(
        "BUFFERED", description="BUFFERED gave the lowest time to first token for bodies of 100 KB to 1 MB."
    )
    response_body_mode: Literal["STREAMED", "FULL_DUPLEX_STREAMED"] = Field(
        "STREAMED", description="STREAMED fails cleanly when the router dies; FULL_DUPLEX_STREAMED can hang."
    )
    stream_idle_timeout: Positive = Field(300.0, description="Seconds without a byte after which Envoy ends a stream.")
    health_check_path: str = Field("/health", description="Path of vLLM's health check.")


class Settings(_Model):
    """Everything one router needs to know."""

    listen: Listen = Field(
        "127.0.0.1:9090", description="Where Envoy reaches the ext_proc server: `host:port` or `unix:/path`."
    )
    admin: Address | None = Field(
        "127.0.0.1:9091", description="Metrics and health over HTTP; null for none. Keep it off public networks."
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
    drain_timeout: Positive = Field(30.0, description="Seconds for which running streams may end after SIGTERM.")
    envoy: Envoy = Envoy()

    @model_validator(mode="after")
    def _distinct_ports(self) -> Self:
        listens = [self.listen, self.envoy.listen, self.envoy.prefill_listen, self.envoy.admin, self.admin]
        taken = [a for a in listens if a]
        if len(set(taken)) < len(taken):
            raise ValueError("listen, admin, envoy.listen, envoy.prefill_listen and envoy.admin must all differ")
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
    def _salts_are_stable(self) -> Self:
        if self.tenant_cache_salt and not self.secret.get_secret_value():
            raise ValueError(f"tenant_cache_salt needs `secret` (or ${SECRET_ENV}): routers must make the same salts")
        return self

    def return_for(self, model: str) -> Return:
        """How turns of `model` go back."""
        special = self.models.get(model)
        chosen = (special and special.return_) or self.return_
        return "eager" if chosen == "auto" and self.proof_for(model) == "off" else chosen

    @property
    def any_auto(self) -> bool:
        """Whether some model's turns go back by `auto`."""
        return any(self.return_for(model) == "auto" for model in ("", *self.models))

    def proof_for(self, model: str) -> Proof:
        """The proof level that applies to `model`."""
        special = self.models.get(model)
        return special.proof if special and special.proof else self.proof
