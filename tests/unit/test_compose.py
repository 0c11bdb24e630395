"""No Docker engine runs where the tests do: the files' contents are checked, and the commands in them are parsed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvreturn.cli.main import main
from kvreturn.config_file import load_settings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_services_command_is_one_of_ours_with_options_that_exist(name: str) -> None:
    command: list[str] = SERVICES[name]["command"]
    with main.make_context("kvreturn", [*command, "--help"], resilient_parsing=True) as context:
        sub = main.get_command(context, command[0])
        assert sub
        known = {option for parameter in sub.params for option in parameter.opts}
    assert [part for part in command if part.startswith("--") and part not in known] == []


def test_the_gateways_settings_are_valid_and_name_the_nodes_of_the_file() -> None:
    mount = SERVICES["gateway"]["volumes"][0].split(":")[0]
    settings = load_settings(ROOT / mount, {})
    addresses = {name: service["networks"]["nodes"]["ipv4_address"] for name, service in SERVICES.items()}
    assert settings.pools.prefill == [f"{addresses['prefill']}:8000"]
    assert settings.pools.decode == [f"{addresses['decode']}:8000"]


def test_containers_run_without_privileges() -> None:
    for service in SERVICES.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    assert "USER 10001" in (ROOT / "Dockerfile").read_text()
