"""`kvreturn up`: the router and Envoy together, started, watched and stopped as one."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from kvreturn.cli.options import LoggedError, log_format
from kvreturn.config import ConfigError, Settings
from kvreturn.config_file import load_settings
from kvreturn.envoy.health import not_serving
from kvreturn.envoy.ports import reachable, unavailable
from kvreturn.envoy.process import Child, ProcessError, Sink, first
from kvreturn.envoy.runner import EnvoyProcess
from kvreturn.telemetry.logs import Format, dump, head

_ROUTER_READY_WITHIN = 30.0  # seconds
_ROUTER_STOP_WITHIN = 15.0  # seconds; it has no streams then, but may have blocks to free and spans to export
_HEALTH_DEADLINE = 1.0  # seconds
_COLOURS = {"router": "cyan", "envoy": "magenta", "kvreturn": "green"}


@click.command("up")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    default="kvreturn.yaml",
    show_default=True,
    help="Settings.",
)
@click.option("--concurrency", type=click.IntRange(min=1), default=2, show_default=True, help="Envoy worker threads.")
@click.option(
    "--envoy-log-level",
    type=click.Choice(["trace", "debug", "info", "warn", "error", "critical", "off"]),
    default="warn",
    show_default=True,
)
@log_format
@click.option("--workers", type=click.IntRange(min=1), help="As for `kvreturn serve`.")
@click.option(
    "--watch", is_flag=True, help="As for `kvreturn serve`. Envoy keeps the bootstrap that it was started with."
)
def command(
    config: Path, concurrency: int, envoy_log_level: str, log_format: Format, workers: int | None, watch: bool
) -> None:
    """Run the ext_proc server and Envoy together, until SIGINT or SIGTERM.

    Log lines come with their source in front, or in `logger` with --log-format json. If one of the two dies, the other
    is stopped and the exit code is 1. A signal drains: new connections are refused, running streams get `drain_timeout`
    seconds to end, then both stop. A second signal stops them at once.
    """
    try:
        settings = load_settings(config, over={"workers": workers} if workers else {})
        serve = [sys.executable, "-m", "kvreturn.cli.main", "serve", "--config", str(config)]
        serve += ["--log-format", log_format]
        serve += ["--workers", str(settings.workers), *(["--watch"] if watch else [])]
        sink = _print_json if log_format == "json" else _print_line
        asyncio.run(run(settings, serve, sink, concurrency=concurrency, log_level=envoy_log_level))
    except (ConfigError, ProcessError) as e:
        raise LoggedError(str(e), log_format) from e


async def run(
    settings: Settings, serve: Sequence[str], sink: Sink, *, concurrency: int = 2, log_level: str = "warn"
) -> None:
    """Run both until a signal comes, then drain.

    Args:
        settings: the router's.
        serve: command line that starts the router with the same settings.
        sink: takes what both log, and under the name `kvreturn` what we have to say.
        concurrency: Envoy worker threads.
        log_level: Envoy's own name for it.

    Raises:
        ConfigError: no bootstrap can be made of the settings.
        ProcessError: an address is in use, or one of the two did not start or died. The other is stopped by then.
    """
    from kvreturn.envoy import bootstrap  # noqa: PLC0415 - takes about a second: not before errors in the arguments

    document = bootstrap.to_dict(bootstrap.build(settings))
    taken = unavailable(settings.listens())
    if taken:
        raise ProcessError("\n".join(taken))
    for warning in bootstrap.warnings(settings):
        sink("kvreturn", f"warning: {warning}")
    envoy = EnvoyProcess(document, sink=sink, concurrency=concurrency, log_level=log_level)
    router = Child("router", serve, sink, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    async with contextlib.AsyncExitStack() as stack:
        signals = stack.enter_context(_signals())
        await router.start()
        stack.push_async_callback(router.stop, _ROUTER_STOP_WITHIN)
        if await first((router,), signals.get(), _ready(settings, router)) == 0:
            return
        await envoy.start()  # now: what came before the router is there would be a 500
        stack.push_async_callback(envoy.stop)  # the last in is the first to stop
        both = (router, envoy.child)
        if await first(both, signals.get(), envoy.ready()) == 0:
            return
        sink("kvreturn", f"ready: http://{reachable(settings.envoy.listen)}/v1")
        await first(both, signals.get())
        sink("kvreturn", f"stopping; running streams get {settings.drain_timeout:g} s, a second signal cuts them")
        if await first(both, signals.get(), envoy.drain(settings.drain_timeout)) == 1:
            # While Envoy is there: what the router still asks of prefill nodes goes through it.
            await first((envoy.child,), signals.get(), router.stop(_ROUTER_STOP_WITHIN))


async def _ready(settings: Settings, router: Child) -> None:
    async def serving() -> bool:
        return not any([await not_serving(reachable(at), _HEALTH_DEADLINE) for at in settings.router_listens()])

    await router.ready(serving, _ROUTER_READY_WITHIN)


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Queue[int]]:
    """The signals that ask us to stop, one item each."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[int]()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, queue.put_nowait, number)
    try:
        yield queue
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _print_line(source: str, line: str) -> None:
    colour = None if "NO_COLOR" in os.environ else _COLOURS[source]
    click.echo(f"{click.style(f'{source:>8} |', fg=colour)} {line}")


def _print_json(source: str, line: str) -> None:
    """The router's lines are JSON already; the others become that."""
    own = source == "router" and line.startswith("{")
    click.echo(line if own else dump({**head(time.time(), "info", source), "message": line}))
