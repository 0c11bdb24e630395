"""Install the client libraries that `make test-clients` uses: from PyPI into .venv-clients, from npm if there is Node.

They are no part of `pip install ".[dev]"`: they are large, and they pin each other's versions.

usage: python scripts/install_clients.py

It ends with exit code 75 if pip cannot get a package: then they are not to be had here, and nothing else is wrong.
"""

import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PYTHON, _NODE = ROOT / ".venv-clients", ROOT / "tests/clients/node"
_UNAVAILABLE = 75  # EX_TEMPFAIL of sysexits.h


def main() -> None:
    """Install everything; what is there already stays."""
    _once(_PYTHON / ".installed", ROOT / "tests/clients/requirements.txt", _install_python)
    _once(_NODE / "node_modules/.installed", _NODE / "package-lock.json", _install_node)


def _once(stamp: Path, wanted: Path, install: Callable[[Path], bool]) -> None:
    """Install what this file lists, unless just that is there; note it if it could be had."""
    if not (stamp.exists() and stamp.read_text() == wanted.read_text()) and install(wanted):
        stamp.write_text(wanted.read_text())


def _install_python(wanted: Path) -> bool:
    venv.create(_PYTHON, with_pip=True, clear=True)
    pip = [str(_PYTHON / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    if subprocess.run([*pip, "install", "--retries", "1", "-r", str(wanted)], check=False).returncode:
        print(f"failed: pip install -r {wanted}", file=sys.stderr)
        sys.exit(_UNAVAILABLE)
    return True


def _install_node(wanted: Path) -> bool:
    npm = shutil.which("npm")
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1")
    if npm and not subprocess.run([npm, "ci", *options], cwd=wanted.parent, check=False).returncode:
        return True
    print("no clients for Node: npm is missing, or cannot install them; their tests are skipped", file=sys.stderr)
    shutil.rmtree(_NODE / "node_modules", ignore_errors=True)
    return False


if __name__ == "__main__":
    main()
