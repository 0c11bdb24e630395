"""docker-compose.yml as processes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from support.deployed import ROOT, Container, Json, interpolate, network, stop_all

FILE: Json = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SECRETS = {"KVRETURN_SECRET": "a secret of these tests", "KVRETURN_STORE_PASSWORD": "a7"}
ENTRYPOINTS = {"kvreturn:0.1.0": ["kvreturn"], "valkey/valkey:8.1-alpine": []}
_SUBNET = "172.28."


def services(environ: Mapping[str, str] = SECRETS) -> dict[str, Json]:
    """The services that start without a profile."""
    found: dict[str, Json] = {n: s for n, s in FILE["services"].items() if "profiles" not in s}
    return interpolate(found, environ)  # type: ignore[no-any-return] # of the same shape


@contextlib.asynccontextmanager
async def up(folder: Path) -> AsyncIterator[dict[str, Container]]:
    """All that `docker compose up --wait` starts, once it is healthy."""
    here, wanted = network().rpartition(".")[0], services()
    containers = {name: _container(name, service, here) for name, service in wanted.items()}
    done = {name: asyncio.Event() for name in wanted}

    async def begin(name: str) -> None:
        for other in wanted[name].get("depends_on", []):
            await done[other].wait()
        service, container = wanted[name], containers[name]
        _mount(service, container, folder)
        argv = [*service.get("entrypoint", ENTRYPOINTS.get(service["image"], [])), *service["command"]]
        if service["restart"] == "no":  # it ends by itself
            code, output = await container.run(argv)
            assert code == 0, output
        else:
            await container.start(argv)
            await container.succeeds(test(service))
        done[name].set()

    try:
        async with asyncio.TaskGroup() as group:
            for name in wanted:
                group.create_task(begin(name))
        yield containers
    finally:
        await stop_all(containers.values())


def _mount(service: Json, container: Container, folder: Path) -> None:
    for volume in service.get("volumes", []):
        source, inside, *mode = volume.split(":")
        path = ROOT / source if source.startswith("./") else folder / "volumes" / source
        path.mkdir(parents=True, exist_ok=True)
        if mode == ["ro"]:
            container.mount(inside, path, folder / container.name / inside.strip("/").replace("/", "-"))
        else:
            container.mounts[inside] = path


def test(service: Json) -> list[str]:
    """The command of its health check."""
    how, *rest = service["healthcheck"]["test"]
    return ["sh", "-c", *rest] if how == "CMD-SHELL" else rest


def _container(name: str, service: Json, here: str) -> Container:
    networks: Any = service.get("networks", {})
    address = next((n["ipv4_address"] for n in networks.values() if n), "")
    own = address.replace(_SUBNET, f"{here}.") or "0.0.0.0"
    return Container(name, own, names={_SUBNET: f"{here}."}, environ=service.get("environment", {}))
