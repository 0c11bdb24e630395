"""The report as text, one line per check."""

from collections.abc import Iterator

import click

from kvreturn.doctor.model import Diagnosis, Finding, Status

_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red", Status.SKIPPED: "cyan"}


def lines(diagnosis: Diagnosis, *, colour: bool, quiet: bool = False) -> Iterator[str]:
    """The lines, without their ends; if `quiet`, only of what warns or fails."""
    shown = [f for f in diagnosis.findings if not quiet or f.status in {Status.WARN, Status.FAIL}]
    width = max((len(f.check) for f in shown), default=0)
    for finding in shown:
        yield _line(finding, width, colour=colour)
    counts = ", ".join(f"{number} {status}" for status, number in diagnosis.counts.items())
    yield f"{diagnosis.status}: {counts}, in {diagnosis.seconds:.1f} s"


def _line(finding: Finding, width: int, *, colour: bool) -> str:
    word = f"{finding.status:<7}"
    if colour:
        word = click.style(word, fg=_COLOURS[finding.status], bold=finding.status is Status.FAIL)
    subject = f"{finding.subject}: " if finding.subject else ""
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{word} {finding.check:<{width}}  {subject}{finding.found}{remedy}"
