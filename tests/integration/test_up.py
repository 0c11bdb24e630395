"""`kvreturn up` and `kvreturn envoy-config`, as users run them."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from click.testing import CliRunner

from kvreturn.cli import up
from kvreturn.cli.main import main
from kvreturn.config import Settings
from kvreturn.envoy.process import ProcessError
from kvreturn.sim import NO_TIMING, NodeConfig, SimNode
from support.envoy import Node, serving, unused_address
from support.gateway import client, serving_sims
from support.redis import needs_redis, server

# Stands in for `kvreturn serve` where it has to misbehave: answers gRPC health checks, and then does as told.
ROUTER = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
server = grpc.server(ThreadPoolExecutor())
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(sys.argv[1])
server.start()
"""


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node("node")
    async with serving(node):
        yield node


@pytest.fixture
def config(node: Node) -> dict[str, Any]:
    return {
        "listen": unused_address(),
        "admin": None,
        "pools": {"prefill": [node.address], "decode": [node.address]},
        "secret": "s3cret",
        "drain_timeout": 10,
        "envoy": {name: unused_address() for name in ("listen", "prefill_listen", "admin")},
    }


@dataclass
class Up:
    """A running `kvreturn up`.

    Attributes:
        lines: its output so far.
    """

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    async def see(self, text: str) -> str:
        """Read on until a line has this text."""
        assert self.process.stdout
        async with asyncio.timeout(60):  # starting is slow where many processes do
            while line := (await self.process.stdout.readline()).decode():
                self.lines.append(line)
                if text in line:
                    return line
        raise AssertionError("".join(self.lines))

    async def see_all(self, text: str) -> None:
        """As `see`, of the lines that were read already too."""
        if not any(text in line for line in self.lines):
            await self.see(text)


@pytest.fixture
async def running(config: dict[str, Any], tmp_path: Path) -> AsyncIterator[Up]:
    async with up_with(config, tmp_path) as process:
        yield process


@contextlib.asynccontextmanager
async def up_with(config: dict[str, Any], tmp_path: Path, *options: str) -> AsyncIterator[Up]:
    path = tmp_path / "kvreturn.yaml"
    path.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvreturn.cli.main", "up", "--config", str(path), "--concurrency", "1", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Up(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
        assert process.stdout
        await process.stdout.read()
        await process.wait()


class TestUp:
    async def test_serves_then_drains(self, running: Up, config: dict[str, Any], node: Node) -> None:
        url = f"http://{config['envoy']['listen']}/v1"
        assert (await running.see("ready")).endswith(f"ready: {url}\n")
        gate = node.gate = asyncio.Event()
        async with aiohttp.ClientSession() as client, client.get(f"{url}/models") as stream:
            await stream.content.readexactly(1)
            running.process.send_signal(signal.SIGTERM)
            await running.see("stopping")
            await _refused(config["envoy"]["listen"])
            gate.set()
            assert await stream.text() == "ode"
        assert await running.process.wait() == 0
        await running.see("GET /v1/models")
        sources = {line.split("|")[0].strip() for line in running.lines}
        assert sources == {"router", "envoy", "kvreturn"}
        assert "s3cret" not in "".join(running.lines)

    async def test_a_second_signal_cuts_what_still_runs(self, running: Up, config: dict[str, Any], node: Node) -> None:
        await running.see("ready")
        node.gate = asyncio.Event()
        url = f"http://{config['envoy']['listen']}/v1/models"
        async with aiohttp.ClientSession() as client, client.get(url) as stream:
            await stream.content.readexactly(1)
            running.process.send_signal(signal.SIGINT)
            await running.see("stopping")
            running.process.send_signal(signal.SIGINT)
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
            node.gate.set()
        assert await running.process.wait() == 0

    @needs_redis
    async def test_workers_serve_behind_one_envoy_and_reload(self, config: dict[str, Any], tmp_path: Path) -> None:
        config |= {"listen": f"unix:{tmp_path}/router", "tenant_header": "x-tenant", "drain_timeout": 0.1}
        with server(tmp_path) as redis:
            config["store"] = {"url": redis.url, "deadline": 1.0}
            async with up_with(config, tmp_path, "--workers", "2", "--watch") as running:
                await running.see("ready")
                async with aiohttp.ClientSession() as client:
                    for i in range(20):
                        body = {"model": "m", "messages": [{"role": "user", "content": f"Hi {i}"}]}
                        url = f"http://{config['envoy']['listen']}/v1/chat/completions"
                        async with client.post(url, json=body, headers={"x-tenant": "t"}) as answer:
                            await answer.read()
                for worker in range(2):
                    await running.see_all(f"worker {worker} kvreturn.turn outcome=")
                path = tmp_path / "kvreturn.yaml"
                path.write_text(yaml.safe_dump({**config, "proof": "off"}))
                for worker in range(2):
                    await running.see_all(f"worker {worker} kvreturn settings reloaded; changed: proof")
                running.process.send_signal(signal.SIGTERM)
                assert await running.process.wait() == 0
                await running.see_all("all workers have stopped")

    async def test_what_the_router_kept_is_freed_on_d_while_envoy_still_runs(
        self, config: dict[str, Any], tmp_path: Path
    ) -> None:
        p, d = (
            SimNode(NodeConfig(role=role, connector="kvreturn", timing=NO_TIMING, model="sim"))
            for role in ("prefill", "decode")
        )
        async with serving_sims(p, d) as urls:
            p_at, d_at = (url.removeprefix("http://") for url in urls)
            config |= {"pools": {"prefill": [p_at], "decode": [d_at]}, "secret": ""}
            async with up_with(config, tmp_path) as running:
                await running.see("ready")
                async with client(f"http://{config['envoy']['listen']}/v1") as sdk:
                    message: Any = {"role": "user", "content": "The quick brown fox jumps. " * 40}
                    await sdk.chat.completions.create(model="sim", messages=[message], max_tokens=20)
                assert d.stats.pins == 1
                running.process.send_signal(signal.SIGTERM)
                assert await running.process.wait() == 0
            assert d.stats.pins == 0

    async def test_a_dead_envoy_takes_the_router_with_it(self, running: Up) -> None:
        await running.see("ready")
        children = _children(running.process.pid)
        os.kill(children.pop("envoy"), signal.SIGKILL)
        await running.see("Error: envoy was killed by SIGKILL")
        assert await running.process.wait() == 1
        (router,) = children.values()
        assert not _exists(router)

    async def test_a_dead_router_is_named_with_its_last_words(self, config: dict[str, Any]) -> None:
        lines: list[str] = []
        dies = f"{ROUTER}\ntime.sleep(1)\nprint('out of luck')\nsys.exit(3)"
        with pytest.raises(ProcessError, match="router exited with code 3; its last lines:\n  out of luck"):
            await _run(config, dies, lines)
        assert [line for line in lines if line.startswith("kvreturn: ready")]
        assert "router: out of luck" in lines
        await _refused(config["envoy"]["listen"])

    async def test_a_router_that_does_not_start_is_named(self, config: dict[str, Any]) -> None:
        with pytest.raises(ProcessError, match="router exited with code 1; its last lines:\n  no way"):
            await _run(config, "raise SystemExit('no way')", [])

    async def test_an_address_in_use_is_named_before_anything_starts(self, config: dict[str, Any]) -> None:
        lines: list[str] = []
        with (
            _listening(config["listen"]),
            _listening(config["envoy"]["admin"]),
            pytest.raises(ProcessError) as failure,
        ):
            await _run(config, "raise SystemExit('started')", lines)
        assert f"{config['listen']} (listen): Address already in use" in str(failure.value)
        assert f"{config['envoy']['admin']} (envoy.admin): Address already in use" in str(failure.value)
        assert not lines


