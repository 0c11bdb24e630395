"""Envoy's own settings."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kvreturn.settings.types import Address, Listen, Positive, Section


class Orchestrated(Section):
    """Where an orchestrator of yours finds the nodes, with the router in between (docs/roles.md)."""

    prefill_listen: Address = "127.0.0.1:8002"
    decode_listen: Address = "127.0.0.1:8003"


class Envoy(Section):
    """What `kvreturn envoy-config` and `kvreturn up` put into Envoy's bootstrap."""

    listen: Address = Field("127.0.0.1:8000", description="Where clients connect.")
    prefill_listen: Address = Field(
        "127.0.0.1:8001", description="The router's way to prefill nodes; keep it on a loopback address."
    )
    admin: Address = Field("127.0.0.1:9901", description="Envoy's admin port; keep it on a loopback address.")
    routers: list[Listen] = Field(
        [],
        description="Where Envoy finds the routers, each as its own `listen`; they share a store. Empty: the "
        "workers of this file.",
    )
    orchestrated: Orchestrated | None = Field(
        None,
        description="Two more listeners, `prefill_listen` and `decode_listen`, to which an orchestrator of your own "
        "sends the legs of its turns (docs/roles.md). `{}` for 127.0.0.1:8002 and 127.0.0.1:8003.",
    )
    endpoints: Literal["router", "bootstrap"] | None = Field(
        None,
        description="Who tells Envoy the nodes (docs/pools.md). `bootstrap`: they stand in its bootstrap, and it has "
        "them while no router runs too. `router`: a router tells them, and each change at once (EDS). None: `router` "
        "where a pool is discovered, else `bootstrap`.",
    )
    lane: Literal["portable", "fast"] = Field(
        "fast",
        description="How streamed answers pass (docs/lanes.md). `fast`: through a Lua filter in Envoy; the router gets "
        "what it must know in few calls. `portable`: through the router, event by event.",
    )
    request_body_mode: Literal["BUFFERED", "FULL_DUPLEX_STREAMED"] = Field(
        "BUFFERED", description="BUFFERED gave the lowest time to first token for bodies of 100 KB to 1 MB."
    )
    response_body_mode: Literal["STREAMED", "FULL_DUPLEX_STREAMED"] = Field(
        "STREAMED", description="STREAMED fails cleanly when the router dies; FULL_DUPLEX_STREAMED can hang."
    )
    stream_idle_timeout: Positive = Field(300.0, description="Seconds without a byte after which Envoy ends a stream.")
    health_check_path: str = Field("/health", description="Path of vLLM's health check.")

    @model_validator(mode="after")
    def _fast_lane_can_leave(self) -> Self:
        if self.lane == "fast" and "FULL_DUPLEX_STREAMED" in {self.request_body_mode, self.response_body_mode}:
            raise ValueError(
                "lane: fast needs request_body_mode: BUFFERED and response_body_mode: STREAMED, since in full duplex a "
                "response cannot be let go; set these, or lane: portable"
            )
        return self
