"""Options that several commands have, and errors in the form that they ask for."""

import time
from typing import IO, Any

import click

from kvreturn.telemetry.logs import FORMATS, Format, dump, head

log_format = click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    default="console",
    show_default=True,
    help="Lines for people, or JSON Lines.",
)


class LoggedError(click.ClickException):
    """Ends a command, and is told as its log lines are.

    Args:
        message: what is wrong, and what to do.
        form: of the lines.
    """

    def __init__(self, message: str, form: Format) -> None:
        super().__init__(message)
        self._form = form

    def show(self, file: IO[Any] | None = None) -> None:
        """See `ClickException.show`."""
        if self._form == "console":
            super().show(file)
        else:
            line = {**head(time.time(), "critical", "kvreturn"), "message": self.message}
            click.echo(dump(line), file=file, err=True)
