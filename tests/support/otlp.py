"""A collector: receives OTLP by gRPC and by HTTP, and keeps what comes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

TRACES, METRICS = "/v1/traces", "/v1/metrics"
_REQUESTS: Mapping[str, Callable[[], Any]] = {
    TRACES: trace_service_pb2.ExportTraceServiceRequest,
    METRICS: metrics_service_pb2.ExportMetricsServiceRequest,
}


@dataclass
class Collector:
    """What has come.

    Attributes:
        spans: in the order of their arrival.
        metrics: by name, the latest.
        resources: attributes of the senders, one for each request.
        delay: seconds that each request takes.
        status: HTTP status of each answer.
    """

    spans: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    resources: list[dict[str, str]] = field(default_factory=list)
    delay: float = 0.0
    status: int = 200
    endpoint: str = ""
    protocol: str = ""

    @property
    def environ(self) -> dict[str, str]:
        """The variables that name it."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol}

    async def take(self, request: Any) -> None:  # noqa: ANN401 - generated
        await asyncio.sleep(self.delay)
        if self.status != 200:
            return
        for resource in getattr(request, "resource_spans", ()):
            self.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        for resource in getattr(request, "resource_metrics", ()):
            self.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
            self.metrics |= {m.name: m for scope in resource.scope_metrics for m in scope.metrics}

    async def until(self, done: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait for something to have come."""
        async with asyncio.timeout(seconds):
            while not done():  # noqa: ASYNC110 - it comes by many ways
                await asyncio.sleep(0.02)


def attributes(span: Any) -> dict[str, Any]:  # noqa: ANN401 - generated
    """A span's attributes as Python has them."""
    return {a.key: _value(a.value) for a in span.attributes}


def _value(value: Any) -> Any:  # noqa: ANN401 - generated
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextlib.asynccontextmanager
async def collector(protocol: str) -> AsyncIterator[Collector]:
    """A collector that listens.

    Args:
        protocol: `grpc` or `http/protobuf`.
    """
    receiver = Collector(protocol=protocol)
    async with _grpc(receiver) if protocol == "grpc" else _http(receiver) as port:
        receiver.endpoint = f"http://127.0.0.1:{port}"
        yield receiver


@contextlib.asynccontextmanager
async def _grpc(receiver: Collector) -> AsyncIterator[int]:
    class Service:
        async def Export(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802 - generated
            del context
            await receiver.take(request)
            traces = isinstance(request, trace_service_pb2.ExportTraceServiceRequest)
            return (
                trace_service_pb2.ExportTraceServiceResponse()
                if traces
                else metrics_service_pb2.ExportMetricsServiceResponse()
            )

    server = grpc.aio.server()
    add_traces: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_metrics: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_traces(Service(), server)
    add_metrics(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def _http(receiver: Collector) -> AsyncIterator[int]:
    async def export(request: web.Request) -> web.Response:
        message = _REQUESTS[request.path]()
        body = await request.read()
        message.ParseFromString(body)
        await receiver.take(message)
        return web.Response(status=receiver.status, content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post(TRACES, export)
    app.router.add_post(METRICS, export)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
