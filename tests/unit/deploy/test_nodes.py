"""How the vLLM nodes are started, as `kvreturn doctor` sees it."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvreturn.cli.doctor import command
from support.composed import FILE, SECRETS
from support.deployed import ROOT, Json, interpolate
from support.kubernetes import FOLDER

MANIFESTS: list[Json] = list(yaml.safe_load_all((FOLDER / "components/vllm/nodes.yaml").read_text()))
COMPOSED: dict[str, Json] = interpolate(FILE["services"], SECRETS)
SETTINGS = ROOT / "deploy/compose/vllm.yaml"


@pytest.mark.parametrize(
    "nodes",
    [
        *(
            [{"services": {f"{kind}-{role}": COMPOSED[f"{kind}-{role}"]}} for role in ("prefill", "decode")]
            for kind in ("vllm", "vllm-cpu")
        ),
        [thing for thing in MANIFESTS if thing["kind"] == "Deployment"],
    ],
    ids=["compose, GPU", "compose, CPU", "Kubernetes"],
)
def test_kvreturn_doctor_finds_nothing_to_mend(
    nodes: list[Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRETURN_SECRET", SECRETS["KVRETURN_SECRET"])
    arguments = ["--offline", "--strict", "--config", str(SETTINGS)]
    for i, node in enumerate(nodes):
        file = tmp_path / f"{i}.yaml"
        file.write_text(yaml.safe_dump(node))
        arguments += ["--node-config", str(file)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.count("prefill node with NixlConnector") == 1
    assert result.output.count("decode node with NixlConnector") == 1
