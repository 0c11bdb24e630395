"""Options that several commands have."""

import click

from kvreturn.telemetry.logs import FORMATS

log_format = click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    default="console",
    show_default=True,
    help="Lines for people, or JSON Lines.",
)
