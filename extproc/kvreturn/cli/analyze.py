"""`kvreturn analyze`."""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvreturn.analyze import model, page, text
from kvreturn.analyze.analysis import Analysis, Options, analyze
from kvreturn.analyze.fields import Unit
from kvreturn.analyze.lines import STDIN, InputError, Line, read_lines, total_size
from kvreturn.analyze.report import Report, make_report
from kvreturn.cli.heartbeat import Heartbeat

NOTHING = 3
BAD_LINES = 4
_PICTURES = (".png", ".svg", ".pdf")
_MEGA, _GIGA = 1e6, 1e9
_positive = click.FloatRange(min=0, min_open=True)
_path = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--ttl", type=_positive, default=480.0, show_default=True, help="decoder_kv_blocks_ttl, seconds.")
@click.option(
    "--prefill-rate", type=_positive, default=model.PREFILL_RATE, show_default=True, help="Tokens/s of one P."
)
@click.option(
    "--transfer-rate", type=_positive, default=model.TRANSFER_RATE / _GIGA, show_default=True, help="GB/s from D to P."
)
@click.option(
    "--kv-bytes-per-token",
    type=click.IntRange(min=1),
    default=model.BYTES_PER_TOKEN,
    show_default=True,
    help="2 x layers x KV heads x head size x bytes per element; the default is an 8B model in fp16.",
)
@click.option(
    "--overhead-ms", type=click.FloatRange(min=0), default=5.0, show_default=True, help="What any read costs."
)
@click.option("--min-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="kv_recompute_threshold.")
@click.option("--decode-kv-gb", type=_positive, help="KV memory of all decode nodes together, to judge what they hold.")
@click.option("--ignore-cached", is_flag=True, help="Do not believe the log's `cached_tokens`.")
@click.option(
    "--time-unit",
    type=click.Choice(["auto", "s", "ms", "us", "ns"]),
    default="auto",
    show_default=True,
    help="Of times that are numbers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--html", "html", type=_path, help="Write a report with plots, in one file.")
@click.option("--plot", "picture", type=_path, help="Write the plots only.")
@click.option("--strict", is_flag=True, help="Exit with 4 if any line could not be used.")
def command(
    files: tuple[str, ...],
    ttl: float,
    prefill_rate: float,
    transfer_rate: float,
    kv_bytes_per_token: int,
    overhead_ms: float,
    min_tokens: int,
    decode_kv_gb: float | None,
    ignore_cached: bool,
    time_unit: Unit,
    as_json: bool,
    html: Path | None,
    picture: Path | None,
    strict: bool,
) -> None:
    """Tell from logs whether read-back is worth it, before anything is deployed.

    FILE (or standard input, `-`) holds one turn a line: JSON with conversation_id, ts and prompt_tokens; OpenAI
    requests, with their responses or without; Mooncake traces; Envoy access logs; the router's turn log. What ends in
    .gz is decompressed. Lines that cannot be used are counted and named.

    Exit codes: 0 done, 1 reading or writing failed, 2 wrong arguments, 3 nothing to tell, 4 see --strict.
    """
    if not files and sys.stdin.isatty():
        raise click.UsageError("give a FILE, or a log on standard input")
    names = files or (STDIN,)
    for option, path, endings in (("--plot", picture, _PICTURES), ("--html", html, (".html", ".htm"))):
        if path and (path.suffix not in endings or not path.absolute().parent.is_dir()):
            raise click.UsageError(
                f"{option} {path}: give a name ending in {', '.join(endings)}, in an existing folder"
            )
    if html or picture:
        # What is missing should be missed now and not after an hour of reading. It takes half a second.
        from kvreturn.analyze import plots  # noqa: F401, PLC0415
    rates = model.Rates(prefill_rate, transfer_rate * _GIGA, kv_bytes_per_token, overhead_ms / 1e3, min_tokens)
    room = None if decode_kv_gb is None else decode_kv_gb * _GIGA
    options = Options(ttl, rates, time_unit, use_cached=not ignore_cached, decode_bytes=room)
    try:
        with _reading(names) as lines:
            analysis = analyze(lines, options)
    except InputError as e:
        raise click.ClickException(str(e)) from None
    except OSError as e:
        raise click.ClickException(f"temporary files in {tempfile.gettempdir()} (see TMPDIR): {e.strerror}") from None
    report = make_report(analysis)
    try:
        _write(analysis, report, html, picture)
    except OSError as e:
        raise click.ClickException(f"cannot write the report: {e}") from None
    click.echo(json.dumps(report.as_json()) if as_json else text.render(report))
    if report.level == "nothing to tell":
        sys.exit(NOTHING)
    if strict and report.bad:
        sys.exit(BAD_LINES)


def _write(analysis: Analysis, report: Report, html: Path | None, picture: Path | None) -> None:
    if not html and not picture:
        return
    from kvreturn.analyze import plots  # noqa: PLC0415 - see above

    drawn = bool(report.ttls or report.outcomes)
    if html:
        html.write_text(page.render(report, plots.svg(analysis, report) if drawn else ""), encoding="utf-8")
    if picture and drawn:
        plots.save(analysis, report, picture)
    elif picture:
        click.echo(f"nothing to plot: {picture} is not written", err=True)


@contextmanager
def _reading(names: Sequence[str]) -> Iterator[Iterator[Line]]:
    """Lines of the inputs. Stderr shows how far they are read, and that they are being counted then."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        total, heartbeat = total_size(names), Heartbeat()
        task = bar.add_task("reading", total=total)

        def advance(count: int) -> None:
            bar.advance(task, count)
            of = "" if total is None else f" of {total / _MEGA:,.0f}"
            heartbeat(f"reading: {bar.tasks[0].completed / _MEGA:,.0f}{of} MB")

        def lines() -> Iterator[Line]:
            yield from read_lines(names, advance)
            bar.remove_task(task)
            bar.add_task("counting", total=None)
            heartbeat("all is read: counting")

        yield lines()
