"""`kvreturn serve`."""

import asyncio
import logging
import sys
from pathlib import Path

import click

from kvreturn.cli.options import log_format
from kvreturn.config import ConfigError, Settings
from kvreturn.config_file import load_settings
from kvreturn.server.app import ListenError, serve
from kvreturn.telemetry.environment import TelemetryError
from kvreturn.telemetry.logs import Format, configure

log = logging.getLogger("kvreturn")


def read_settings(path: Path) -> Settings:
    """Settings from a file, or the end of the program with what is wrong in them."""
    try:
        return load_settings(path)
    except ConfigError as e:
        raise click.ClickException(str(e)) from None


@click.command()
@click.option(
    "--config", "path", type=click.Path(path_type=Path), default="kvreturn.yaml", show_default=True, help="Settings."
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@log_format
def command(path: Path, log_level: str, log_format: Format) -> None:
    """Run the ext_proc server that Envoy calls, until SIGTERM."""
    settings = read_settings(path)
    configure(log_format, log_level)
    if not settings.secret.get_secret_value():
        log.warning("no secret is configured: fingerprints use a key of this process, so a restart forgets all turns")
    if settings.tenant_header is None:
        log.warning(
            "no tenant_header is configured: tenants are told apart by their credential, and callers without one "
            "count as one tenant"
        )
    if not sys.flags.hash_randomization:
        log.warning("PYTHONHASHSEED=0: clients can choose member names that make dictionaries slow; unset it")
    try:
        asyncio.run(serve(settings))
    except (ListenError, TelemetryError) as e:
        raise click.ClickException(str(e)) from None
