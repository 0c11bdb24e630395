"""Metrics by OTLP: what the Prometheus registry holds, sent every now and then.

Counted is in one place only, so the two ways cannot differ and a turn pays once. Values are collected in the event
loop, whose objects they come from, and sent by a thread: an exporter that is slow or dead misses a round, and since all
sums are cumulative the next one says all.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Self

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvreturn import __version__
from kvreturn.telemetry import environment
from kvreturn.telemetry.instruments import Instrument, Instruments

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.samples import Sample

log = logging.getLogger("kvreturn")
_CUMULATIVE = AggregationTemporality.CUMULATIVE
_INTERVAL = 60_000.0  # ms, as the specification has it
_TIMEOUT = 30_000.0


class MetricsExport:
    """Sends metrics for as long as it runs. Use as an async context manager.

    Args:
        instruments: what is sent.
        exporter: sends it.
        resource: whose they are.
        interval: seconds between two rounds.
        timeout: seconds that one may take.
    """

    def __init__(
        self,
        instruments: Instruments,
        exporter: "MetricExporter",
        resource: Resource,
        *,
        interval: float = _INTERVAL / 1e3,
        timeout: float = _TIMEOUT / 1e3,
    ) -> None:
        self._instruments = instruments
        self._exporter = exporter
        self._resource = resource
        self._interval = interval
        self._timeout = timeout
        self._begun = time.time_ns()
        self._rounds: queue.SimpleQueue[MetricsData | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="kvreturn-metrics", daemon=True)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def from_environ(cls, instruments: Instruments, environ: Mapping[str, str]) -> Self:
        """To where OTEL_EXPORTER_OTLP_* says, as often as OTEL_METRIC_EXPORT_INTERVAL does. Always cumulative.

        Raises:
            TelemetryError: the exporter is not installed; a number that is none.
        """
        return cls(
            instruments,
            _exporter(environ),
            Resource.create(environment.resource(environ)),
            interval=environment.milliseconds("OTEL_METRIC_EXPORT_INTERVAL", environ, _INTERVAL),
            timeout=environment.milliseconds("OTEL_METRIC_EXPORT_TIMEOUT", environ, _TIMEOUT),
        )

    async def __aenter__(self) -> Self:
        """Begin."""
        self._thread.start()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send once more, which goes on in the thread: `join` waits for it."""
        assert self._task
        self._task.cancel()
        await asyncio.wait([self._task])
        self._offer()
        self._rounds.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the last round. Blocks."""
        self._thread.join(seconds)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self._offer()

    def _offer(self) -> None:
        """Hand a round over, unless one still waits."""
        if self._rounds.empty():
            self._rounds.put(self.collect())

    def _send(self) -> None:
        while (data := self._rounds.get()) is not None:
            try:
                self._exporter.export(data, self._timeout * 1e3)
            except Exception:  # whatever an exporter does, the next round may do better
                log.exception("metrics could not be exported")
        self._exporter.shutdown()

    def collect(self) -> MetricsData:
        """All metrics as they are now."""
        now = time.time_ns()
        known = ((self._instruments.all.get(f.name), f) for f in self._instruments.registry.collect())
        metrics = [self._metric(instrument, family, now) for instrument, family in known if instrument]
        scope = InstrumentationScope("kvreturn", __version__)
        resource = ResourceMetrics(self._resource, [ScopeMetrics(scope, metrics, "")], "")
        return MetricsData([resource])

    def _metric(self, instrument: Instrument, family: "Family", now: int) -> Metric:
        if instrument.kind == "histogram":
            data: Sum | Gauge | Histogram = Histogram(list(self._histograms(family, now)), _CUMULATIVE)
        else:
            points = [NumberDataPoint(s.labels, self._begun, now, float(s.value)) for s in family.samples]
            data = Sum(points, _CUMULATIVE, is_monotonic=True) if instrument.kind == "counter" else Gauge(points)
        return Metric(instrument.otel, instrument.doc, instrument.unit, data)

    def _histograms(self, family: "Family", now: int) -> Iterator[HistogramDataPoint]:
        """Prometheus counts what is at most a bound, OpenTelemetry what lies between two."""
        by_labels: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
        for sample in family.samples:
            labels = tuple((k, v) for k, v in sample.labels.items() if k != "le")
            by_labels.setdefault(labels, []).append(sample)
        for labels, samples in by_labels.items():
            buckets = [s for s in samples if s.name.endswith("_bucket")]
            counts = [int(s.value) for s in buckets]
            yield HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=self._begun,
                time_unix_nano=now,
                count=counts[-1],
                sum=next(s.value for s in samples if s.name.endswith("_sum")),
                bucket_counts=[after - before for before, after in zip([0, *counts], counts, strict=False)],
                explicit_bounds=[float(s.labels["le"]) for s in buckets[:-1]],
                min=None,  # type: ignore[arg-type] # OTLP lets both out, and the SDK's encoder too
                max=None,  # type: ignore[arg-type] # as above
            )


def _exporter(environ: Mapping[str, str]) -> "MetricExporter":
    grpc = environment.protocol("METRICS", environ) == "grpc"
    try:
        if grpc:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (  # noqa: PLC0415 - an extra
                OTLPMetricExporter as GrpcExporter,
            )

            return GrpcExporter()
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415 - an extra
            OTLPMetricExporter,
        )

        return OTLPMetricExporter()
    except ImportError as e:
        raise environment.missing(e) from e
