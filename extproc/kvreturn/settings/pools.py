"""Which vLLM nodes there are, or who tells."""

from typing import Annotated, Self

from pydantic import Field, PlainValidator, TypeAdapter, model_validator

from kvreturn.settings.types import Address, Count, Positive, Section


class EndpointSlices(Section):
    """A Kubernetes Service whose endpoints are the nodes, asked for at the Kubernetes API."""

    service: str = Field(min_length=1, description="Name of the Service.")
    port: int | str = Field(description="Number or name of the port, as the EndpointSlices have it.")
    namespace: str | None = Field(None, description="Of the Service. None: the one of this pod.")
    server: str | None = Field(
        None, pattern="^https?://", description="URL of the API server. None: the one of the cluster of this pod."
    )
    token_file: str | None = Field(
        None, description="File with a bearer token, read again for each request. None: this pod's, if `server` is."
    )
    ca_file: str | None = Field(
        None, description="File with the API server's CA certificates. None: this pod's, if `server` is."
    )


class Source(Section):
    """Nodes of one kind: a list of them, or who tells."""

    static: list[Address] = Field([], description="`host:port` of each.")
    dns: Address | None = Field(None, description="`name:port`: all addresses of the name.")
    endpoint_slices: EndpointSlices | None = Field(None, description="A Kubernetes Service.")
    interval: Positive = Field(5.0, description="Seconds between two looks at DNS.")
    ranks: Count = Field(1, description="Engines behind each address (vLLM's `--data-parallel-size`).")

    @property
    def listed(self) -> list[str]:
        """What Envoy can have in its bootstrap: addresses and names."""
        return [self.dns] if self.dns else self.static

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(map(bool, (self.static, self.dns, self.endpoint_slices))) != 1:
            raise ValueError("give one of `static`, `dns` and `endpoint_slices`, or just a list of `host:port`")
        return self


_LIST: TypeAdapter[list[str]] = TypeAdapter(Annotated[list[Address], Field(min_length=1)])


def _nodes(value: object) -> list[str] | Source:
    # A union would name its members in the place of an error.
    return Source.model_validate(value) if isinstance(value, dict | Source) else _LIST.validate_python(value)


Nodes = Annotated[list[str] | Source, PlainValidator(_nodes)]


class Pools(Section):
    """The vLLM nodes: for each kind a list, or who tells (docs/pools.md)."""

    prefill: Nodes = Field(
        description="Prefill nodes: a list, `host:port` of the OpenAI server of each; or `{dns: name:port, interval: "
        "5}`; or `{endpoint_slices: {service: NAME, port: PORT, namespace: NAMESPACE}}`; or `{static: [...]}`. "
        "Mappings take `ranks: N` where N engines are behind each address.",
    )
    decode: Nodes = Field(description="Decode nodes, in the same way.")

    @property
    def sources(self) -> dict[str, Source]:
        """By kind."""
        return {"prefill": _source(self.prefill), "decode": _source(self.decode)}


def _source(nodes: list[str] | Source) -> Source:
    return nodes if isinstance(nodes, Source) else Source(static=nodes)
