"""No Docker engine runs here: what docker-compose.yml says is checked, and run as processes elsewhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvreturn.config_file import load_settings
from support.composed import FILE, SECRETS, services
from support.deployed import ROOT, Container, Json, interpolate

SERVICES: dict[str, Json] = FILE["services"]
SETTINGS = ("sim", "vllm")


def address(name: str, network: str = "nodes") -> str:
    found: str = SERVICES[name]["networks"][network]["ipv4_address"]
    return found


def test_the_file_is_as_the_compose_specification_has_it() -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    command = [str(checker), "--builtin-schema", "vendor.compose-spec", str(ROOT / "docker-compose.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("missing", SECRETS)
def test_a_secret_that_is_missing_is_named_with_what_to_do(missing: str) -> None:
    with pytest.raises(ValueError, match=rf"{missing}: set it to .* `openssl rand"):
        services({name: value for name, value in SECRETS.items() if name != missing})


def test_secrets_have_no_defaults() -> None:
    found = re.findall(
        r"\$\{(KVRETURN_SECRET|KVRETURN_STORE_PASSWORD)(.{2})", (ROOT / "docker-compose.yml").read_text()
    )
    assert {how for _, how in found} == {":?"}
    assert {name for name, _ in found} == SECRETS.keys()


@pytest.mark.parametrize("nodes", SETTINGS)
def test_the_settings_name_the_containers(nodes: str) -> None:
    settings = load_settings(ROOT / f"deploy/compose/{nodes}.yaml", {})
    prefill, decode = {"sim": ("prefill", "decode"), "vllm": ("vllm-prefill", "vllm-decode")}[nodes]
    assert settings.pools.prefill == [f"{address(prefill)}:8000"]
    assert settings.pools.decode == [f"{address(decode)}:8000"]
    assert settings.envoy.routers == [f"{address(name)}:9090" for name in ("router-1", "router-2")]
    assert settings.envoy.prefill_listen == f"{address('envoy')}:8001"
    assert f"@{address('valkey', 'store')}:6379" in SERVICES["router-1"]["environment"]["KVRETURN_STORE_URL"]
    for name in ("router-1", "router-2"):
        grace = float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert grace == settings.drain_timeout + 15


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_vllm_nodes_are_told_their_own_address_and_use_our_connector(role: str) -> None:
    for name in (f"vllm-{role}", f"vllm-cpu-{role}"):
        service = interpolate(SERVICES[name], SECRETS)
        assert service["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == address(name) == address(f"vllm-{role}")
        options = service["command"]
        answers = int(options[options.index("--shutdown-timeout") + 1])  # by default vLLM aborts them at once
        assert float(service["stop_grace_period"].removesuffix("s")) == answers + 15
        transfer = yaml.safe_load(options[options.index("--kv-transfer-config") + 1])
        assert transfer == {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "kvreturn_connector.connector",
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
            "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
        }


@pytest.mark.parametrize(("name", "service"), SERVICES.items())
def test_containers_have_no_privileges_and_can_write_to_no_disk_but_volumes(name: str, service: Json) -> None:
    assert service["read_only"], name
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == "10001:10001"


@pytest.mark.parametrize(("name", "service"), SERVICES.items())
def test_images_have_versions_and_ports_are_published_on_loopback(name: str, service: Json) -> None:
    tag = re.sub(r"^[^:]*", "", service["image"])
    assert re.search(r":v?\d", tag), name
    assert "latest" not in tag
    assert [port for port in service.get("ports", []) if not port.startswith("127.0.0.1:")] == []


def test_nobody_but_the_routers_reaches_the_store() -> None:
    assert FILE["networks"]["store"]["internal"]
    on_it = {name for name, service in SERVICES.items() if "store" in service.get("networks", {})}
    assert on_it == {"router-1", "router-2", "valkey"}


def test_what_prometheus_asks_is_there() -> None:
    jobs: Any = yaml.safe_load((ROOT / "deploy/compose/prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: {t for c in job["static_configs"] for t in c["targets"]} for job in jobs}
    assert targets["kvreturn"] == {f"{address(name)}:9091" for name in ("router-1", "router-2")}
    nodes = ("prefill", "decode", "vllm-prefill", "vllm-decode")
    assert targets["vllm"] == {f"{address(name)}:8000" for name in nodes}


@pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool here: apt-get install prometheus")
def test_prometheus_accepts_its_settings(tmp_path: Path) -> None:
    container = Container("prometheus", "127.0.0.1")
    for volume in SERVICES["prometheus"]["volumes"]:
        source, inside, _ = volume.split(":")
        container.mount(inside, ROOT / source, tmp_path)
    container.mount("/etc/prometheus/prometheus.yml", ROOT / "deploy/compose/prometheus.yml", tmp_path)
    done = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_files_that_are_mounted_exist() -> None:
    mounted = [v.split(":")[0] for service in SERVICES.values() for v in service.get("volumes", [])]
    assert [path for path in mounted if path.startswith("./") and not (ROOT / path).exists()] == []
