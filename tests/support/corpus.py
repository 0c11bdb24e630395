"""Recorded responses and histories that lie beside the checkout: real ones, but not ours to pass on."""

import os
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(os.environ.get("KVRETURN_TEST_CORPUS", Path(__file__).parents[3] / "shared"))
_ABSENT = f"no recorded responses in {_ROOT}: set KVRETURN_TEST_CORPUS to the folder that holds data/ and samples/"


def files(pattern: str) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: the files that match, or one that skips with the reason."""
    found = sorted(_ROOT.glob(pattern))
    if not found:
        return [pytest.param(None, marks=pytest.mark.skip(reason=_ABSENT), id="absent")]
    return [pytest.param(path, id=path.stem) for path in found]


def sample(name: str) -> Path:
    """One file; skips the test if it is absent."""
    path = _ROOT / name
    if not path.exists():
        pytest.skip(_ABSENT)
    return path


def every(*patterns: str) -> list[Path]:
    """All files that match one of these; skips the test if there are none."""
    found = [path for pattern in patterns for path in sorted(_ROOT.glob(pattern))]
    if not found:
        pytest.skip(_ABSENT)
    return found
