"""The policies for Envoy Gateway and Istio, expanded to what Envoy gets of them."""

import pytest
import yaml

from kvreturn.envoy.filters import node_guard
from kvreturn.envoy.lint import lint
from kvreturn.envoy.names import DECODE_NODE_KEY, READY
from kvreturn.envoy.protos import lua_pb
from kvreturn.envoy.runner import validate
from support.deployed import Json
from support.envoy import client_manager
from support.kubernetes import build, needs_kustomize
from support.meshes import MESHES

pytestmark = needs_kustomize


@pytest.fixture(params=MESHES)
def bootstrap(request: pytest.FixtureRequest) -> Json:
    return MESHES[request.param](build(f"overlays/{request.param}"))


def test_envoy_accepts_it_and_none_of_our_rules_is_broken(bootstrap: Json) -> None:
    assert lint(bootstrap) == []
    assert validate(yaml.safe_dump(bootstrap)) is None


def test_the_filters_stand_in_the_order_that_they_need(bootstrap: Json) -> None:
    kinds = [f["typed_config"]["@type"].rpartition(".")[2] for f in client_manager(bootstrap)["http_filters"]]
    assert kinds == ["HealthCheck", "ExternalProcessor", "Lua", "Router"]


def test_a_load_balancer_may_ask_for_routers_and_decode_nodes(bootstrap: Json) -> None:
    ready = client_manager(bootstrap)["http_filters"][0]["typed_config"]
    assert ready["headers"] == [{"name": ":path", "string_match": {"exact": READY}}]
    clusters = {c["name"]: c for c in bootstrap["static_resources"]["clusters"]}
    assert ready["cluster_min_healthy_percentages"] == {name: {"value": 1} for name in clusters}
    assert all(c["health_checks"] for c in clusters.values())  # without them Envoy takes all for healthy


def test_the_guard_is_our_own(bootstrap: Json) -> None:
    typed = node_guard(DECODE_NODE_KEY).typed_config
    assert typed
    ours = lua_pb.Lua.parse(typed.value).default_source_code
    assert ours
    lua = client_manager(bootstrap)["http_filters"][2]["typed_config"]
    assert lua["default_source_code"]["inline_string"] == ours.inline_string
