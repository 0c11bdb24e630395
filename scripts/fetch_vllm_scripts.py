"""Fetch vLLM's own scripts that our tests run as they are: its example P/D proxies and its multi-turn benchmark.

They are in vLLM's source archive on PyPI, and in no wheel. The archive (45 MB) is checked against the hash below before
anything of it is read, and only what is named is kept, in `.vllm-scripts`, which git ignores. pip itself would build
vLLM to find out what its archive requires, so the index is asked directly: PIP_INDEX_URL, else PyPI.

usage: python scripts/fetch_vllm_scripts.py [NAME ...]    (default: all)

It ends with exit code 75 if the index does not have the archive: then nothing else is wrong.
"""

import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urljoin

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".vllm-scripts"
ARCHIVE = "vllm-0.32.0"
_SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
SCRIPTS = {
    "toy_proxy_server.py": "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py",
    "disagg_proxy_multiturn.py": "examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py",
    "multi_turn": "benchmarks/multi_turn",
}
"""Name in `.vllm-scripts`, and the file or folder in the archive."""
_UNAVAILABLE = 75  # EX_TEMPFAIL of sysexits.h
_SECONDS = 30  # for the index, and for each read from it


def main() -> None:
    """Fetch what is named and not there yet."""
    names = sys.argv[1:] or list(SCRIPTS)
    unknown = [n for n in names if n not in SCRIPTS]
    if unknown:
        sys.exit(f"no such script: {', '.join(unknown)}; there are {', '.join(SCRIPTS)}")
    missing = [n for n in names if not (FOLDER / ARCHIVE / n).exists()]
    if not missing:
        return
    (FOLDER / ARCHIVE).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        archive = Path(temporary) / "archive"
        try:
            _download(archive)
        except (OSError, ValueError, LookupError, HTTPException) as e:
            print(f"cannot fetch {ARCHIVE}.tar.gz: {e}", file=sys.stderr)
            sys.exit(_UNAVAILABLE)
        _unpack(archive, missing, Path(temporary))


def _download(to: Path) -> None:
    """Raises LookupError if the index does not list the archive, ValueError if it is another one."""
    project = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/vllm/"
    # https, unless pip was set to a mirror without.
    ask = urllib.request.Request(project, headers={"Accept": "application/vnd.pypi.simple.v1+json"})  # noqa: S310
    with urllib.request.urlopen(ask, timeout=_SECONDS) as answer:  # noqa: S310
        files = json.load(answer)["files"]
    link = next((f["url"] for f in files if f["filename"] == f"{ARCHIVE}.tar.gz"), None)
    if link is None:
        raise LookupError(f"{project} does not list it")
    with urllib.request.urlopen(urljoin(project, link), timeout=_SECONDS) as answer, to.open("wb") as out:  # noqa: S310
        shutil.copyfileobj(answer, out)
    with to.open("rb") as archive:
        digest = hashlib.file_digest(archive, "sha256").hexdigest()
    if digest != _SHA256:
        raise ValueError(f"its SHA-256 is {digest}, which is not {_SHA256}")


def _unpack(archive: Path, names: list[str], temporary: Path) -> None:
    """Put the named ones where they belong, each at once and whole: others may be doing the same."""
    wanted = tuple(f"{ARCHIVE}/{SCRIPTS[name]}" for name in names)
    with tarfile.open(archive) as files:
        members = [m for m in files if m.name in wanted or m.name.startswith(tuple(f"{w}/" for w in wanted))]
        files.extractall(temporary, members, filter="data")
    for name, path in zip(names, wanted, strict=True):
        target = FOLDER / ARCHIVE / name
        try:
            (temporary / path).rename(target)
        except OSError:
            if not target.exists():
                raise


if __name__ == "__main__":
    main()
