"""What the standard OTEL_* variables ask for."""

import math
import uuid
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal

from kvreturn import __version__
from kvreturn.telemetry.instruments import Instruments

if TYPE_CHECKING:
    from kvreturn.telemetry.otlp import MetricsExport

Signal = Literal["TRACES", "METRICS"]
_INSTANCE = str(uuid.uuid4())  # of this process; workers are no forks of each other
PROTOCOLS = ("grpc", "http/protobuf")


class TelemetryError(Exception):
    """The OTEL_* variables ask for what is not there; the message says what to do."""


def exporter(signal: Signal, environ: Mapping[str, str], known: Collection[str]) -> str:
    """Which exporter a signal has: one of `known`, or `none`; of a list, the first in the order of `known`.

    Unlike the specification's, our default is `none` unless an endpoint is given: nobody should look for a collector
    that is not there.

    Raises:
        TelemetryError: an exporter that is not known.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "none"
    given = environ.get(f"OTEL_{signal}_EXPORTER", "")
    names = [name for name in (part.strip().lower() for part in given.split(",")) if name]
    if not names:
        told = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        return "otlp" if any(environ.get(n) for n in told) else "none"
    if not {*known, "none"}.issuperset(names):
        raise TelemetryError(f"OTEL_{signal}_EXPORTER={given}: give {', '.join(known)} or none")
    return min(names, key=[*known, "none"].index)


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


def resource(environ: Mapping[str, str]) -> dict[str, str]:
    """Attributes of this process, but for those that OTEL_RESOURCE_ATTRIBUTES has. Workers differ by the last one."""
    given = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    own = {"service.name": "kvreturn", "service.version": __version__, "service.instance.id": _INSTANCE}
    named = {"service.name": name} if (name := environ.get("OTEL_SERVICE_NAME")) else {}
    return {k: v for k, v in own.items() if f"{k}=" not in given} | named


def milliseconds(name: str, environ: Mapping[str, str], default: float) -> float:
    """A time that a variable gives in milliseconds, in seconds.

    Raises:
        TelemetryError: no number above 0.
    """
    text = environ.get(name, "").strip() or str(default)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise TelemetryError(f"{name}={text}: give milliseconds above 0")
    return value / 1e3


def missing(error: ImportError) -> TelemetryError:
    """OTLP is asked for, and its exporters are not installed."""
    return TelemetryError(
        f"OTLP needs its exporters: run pip install '.[otlp]' in kvreturn's source folder ({error.name} is missing)"
    )


def metrics_export(instruments: Instruments, environ: Mapping[str, str]) -> "MetricsExport | None":
    """What sends metrics, if OTEL_METRICS_EXPORTER wants `otlp`; `prometheus` is the admin port's page, which is there.

    Raises:
        TelemetryError: an exporter that we do not know, or that is not installed; a number that is none.
    """
    if exporter("METRICS", environ, ("otlp", "prometheus")) != "otlp":
        return None
    from kvreturn.telemetry.otlp import MetricsExport  # noqa: PLC0415 - takes 0.1 s, and only this needs it

    return MetricsExport.from_environ(instruments, environ)