class TestEnvoyConfig:
    def run(self, *args: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(main, ["envoy-config", *args])
        return result.exit_code, result.stdout, result.stderr

    def test_prints_a_checked_bootstrap(self, config: dict[str, Any], tmp_path: Path) -> None:
        path, out = tmp_path / "kvreturn.yaml", tmp_path / "envoy.yaml"
        config["envoy"]["listen"] = "0.0.0.0:8000"
        path.write_text(yaml.safe_dump(config))
        code, stdout, stderr = self.run("--config", str(path))
        assert code == 0
        assert yaml.safe_load(stdout)["static_resources"]["listeners"][0]["name"] == "client"
        assert stderr.startswith("warning: clients connect to 0.0.0.0:8000 without TLS")
        code, nothing, stderr = self.run("--config", str(path), "--validate", "-o", str(out))
        assert (code, nothing) == (0, "")
        assert "Envoy accepts the bootstrap" in stderr
        assert out.read_text() == stdout

    def test_says_which_line_of_the_settings_is_wrong(self, config: dict[str, Any], tmp_path: Path) -> None:
        path = tmp_path / "kvreturn.yaml"
        path.write_text(yaml.safe_dump({**config, "pool": 1}, sort_keys=False))
        code, stdout, stderr = self.run("--config", str(path), "--validate")
        assert (code, stdout) == (1, "")
        assert f"{path}:" in stderr
        assert "did you mean `pools`?" in stderr

    def test_what_envoy_refuses_is_not_printed(self, config: dict[str, Any], tmp_path: Path) -> None:
        path = tmp_path / "kvreturn.yaml"
        config["envoy"]["health_check_path"] = "/bad\npath"
        path.write_text(yaml.safe_dump(config))
        code, stdout, stderr = self.run("--config", str(path), "--validate")
        assert (code, stdout) == (1, "")
        assert "Envoy refuses the bootstrap" in stderr


async def _run(config: dict[str, Any], router: str, lines: list[str]) -> None:
    command = [sys.executable, "-c", router, config["listen"]]
    await up.run(
        Settings.model_validate(config), command, lambda source, line: lines.append(f"{source}: {line}"), concurrency=1
    )


@contextlib.contextmanager
def _listening(address: str) -> Iterator[None]:
    with socket.socket() as s:
        host, port = address.split(":")
        s.bind((host, int(port)))
        s.listen()
        yield


async def _refused(address: str) -> None:
    """Wait until nobody listens there any more."""
    host, port = address.split(":")
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.02)


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _children(pid: int) -> dict[str, int]:
    """The child processes of a process that still run, by command name."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = stat.read_text().rpartition(")")
            state, parent = tail.split()[:2]
            if int(parent) == pid and state != "Z":
                found[head.partition("(")[2]] = int(stat.parent.name)
    return found
