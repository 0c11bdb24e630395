"""`kvreturn serve`."""

import asyncio
import logging
import signal
import sys
from functools import partial
from pathlib import Path

import click

from kvreturn.cli.options import LoggedError, log_format
from kvreturn.config import ConfigError, Settings
from kvreturn.config_file import load_settings
from kvreturn.server.app import ListenError, check_free, serve
from kvreturn.server.eventloop import run
from kvreturn.server.supervisor import REFUSED, Supervisor, SupervisorError
from kvreturn.store.factory import check_installed
from kvreturn.telemetry.environment import TelemetryError
from kvreturn.telemetry.logs import Format, configure

log = logging.getLogger("kvreturn")


class _RefusedError(LoggedError):
    exit_code = REFUSED


@click.command()
@click.option(
    "--config", "path", type=click.Path(path_type=Path), default="kvreturn.yaml", show_default=True, help="Settings."
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes; stands above the setting `workers`.")
@click.option("--watch", is_flag=True, help="Reload the settings when their file changes, as SIGHUP does.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@log_format
@click.option("--worker", type=int, hidden=True, help="Which one this is; given by the supervisor.")
def command(
    path: Path, workers: int | None, watch: bool, log_level: str, log_format: Format, worker: int | None
) -> None:
    """Run the ext_proc server that Envoy calls, until SIGTERM.

    SIGHUP reloads the settings (docs/operations.md).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # it waits until there is something to reload
    over = {"workers": workers} if workers else {}
    load = partial(load_settings, path, over=over)
    try:
        settings = load()
        configure(log_format, log_level, worker)
        if worker is None:
            check_installed(settings)
            _warn(settings)
        if worker is None and settings.workers > 1:
            asyncio.run(_supervise(settings, load))
        else:
            run(serve(settings, load, worker=worker, watch=path if watch else None))
    except (ConfigError, ListenError, TelemetryError, SupervisorError) as e:
        raise (LoggedError if worker is None else _RefusedError)(str(e), log_format) from None


async def _supervise(settings: Settings, load: partial[Settings]) -> None:
    check_free({name: where for name, where in settings.listens().items() if not name.startswith("envoy.")})
    # The very command line that started us, for each worker.
    again = [sys.executable, "-m", "kvreturn.cli.main", *sys.argv[1:], "--worker"]
    await Supervisor(settings.workers, lambda index: [*again, str(index)], load).run()


def _warn(settings: Settings) -> None:
    if not settings.secret.get_secret_value():
        log.warning("no secret is configured: fingerprints use a key of this process, so a restart forgets all turns")
    if settings.tenant_header is None:
        log.warning(
            "no tenant_header is configured: tenants are told apart by their credential, and callers without one "
            "count as one tenant"
        )
    if not sys.flags.hash_randomization:
        log.warning("PYTHONHASHSEED=0: clients can choose member names that make dictionaries slow; unset it")
