"""Runs the fuzz targets of tests/fuzz for a time, guided by coverage (atheris).

    scripts/run_fuzz.py --seconds 600                  all targets, that long together
    scripts/run_fuzz.py --seconds 60 NAME              one of them
    scripts/run_fuzz.py NAME FILE                      one input again, such as a crash file

A target is a Hypothesis test; its `fuzz_one_input` makes drawn values of the fuzzer's bytes. What reached new code is
kept in `.fuzz/NAME`, from which the next run goes on.
"""

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
KEPT = ROOT / ".fuzz"
MODULES = sorted(f"fuzz.{path.stem}" for path in (TESTS / "fuzz").glob("test_*.py"))


def targets(module: ModuleType) -> list[str]:
    """Names of the targets in a module."""
    return [name for name, value in vars(module).items() if hasattr(value, "hypothesis")]


def run_all(names: list[str], seconds: int) -> int:
    """Run targets one after the other, each in a process of its own, since the fuzzer ends its process.

    Args:
        names: of the targets.
        seconds: that all of them take together.

    Returns:
        How many found something.
    """
    each = max(1, seconds // len(names))
    found = 0
    for name in names:
        print(f"{name}: {each} s", flush=True)
        run = subprocess.run([sys.executable, __file__, "--child", "--seconds", str(each), name], check=False)
        found += run.returncode != 0
    print(f"{found} of {len(names)} targets found something")
    return found


def run_one(name: str, seconds: int, inputs: list[str]) -> None:
    """Run one target in this process, which ends with it.

    Args:
        name: of the target.
        seconds: for how long.
        inputs: files to run it with instead.
    """
    import atheris  # noqa: PLC0415 - must come before what it instruments, and listing the targets needs no fuzzer

    with atheris.instrument_imports(include=["kvreturn"]):
        modules = [importlib.import_module(module) for module in MODULES]
    target = next(getattr(module, name) for module in modules if name in targets(module))
    folder = KEPT / name
    folder.mkdir(parents=True, exist_ok=True)
    options = inputs or [
        f"-max_total_time={seconds}",
        "-max_len=8192",
        "-len_control=1",
        f"-artifact_prefix={folder}-",
        str(folder),
    ]
    atheris.Setup([sys.argv[0], "-print_final_stats=0", *options], target.hypothesis.fuzz_one_input)
    atheris.Fuzz()


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("name", nargs="?")
    parser.add_argument("file", nargs="*")
    args = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    if args.child or args.file:
        run_one(args.name, args.seconds, args.file)
    names = [name for module in MODULES for name in targets(importlib.import_module(module))]
    sys.exit(run_all([args.name] if args.name else names, args.seconds) > 0)


if __name__ == "__main__":
    main()
