"""One OpenTelemetry trace per turn, set up by the standard OTEL_* variables.

A turn's span is a child of the `traceparent` that came with the request. The spans of the two legs are passed on, so
that the nodes' own spans join. Exporting happens in a thread of the SDK's: an exporter that is slow or dead costs no
turn anything but its trace. Spans hold counts and words, never contents, ids of persons, or addresses of handles: so
they take no exceptions either, whose texts nobody vouches for.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracer,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from kvreturn.telemetry import environment
from kvreturn.telemetry.genai import OPERATIONS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_W3C = TraceContextTextMapPropagator()
_NAME = "kvreturn"


class Tracing:
    """Makes spans, if the environment asks for traces.

    Args:
        provider: of spans; None makes none.
    """

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer(_NAME) if provider else NoOpTracer()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """By OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER (`otlp`, `console`, `none`), OTEL_EXPORTER_OTLP_*, and the rest.

        What is not named here the SDK reads by itself: sampler, limits, batches, resource, endpoint, headers, TLS.

        Raises:
            TelemetryError: an exporter that we do not know, or that is not installed; a number that cannot be.
        """
        exporter = environment.exporter("TRACES", environ, ("otlp", "console"))
        if exporter == "none":
            return cls()
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - takes 0.1 s, and only traces need it
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        sender = _exporter(exporter, environ)
        try:
            provider = TracerProvider(resource=Resource.create(environment.resource(environ)), shutdown_on_exit=False)
            provider.add_span_processor(BatchSpanProcessor(sender))
        except ValueError as e:
            raise environment.TelemetryError(f"OTEL_SPAN_*, OTEL_ATTRIBUTE_* or OTEL_BSP_*: {e}") from None
        return cls(provider)

    @property
    def on(self) -> bool:
        """Whether there are traces at all."""
        return self._provider is not None

    def turn(self, api: str, headers: Mapping[str, str]) -> "TurnTrace":
        """The trace of a turn that begins.

        Args:
            api: name of the adapter.
            headers: of the request.
        """
        operation = OPERATIONS.get(api, api)
        root = self._tracer.start_span(
            operation,
            _W3C.extract(headers),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "gen_ai.provider.name": "vllm", "kvreturn.api": api},
        )
        return TurnTrace(self._tracer, root)

    def after(self, trace: str | None, name: str, attributes: Attributes = None) -> Span:
        """A span of what goes on after the end of a turn.

        Args:
            trace: the turn's, as `TurnTrace.name` gave it.
            name: of the span.
            attributes: of the span.
        """
        context = _context(trace)
        return self._tracer.start_span(name, context, SpanKind.CLIENT, attributes) if context else INVALID_SPAN

    def shutdown(self) -> None:
        """Export what is left. May take as long as the exporter's timeout, so call it in a thread."""
        if self._provider:
            self._provider.shutdown()


class TurnTrace:
    """The spans of one turn.

    Args:
        tracer: makes them.
        root: the turn's own.
    """

    def __init__(self, tracer: Tracer, root: Span) -> None:
        self._tracer = tracer
        self._root = root
        self._inside = set_span_in_context(root, Context())
        self._decode: Span | None = None

    @property
    def on(self) -> bool:
        """Whether somebody will see it."""
        return self._root.is_recording()

    @property
    def context(self) -> SpanContext:
        """Ids of the turn's span; without tracing, of the caller's, which may be invalid."""
        return self._root.get_span_context()

    @property
    def name(self) -> str | None:
        """What the next turn links to: a W3C `traceparent`. None if this turn leaves no trace."""
        return headers_of(self._root).get("traceparent") if self.on else None

    def follows(self, trace: str | None) -> None:
        """Link to the turn whose handle this one uses: so a conversation can be walked."""
        context = _context(trace)
        if context:
            self._root.add_link(get_current_span(context).get_span_context(), {"kvreturn.link": "previous_turn"})

    @contextmanager
    def step(self, name: str, kind: SpanKind = SpanKind.INTERNAL) -> Iterator[Span]:
        """The span of a step. It is in no context of the running task: a stream may be closed from another one."""
        span = self._tracer.start_span(name, self._inside, kind)
        try:
            yield span
        except Exception as e:
            fail(span, type(e).__name__)
            raise
        finally:
            span.end()

    def decode(self) -> Mapping[str, str]:
        """The decode leg begins, if it has not yet. Returns the headers that make D's spans its children."""
        if self._decode is None:
            self._decode = self._tracer.start_span("decode", self._inside, SpanKind.CLIENT)
        return headers_of(self._decode)

    def responded(self, status: int) -> None:
        """The decode node's headers are here."""
        if self._decode:
            self._decode.set_attribute("http.response.status_code", status)

    def event(self, name: str, late: float = 0.0) -> None:
        """Something happened in the decode leg, so many seconds ago."""
        if self._decode:
            self._decode.add_event(name, timestamp=time.time_ns() - int(late * 1e9))

    def end(self, title: str, attributes: Attributes, error: str | None = None) -> None:
        """The turn is over.

        Args:
            title: the model's name, if it is one.
            attributes: what became of the turn.
            error: type or code of what the client got in place of an answer.
        """
        if self._decode:
            if error:
                fail(self._decode, error)
            self._decode.end()
        self._root.set_attributes(attributes or {})
        if title:
            self._root.set_attribute("gen_ai.request.model", title)
            self._root.update_name(f"{getattr(self._root, 'name', 'chat')} {title}")
        if error:
            fail(self._root, error)
        self._root.end()


def fail(span: Span, error: str) -> None:
    """What the span stands for failed.

    Args:
        span: the span.
        error: status code or one word.
    """
    span.set_attribute("error.type", error)
    span.set_status(Status(StatusCode.ERROR))


def headers_of(span: Span) -> Mapping[str, str]:
    """The W3C headers that make others' spans children of this one; none for a span that is not recorded."""
    headers: dict[str, str] = {}
    _W3C.inject(headers, set_span_in_context(span, Context()))
    return headers


def _context(trace: str | None) -> Context | None:
    return _W3C.extract({"traceparent": trace}, Context()) if trace else None


def _exporter(name: str, environ: Mapping[str, str]) -> "SpanExporter":
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415 - as above

    if name == "console":
        return ConsoleSpanExporter()
    grpc = environment.protocol("TRACES", environ) == "grpc"
    try:
        if grpc:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415 - an extra
                OTLPSpanExporter as GrpcExporter,
            )

            return GrpcExporter()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra

        return OTLPSpanExporter()
    except ImportError as e:
        raise environment.missing(e) from e
