"""Progress where no bar can be drawn: in a pipe, in CI."""

import sys
import time

import click

_EVERY = 10.0  # seconds


class Heartbeat:
    """Says on stderr now and then how far something is, unless that is a terminal, which has a bar.

    Args:
        every: seconds between two lines.
    """

    def __init__(self, every: float = _EVERY) -> None:
        self._every = every
        self._next = float("inf") if sys.stderr.isatty() else time.monotonic() + every

    def __call__(self, text: str) -> None:
        """Say it, if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            click.echo(text, err=True)
