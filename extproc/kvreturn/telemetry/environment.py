"""What the standard OTEL_* variables ask for."""

from collections.abc import Collection, Mapping
from typing import Literal

Signal = Literal["TRACES", "METRICS"]
PROTOCOLS = ("grpc", "http/protobuf")


class TelemetryError(Exception):
    """The OTEL_* variables ask for what is not there; the message says what to do."""


def exporter(signal: Signal, environ: Mapping[str, str], known: Collection[str]) -> str:
    """Which exporter a signal has: one of `known`, or `none`.

    Unlike the specification's, our default is `none` unless an endpoint is given: nobody should look for a collector
    that is not there.

    Raises:
        TelemetryError: an exporter that is not known.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "none"
    name = environ.get(f"OTEL_{signal}_EXPORTER", "").strip().lower()
    if not name:
        told = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        return "otlp" if any(environ.get(n) for n in told) else "none"
    if name not in {*known, "none"}:
        raise TelemetryError(f"OTEL_{signal}_EXPORTER={name}: give {', '.join(known)} or none")
    return name


def protocol(signal: Signal, environ: Mapping[str, str]) -> str:
    """Which protocol OTLP goes by: one of `PROTOCOLS`.

    Raises:
        TelemetryError: one that is not known.
    """
    told = (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((environ[n] for n in told if environ.get(n)), "http/protobuf")
    if name not in PROTOCOLS:
        raise TelemetryError(f"OTEL_EXPORTER_OTLP_PROTOCOL={name}: give {' or '.join(PROTOCOLS)}")
    return name


def missing(error: ImportError) -> TelemetryError:
    """OTLP is asked for, and its exporters are not installed."""
    return TelemetryError(f"OTLP needs its exporters: pip install '.[otlp]' ({error.name} is missing)")
