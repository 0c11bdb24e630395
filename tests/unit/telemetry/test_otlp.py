"""Metrics by OTLP: the same figures as on the Prometheus page, under the names of the other convention."""

import asyncio
import logging
import time
from typing import Any

import pytest

from kvreturn.telemetry.environment import TelemetryError, metrics_export, resource
from kvreturn.telemetry.instruments import Instruments
from kvreturn.telemetry.metrics import Metrics
from support.harness import harness
from support.otlp import Collector, attributes, collector


@pytest.fixture(params=["grpc", "http/protobuf"])
async def receiver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    async with collector(request.param) as there:
        for name, value in there.environ.items():
            monkeypatch.setenv(name, value)
        yield there


async def sent(instruments: Instruments, to: Collector) -> dict[str, Any]:
    """What arrives of these instruments."""
    export = metrics_export(instruments, to.environ)
    assert export
    async with export:
        pass
    await asyncio.to_thread(export.join, 5)
    return to.metrics


def points(metric: Any) -> list[Any]:  # noqa: ANN401 - generated
    return list(getattr(metric, metric.WhichOneof("data")).data_points)


async def test_counters_gauges_and_histograms_arrive_as_what_they_are(receiver: Collector) -> None:
    made = Instruments()
    made.counter("turns", "Turns.", "outcome", unit="{turn}").labels("hit").inc(3)
    made.watch("sessions.size_bytes", "Bytes.", lambda: 70)
    took = made.histogram("store.duration_seconds", "Calls.", "operation", buckets=(0.1, 0.5)).labels("take")
    for seconds in (0.05, 0.06, 0.2, 7.0):
        took.observe(seconds)
    got = await sent(made, receiver)
    assert {m.name: (m.unit, m.description) for m in got.values()} == {
        "kvreturn.turns": ("{turn}", "Turns."),
        "kvreturn.sessions.size": ("By", "Bytes."),
        "kvreturn.store.duration": ("s", "Calls."),
    }
    turns, (size,) = got["kvreturn.turns"].sum, points(got["kvreturn.sessions.size"])
    assert (turns.is_monotonic, turns.aggregation_temporality) == (True, 2)  # cumulative
    assert [(attributes(p), p.as_double, p.start_time_unix_nano > 0) for p in turns.data_points] == [
        ({"outcome": "hit"}, 3, True)
    ]
    assert size.as_double == 70
    (calls,) = points(got["kvreturn.store.duration"])
    assert (attributes(calls), calls.count, list(calls.explicit_bounds)) == ({"operation": "take"}, 4, [0.1, 0.5])
    assert list(calls.bucket_counts) == [2, 1, 1]
    assert calls.sum == pytest.approx(7.31)
    assert not calls.HasField("min")


async def test_all_of_a_routers_metrics_arrive_with_the_values_of_the_page(receiver: Collector) -> None:
    router = harness()
    await router.turn("Hi")
    await router.turn("Hi", "Good morning", "And?")
    metrics = router.world.metrics
    got = await sent(metrics, receiver)
    assert got.keys() == {i.otel for i in metrics.all.values()}
    outcomes = {attributes(p)["outcome"]: p.as_double for p in points(got["kvreturn.turns"])}
    assert outcomes == {"first_turn": 1, "hit": 1}
    (age,) = points(got["kvreturn.handle.age"])
    assert age.count == 1
    assert receiver.resources[-1]["service.name"] == "kvreturn"
    assert len(receiver.resources[-1]["service.instance.id"]) == 36


@pytest.mark.parametrize(
    ("environ", "name", "own"),
    [
        ({}, "kvreturn", True),
        ({"OTEL_SERVICE_NAME": "a"}, "a", True),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=b,service.instance.id=c"}, None, False),
        ({"OTEL_SERVICE_NAME": "a", "OTEL_RESOURCE_ATTRIBUTES": "service.name=b"}, "a", True),
    ],
)
def test_who_we_are_is_ours_to_say_unless_somebody_else_does(
    environ: dict[str, str], name: str | None, *, own: bool
) -> None:
    told = resource(environ)
    assert (told.get("service.name"), "service.instance.id" in told) == (name, own)


async def test_they_come_again_and_again(receiver: Collector) -> None:
    metrics = Metrics()
    export = metrics_export(metrics, {**receiver.environ, "OTEL_METRIC_EXPORT_INTERVAL": "20"})
    assert export
    async with export:
        await receiver.until(lambda: len(receiver.resources) > 2)
        metrics.missing.inc(7)
        await receiver.until(lambda: points(receiver.metrics["kvreturn.handles_missing"])[0].as_double == 7)
    await asyncio.to_thread(export.join, 5)


async def test_fr116_a_slow_collector_misses_rounds_and_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collector("http/protobuf") as slow:
        slow.delay = 1.0
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", slow.endpoint)
        metrics = Metrics()
        export = metrics_export(metrics, {**slow.environ, "OTEL_METRIC_EXPORT_INTERVAL": "10"})
        assert export
        async with export:
            await asyncio.sleep(0.3)
            assert export._rounds.qsize() == 1
            begun = time.monotonic()
        assert time.monotonic() - begun < 0.1
        slow.delay = 0.0
        await asyncio.to_thread(export.join, 5)
        assert len(slow.resources) == 2


async def test_a_collector_that_is_not_there_or_refuses_is_said_in_the_log_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for status in (400, 404):
        async with collector("http/protobuf") as wrong:
            wrong.status = status
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", wrong.endpoint)
            assert await sent(Metrics(), wrong) == {}
    assert [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_METRICS_EXPORTER": "prometheus"}, False),
        ({"OTEL_METRICS_EXPORTER": "prometheus, otlp"}, True),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_the_standard_variables_switch_it_on(environ: dict[str, str], *, on: bool) -> None:
    assert (metrics_export(Metrics(), environ) is not None) is on


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OTEL_METRICS_EXPORTER": "statsd"}, "OTEL_METRICS_EXPORTER=statsd: give otlp, prometheus or none"),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": "soon"}, "INTERVAL=soon: give milliseconds"),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_TIMEOUT": "0"}, "TIMEOUT=0: give milliseconds above 0"),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "x"}, "give grpc or http/protobuf"),
    ],
)
def test_what_is_not_there_is_said(environ: dict[str, str], said: str) -> None:
    with pytest.raises(TelemetryError, match=said):
        metrics_export(Metrics(), environ)
