"""The Dockerfiles, as far as that goes without a Docker engine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvreturn.cli.main import main
from support.deployed import ROOT

FILES = ("Dockerfile", "deploy/vllm/Dockerfile")


@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, ROOT / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_the_image_runs_without_root_and_knows_whether_it_is_well(name: str) -> None:
    stages = re.split(r"^FROM ", (ROOT / name).read_text(), flags=re.MULTILINE)
    assert "USER 10001:10001" in stages[-1]
    assert "HEALTHCHECK" in stages[-1]
    assert "RUN" not in stages[-1]  # all is made in a stage of its own, whose tools do not stay


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_in_the_build_context(name: str) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / name).read_text(), re.MULTILINE)
    wanted = {source for line in copies for source in line.split()}
    assert wanted <= allowed
    assert all((ROOT / source).exists() for source in wanted)


def test_the_routers_image_starts_a_router() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["kvreturn"]' in text
    found = re.search(r'^CMD \["(\w+)"', text, re.MULTILINE)
    assert found
    assert main.get_command(main.make_context("kvreturn", [], resilient_parsing=True), found[1])
