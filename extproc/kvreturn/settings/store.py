"""The session store."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr

from kvreturn.settings.types import Count, Positive, Section
from kvreturn.store.url import parse_store_url

STORE_URL_ENV = "KVRETURN_STORE_URL"
STORE_KEY_ENV = "KVRETURN_STORE_ENCRYPTION_KEY"


def _store_url(value: SecretStr) -> SecretStr:
    parse_store_url(value.get_secret_value())
    return value


class Store(Section):
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
    on_last_exit: Literal["keep", "free"] = Field(
        "keep",
        description="What the last router does with the handles in Redis when it stops; the same on all routers. "
        "`keep`: they stay for those that come, until their TTL. `free`: the decode nodes free the blocks at once, "
        "for shutting down all. (What is in a process's memory is always freed.)",
    )
    breaker_failures: Count = Field(5, description="So many store calls that fail in a row stop further ones.")
    breaker_probe: Positive = Field(
        0.5, description="Seconds after which a store that failed is asked in the background whether it is back."
    )
