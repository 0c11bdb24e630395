"""What is generated and committed is what its generator makes now."""

import filecmp
import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_protobuf_code_is_current(tmp_path: Path) -> None:
    script("gen_protos").generate(tmp_path / "out")
    made, kept = tmp_path / "out", ROOT / "extproc/kvreturn/_proto"
    names = sorted(str(p.relative_to(made)) for p in made.rglob("*.py*") if "__pycache__" not in p.parts)
    assert names == sorted(str(p.relative_to(kept)) for p in kept.rglob("*.py*") if "__pycache__" not in p.parts)
    assert filecmp.cmpfiles(made, kept, names, shallow=False) == (names, [], [])


async def test_references_are_current() -> None:
    for name, make in script("gen_docs").GENERATED.items():
        assert make() == (ROOT / name).read_text(), f"{name}: run `make docs`"


def test_every_extra_of_the_package_is_explained_in_contributing() -> None:
    import tomllib  # noqa: PLC0415 - only here

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["envoy"], *extras["redis"]]
    wanted += [d for d in extras["demo"] if not d.startswith("kvreturn")]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = [d.split(">=")[0].split("[")[0] for d in wanted]
    assert [n for n in names if not re.search(rf"^\| {n}[, ]", text, re.MULTILINE)] == []
