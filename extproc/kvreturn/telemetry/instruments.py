"""Instruments: made once, in the Prometheus client's registry, which is the one place where anything is counted.

A name is written as OpenTelemetry has it, without the leading `kvreturn.`: dots between parts, a unit at its end where
Prometheus wants one (`store.duration_seconds`). Both conventions' names follow from it:

    store.duration_seconds -> kvreturn_store_duration_seconds, kvreturn.store.duration {s}
    turns (a counter)      -> kvreturn_turns_total,            kvreturn.turns {turn}
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

disable_created_metrics()  # type: ignore[no-untyped-call] # a second series for every counter, which nobody reads
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
Kind = Literal["counter", "gauge", "histogram"]
_UNITS = {"_seconds": "s", "_bytes": "By"}


@dataclass(frozen=True, slots=True)
class Instrument:
    """What an instrument is called, and what it tells.

    Attributes:
        family: name of its family in the Prometheus client, which has no `_total`.
        otel: name in OpenTelemetry.
        unit: UCUM, as OpenTelemetry has it.
        kind: of it.
        doc: one sentence.
        labels: names of its labels.
    """

    family: str
    otel: str
    unit: str
    kind: Kind
    doc: str
    labels: Sequence[str] = ()

    @property
    def prometheus(self) -> str:
        """Name on the `/metrics` page, as queries have it; histograms have `_bucket`, `_sum`, `_count` behind it."""
        return f"{self.family}_total" if self.kind == "counter" else self.family


class Instruments:
    """Makes instruments.

    Attributes:
        registry: where they are.
        all: what they are, by family.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.all: dict[str, Instrument] = {}

    def counter(self, name: str, doc: str, *labels: str, unit: str = "1") -> Counter:
        """A counter; `unit` is what is counted, in braces."""
        return Counter(self._add(name, "counter", doc, labels, unit), doc, labels, registry=self.registry)

    def histogram(self, name: str, doc: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        """A histogram."""
        family = self._add(name, "histogram", doc, labels, "1")
        return Histogram(family, doc, labels, buckets=buckets, registry=self.registry)

    def gauge(self, name: str, doc: str, *labels: str, unit: str = "1") -> Gauge:
        """A gauge that is set."""
        return Gauge(self._add(name, "gauge", doc, labels, unit), doc, labels, registry=self.registry)

    def watch(self, name: str, doc: str, value: Callable[[], float], *, unit: str = "1", total: bool = False) -> None:
        """A gauge whose value is asked for at each scrape; with `total`, a counter that somebody else keeps."""
        family = self._add(name, "counter" if total else "gauge", doc, (), unit)
        self.registry.register(_Watched(family, doc, lambda: {(): value()}, (), total=total))

    def watch_each(
        self, name: str, doc: str, values: Callable[[], Mapping[tuple[str, ...], float]], *labels: str, unit: str = "1"
    ) -> None:
        """As `watch`, with labels: `values` gives a value for each set of theirs."""
        self.registry.register(_Watched(self._add(name, "gauge", doc, labels, unit), doc, values, labels, total=False))

    def _add(self, name: str, kind: Kind, doc: str, labels: Sequence[str], unit: str) -> str:
        suffix = next((s for s in _UNITS if name.endswith(s)), "")
        family = "kvreturn_" + name.replace(".", "_")
        otel = "kvreturn." + name.removesuffix(suffix)
        self.all[family] = Instrument(family, otel, _UNITS.get(suffix, unit), kind, doc, labels)
        return family


class _Watched(Collector):
    """Values that are asked for."""

    def __init__(
        self,
        family: str,
        doc: str,
        values: Callable[[], Mapping[tuple[str, ...], float]],
        labels: Sequence[str],
        *,
        total: bool,
    ) -> None:
        self._family = family
        self._doc = doc
        self._values = values
        self._labels = labels
        self._total = total

    def describe(self) -> Iterator[Metric]:
        """Its name, so that registering it asks for no value yet: what it looks at may not be there."""
        yield self._empty()

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        family = self._empty()
        for labels, value in self._values().items():
            family.add_metric(labels, value)
        yield family

    def _empty(self) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self._total else GaugeMetricFamily
        return kind(self._family, self._doc, labels=self._labels)
