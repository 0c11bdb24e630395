"""`kvreturn doctor`."""

import asyncio
import json
import os
import sys
from pathlib import Path

import click
from rich.console import Console

from kvreturn.doctor.model import Status
from kvreturn.doctor.run import Plan, diagnose
from kvreturn.doctor.show import lines


def _headers(values: tuple[str, ...], api_key: str | None) -> dict[str, str]:
    found = {"authorization": f"Bearer {api_key}"} if api_key else {}
    for value in values:
        name, colon, text = value.partition(":")
        if not colon or not name.strip():
            raise click.BadParameter("write it as 'name: value'", param_hint="--header")
        found[name.strip().lower()] = text.strip()
    return found


@click.command("doctor")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    default="kvreturn.yaml",
    show_default=True,
    help="Settings of the router.",
)
@click.option(
    "--node-config",
    "node_files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="How a node is started: its command line, its --kv-transfer-config as JSON, or a Kubernetes or Compose file. "
    "May be given several times.",
)
@click.option("--offline", is_flag=True, help="Look at files only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/doctor.md).")
@click.option("--strict", is_flag=True, help="Exit code 1 for warnings too.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Seconds per check.")
@click.option("--quiet", is_flag=True, help="Show only what warns or fails.")
@click.option("--workers", type=click.IntRange(min=1), help="Of the router, if it was started with --workers.")
@click.option("--gateway", metavar="URL", help="Where clients connect, if that is not envoy.listen of the settings.")
@click.option(
    "--api-key", envvar="KVRETURN_DOCTOR_API_KEY", help="Credential for gateway and nodes (vLLM's --api-key)."
)
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="Header for gateway and nodes.")
def command(
    config: Path,
    node_files: tuple[Path, ...],
    timeout: float,
    gateway: str | None,
    api_key: str | None,
    headers: tuple[str, ...],
    workers: int | None,
    *,
    offline: bool,
    as_json: bool,
    strict: bool,
    quiet: bool,
) -> None:
    """Check a running deployment, or its files, and say what to do.

    One line per check: ok, warn, fail or skipped, what was found, and the remedy. The exit code is 0 if nothing
    failed, 1 if something did, 2 for wrong arguments.
    """
    plan = Plan(config, node_files, os.environ, offline, timeout, _headers(headers, api_key), gateway, workers)
    with Console(stderr=True).status("starting") as status:
        diagnosis = asyncio.run(diagnose(plan, lambda what: status.update(f"checking: {what}")))
    if as_json:
        click.echo(json.dumps(diagnosis.json(), indent=2, ensure_ascii=False))
    else:
        for line in lines(diagnosis, quiet=quiet, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ):
            click.echo(line)
    bad = {Status.FAIL, Status.WARN} if strict else {Status.FAIL}
    sys.exit(1 if diagnosis.status in bad else 0)
