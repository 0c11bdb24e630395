"""The Kubernetes manifests against Kubernetes' own schemas, and against each other."""

from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvreturn.config import Settings
from support.deployed import Json
from support.kubernetes import build, needs_kustomize

pytestmark = needs_kustomize
OVERLAYS = ("demo", "production", "envoy-gateway", "istio")
OLDEST = "1.32"  # that we mean to run on
# Of operators and meshes; test_meshes.py looks at what those say, and the Prometheus operator's are small.
FOREIGN = ("monitoring.coreos.com/", "gateway.", "networking.istio.io/")
SECRETS = {"secret", "store-url", "store-encryption-key", "store-password", "hf-token"}


@cache
def objects(overlay: str) -> list[Json]:
    return build(f"overlays/{overlay}")


def pods(overlay: str) -> list[tuple[str, Json]]:
    return [
        (o["metadata"]["name"], o["spec"]["template"]["spec"]) for o in objects(overlay) if o["kind"] == "Deployment"
    ]


def containers(overlay: str) -> list[tuple[str, Json]]:
    return [(name, c) for name, pod in pods(overlay) for c in [*pod.get("initContainers", []), *pod["containers"]]]


def named(overlay: str, kind: str, name: str) -> Json:
    return next(o for o in objects(overlay) if o["kind"] == kind and o["metadata"]["name"] == name)


def settings(overlay: str) -> Settings:
    return Settings.model_validate(yaml.safe_load(named(overlay, "ConfigMap", "kvreturn")["data"]["kvreturn.yaml"]))


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_objects_are_as_kubernetes_has_them(overlay: str, version: str) -> None:
    for thing in objects(overlay):
        if not thing["apiVersion"].startswith(FOREIGN):
            kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_is_in_one_namespace_and_nothing_brings_a_secret(overlay: str) -> None:
    assert {o["metadata"]["namespace"] for o in objects(overlay)} == {"kvreturn"}
    assert "Secret" not in {o["kind"] for o in objects(overlay)}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_containers_meet_the_restricted_pod_security_standard(overlay: str) -> None:
    for name, pod in pods(overlay):
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["seccompProfile"]["type"]) == (True, "RuntimeDefault"), name
        assert pod["automountServiceAccountToken"] is (name == "kvreturn-router"), name
    for name, container in containers(overlay):
        wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == wanted, name
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
        assert "memory" in container["resources"]["limits"], name
        assert ":" in container["image"], name
        assert not container["image"].endswith(":latest"), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_named_is_there(overlay: str) -> None:
    maps = {o["metadata"]["name"] for o in objects(overlay) if o["kind"] == "ConfigMap"}
    for name, pod in pods(overlay):
        volumes = {v["name"]: v for v in pod.get("volumes", [])}
        assert {v["configMap"]["name"] for v in volumes.values() if "configMap" in v} <= maps, name
        mounted = {
            m["name"] for _, c in containers(overlay) if c in pod["containers"] for m in c.get("volumeMounts", [])
        }
        assert mounted <= volumes.keys(), name
    for name, container in containers(overlay):
        for source in (entry.get("valueFrom", {}) for entry in container.get("env", [])):
            assert source.get("secretKeyRef", {"key": "secret"})["key"] in SECRETS, name
            assert source.get("configMapKeyRef", {"name": next(iter(maps))})["name"] in maps, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_budgets_and_policies_select_pods_that_are_there(overlay: str) -> None:
    labels = [o["spec"]["template"]["metadata"]["labels"] for o in objects(overlay) if o["kind"] == "Deployment"]

    def selects(selector: Json) -> bool:
        return any(selector.items() <= pod.items() for pod in labels)

    for thing in objects(overlay):
        spec: Any = thing.get("spec", {})
        match thing["kind"]:
            case "Service":
                assert selects(spec["selector"]), thing["metadata"]
            case "PodDisruptionBudget" | "Deployment":
                assert selects(spec["selector"]["matchLabels"]), thing["metadata"]
            case "NetworkPolicy":
                assert "matchExpressions" in spec["podSelector"] or selects(spec["podSelector"]["matchLabels"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_router_has_time_to_drain(overlay: str) -> None:
    pod = dict(pods(overlay))["kvreturn-router"]
    (container,) = pod["containers"]
    notice = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= notice + settings(overlay).drain_timeout + 15


@pytest.mark.parametrize("name", ["vllm-prefill", "vllm-decode"])
def test_a_vllm_node_has_time_to_end_its_answers(name: str) -> None:
    """By vLLM's default it aborts them at once."""
    pod = dict(pods("production"))[name]
    (container,) = pod["containers"]
    notice = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    answers = int(container["args"][container["args"].index("--shutdown-timeout") + 1])
    assert pod["terminationGracePeriodSeconds"] == notice + answers + 15


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_routers_settings_name_services_that_are_there(overlay: str) -> None:
    known = settings(overlay)
    for source in known.pools.sources.values():
        assert source.endpoint_slices
        (port,) = named(overlay, "Service", source.endpoint_slices.service)["spec"]["ports"]
        assert port["name"] == source.endpoint_slices.port
    (router,) = known.envoy.routers
    name, _, number = router.partition(":")
    service = named(overlay, "Service", name)["spec"]
    assert service["clusterIP"] == "None"
    assert int(number) in {port["port"] for port in service["ports"]}
    (rule,) = named(overlay, "Role", "kvreturn")["rules"]
    assert rule == {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_who_may_reach_what(overlay: str) -> None:
    known = {o["metadata"]["name"]: o["spec"]["ingress"] for o in objects(overlay) if o["kind"] == "NetworkPolicy"}
    grpc, admin = known["kvreturn-router"]
    assert grpc["ports"] == [{"port": "grpc"}]
    assert all("podSelector" in peer for peer in grpc["from"])  # never a whole namespace
    assert admin["ports"] == [{"port": "admin"}]
    assert admin["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    if overlay == "demo":
        (store,) = known["kvreturn-valkey"]
        labels = {"app.kubernetes.io/name": "kvreturn", "app.kubernetes.io/component": "router"}
        assert store == {"from": [{"podSelector": {"matchLabels": labels}}], "ports": [{"port": "redis"}]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_answers_pass_the_router_since_envoy_cannot_call_one_of_many_under_one_name(overlay: str) -> None:
    assert settings(overlay).envoy.lane == "portable"
