"""What a check finds, and what all of them together come to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import kvreturn

SCHEMA = 1
"""Of the JSON form. New members may come without a new number; see docs/doctor.md."""


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: name of the check, the same in each version.
        status: how it ended.
        subject: what was looked at: a node, a pair of nodes, a file; empty where there is only one.
        found: what was seen; for `skipped`, why nothing was.
        remedy: what to do; empty for `ok`.
    """

    check: str
    status: Status
    subject: str
    found: str
    remedy: str = ""


def ok(check: str, found: str, subject: str = "") -> Finding:
    """As it should be."""
    return Finding(check, Status.OK, subject, found)


def warn(check: str, found: str, remedy: str, subject: str = "") -> Finding:
    """Works, but not as well as it could, or not for long."""
    return Finding(check, Status.WARN, subject, found, remedy)


def fail(check: str, found: str, remedy: str, subject: str = "") -> Finding:
    """Does not work."""
    return Finding(check, Status.FAIL, subject, found, remedy)


def skipped(check: str, why: str, subject: str = "", remedy: str = "") -> Finding:
    """Was not looked at."""
    return Finding(check, Status.SKIPPED, subject, why, remedy)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings of one run.

    Attributes:
        findings: in the order in which they are shown.
        config: path of the settings.
        offline: whether only files were looked at.
        seconds: that it took.
    """

    findings: Sequence[Finding]
    config: str
    offline: bool
    seconds: float

    @property
    def counts(self) -> dict[str, int]:
        """Findings by status."""
        counted = Counter(f.status for f in self.findings)
        return {status.value: counted[status] for status in Status}

    @property
    def status(self) -> Status:
        """The worst."""
        return next((s for s in (Status.FAIL, Status.WARN) if self.counts[s]), Status.OK)

    def json(self) -> dict[str, Any]:
        """The form that docs/doctor.md describes."""
        return {
            "schema": SCHEMA,
            "kvreturn": kvreturn.__version__,
            "status": self.status.value,
            "config": self.config,
            "offline": self.offline,
            "seconds": round(self.seconds, 3),
            "counts": self.counts,
            "findings": [asdict(f) for f in self.findings],
        }
