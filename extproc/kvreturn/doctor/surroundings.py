"""What is around the router on this machine: telemetry, transports, the environment."""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from kvreturn.config import Settings
from kvreturn.doctor.context import Context
from kvreturn.doctor.flags import Flags
from kvreturn.doctor.model import Finding, fail, ok, skipped, warn
from kvreturn.telemetry.environment import TelemetryError
from kvreturn.telemetry.tracing import Tracing

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_LOCAL_OTLP = "http://localhost:4317"
_EFA = {"LIBFABRIC", "OFI"}  # NIXL backends that reach EFA


def check_settings(settings: Settings, environ: Mapping[str, str]) -> list[Finding]:
    """What in the settings and in the environment deserves a second thought."""
    findings = []
    if settings.tenant_header is None:
        what = "no tenant_header: tenants are told apart by credential, and callers without one are one tenant"
        findings.append(ok("config.tenants", what))
    else:
        findings.append(ok("config.tenants", f"by the header {settings.tenant_header}"))
    if environ.get("PYTHONHASHSEED", "random") == "0" or not sys.flags.hash_randomization:
        what = "PYTHONHASHSEED=0 in this environment: clients could choose member names that make the router slow"
        findings.append(warn("config.hash_seed", what, "unset it for the router"))
    return findings


async def check_otlp(ctx: Context) -> list[Finding]:
    """Whether somebody listens where the OTEL_* variables of this process send traces."""
    check, environ = "otlp", ctx.environ
    try:
        tracing = await asyncio.to_thread(Tracing.from_environ, environ)
    except TelemetryError as e:
        return [
            fail(
                check,
                str(e),
                "correct the OTEL_* variables, or run pip install '.[otlp]' in kvreturn's source folder",
            )
        ]
    on = tracing.on
    stop = asyncio.create_task(asyncio.to_thread(tracing.shutdown))
    try:
        endpoint = next((environ[name] for name in _ENDPOINTS if environ.get(name)), _LOCAL_OTLP)
        if not on or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() not in {"otlp", ""}:
            return [skipped(check, "the OTEL_* variables of this environment ask for no OTLP")]
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 4317)
        except ValueError:
            return [fail(check, f"{endpoint} is no endpoint", "write it as http://host:4317")]
        error = await ctx.connects(parts.hostname or "localhost", port)
        if error:
            what = f"{parts.hostname}:{port}: {error}; turns are not affected, their traces are lost"
            return [warn(check, what, "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT")]
        return [ok(check, f"{parts.hostname}:{port} accepts connections")]
    finally:
        await stop


async def check_fabric(nodes: Sequence[Flags], seconds: float, environ: Mapping[str, str]) -> list[Finding]:
    """Where EFA is meant, whether this machine has it. It says nothing of others."""
    check = "transport.efa"
    meant = [n for n in nodes if n.backends and _EFA & {b.upper() for b in n.backends}]
    if not meant and environ.get("FI_PROVIDER") != "efa":
        return []
    names = ", ".join(n.source for n in meant)
    tool = shutil.which("fi_info", path=environ.get("PATH"))
    if tool is None:
        return [skipped(check, "no fi_info here", names, "run `fi_info -p efa` on each node: it must list a provider")]
    process = await asyncio.create_subprocess_exec(
        tool, "-p", "efa", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(seconds):
            out, _ = await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return [warn(check, f"fi_info did not end within {seconds:g} s", "run `fi_info -p efa` on each node", names)]
    if process.returncode == 0 and b"provider: efa" in out:
        return [ok(check, "this machine has EFA; ask the others too", names)]
    what = "fi_info lists no EFA on this machine: libfabric falls back to TCP"
    remedy = "on a node: install the EFA driver, and give the container the device (vpc.amazonaws.com/efa)"
    return [warn(check, what, remedy, names)]
