"""What `kvreturn doctor` makes of Envoy's admin port, of its own rules, and of a store's words."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvreturn.doctor.agree import agree
from kvreturn.doctor.flags import Flags
from kvreturn.doctor.run import Plan, diagnose
from kvreturn.doctor.sessions import judge
from kvreturn.envoy.bootstrap import build, to_dict
from support.doctor import Scripted, settings_file, worst
from support.nodes import FakePrefill

P, D = "127.0.0.1:1", "127.0.0.1:2"  # nobody is there
LISTEN = "127.0.0.1:4"
_VERSION = "0000000000000000000000000000000000000000/{}/Clean/RELEASE/BoringSSL"
Answers = dict[str, Any]


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401 - JSON
    """Ours, for these two nodes."""
    _, settings = settings_file(tmp_path_factory.mktemp("settings"), P, D, listen=LISTEN)
    return to_dict(build(settings))


def _cluster(name: str, address: str, **health: bool) -> Any:  # noqa: ANN401 - JSON
    host, port = address.split(":")
    socket = {"socket_address": {"address": host, "port_value": int(port)}}
    return {"name": name, "host_statuses": [{"address": socket, "health_status": health}]}


def _admin(bootstrap: Any) -> Answers:  # noqa: ANN401 - JSON
    """What Envoy 1.40 says of this bootstrap, as far as it is looked at."""
    dump = {"@type": "type.googleapis.com/envoy.admin.v3.BootstrapConfigDump", "bootstrap": bootstrap}
    return {
        "/server_info": {
            "version": "0000000000000000000000000000000000000000/1.40.0/Clean/RELEASE/BoringSSL",
            "state": "LIVE",
        },
        "/config_dump": {"configs": [{"@type": "type.googleapis.com/envoy.admin.v3.ClustersConfigDump"}, dump]},
        "/clusters": {"cluster_statuses": [_cluster("prefill", P, eds_health_status=True), _cluster("decode", D)]},
    }


def _edit(path: str, **members: Any) -> Callable[[Answers], None]:  # noqa: ANN401 - JSON
    return lambda answers: answers[path].update(members)


def _clusters(answers: Answers) -> list[Any]:
    """Those of the bootstrap; the last one is where a router is called, or logged to."""
    found: list[Any] = answers["/config_dump"]["configs"][1]["bootstrap"]["static_resources"]["clusters"]
    return found


_SICK = [_cluster("prefill", P, failed_active_health_check=True), _cluster("decode", D)]


@pytest.mark.parametrize(
    ("change", "prefill", "check", "status", "finding"),
    [
        (lambda _: None, P, "envoy.lint", "ok", "none of our rules"),
        (lambda answers: _clusters(answers).pop(), P, "envoy.lint", "fail", "p-fast-lane"),
        (lambda _: None, P, "envoy.nodes", "ok", "the same 1"),
        (_edit("/server_info", version=_VERSION.format("1.29.4")), P, "envoy.version", "warn", "1.29.4"),
        (_edit("/server_info", version="?"), P, "envoy.version", "warn", "?"),
        (_edit("/server_info", state="DRAINING"), P, "envoy", "warn", "draining"),
        (lambda answers: answers.pop("/server_info"), P, "envoy", "fail", "HTTP 404"),
        (_edit("/config_dump", configs=[]), P, "envoy.lint", "skipped", "without a bootstrap"),
        (_edit("/clusters", cluster_statuses=_SICK), P, "envoy.nodes", "warn", "failed_active_health_check"),
        (_edit("/clusters", cluster_statuses=[]), P, "envoy.nodes", "skipped", "no cluster `prefill`"),
        (_edit("/clusters", cluster_statuses=None), P, "envoy.nodes", "skipped", "/clusters"),
        (lambda _: None, "127.0.0.1:3", "envoy.nodes", "fail", "Envoy does not know 127.0.0.1:3"),
        (lambda _: None, "localhost:1", "envoy.nodes", "skipped", "host names"),
    ],
)
async def test_what_envoy_says_of_itself(  # noqa: PLR0917 - as parametrized
    tmp_path: Path,
    bootstrap: Any,  # noqa: ANN401 - JSON
    change: Callable[[Answers], object],
    prefill: str,
    check: str,
    status: str,
    finding: str,
) -> None:
    answers = _admin(copy.deepcopy(bootstrap))
    change(answers)
    async with FakePrefill(Scripted({path: (200, body) for path, body in answers.items()})) as admin:
        path, _ = settings_file(tmp_path, prefill, D, listen=LISTEN, envoy={"admin": admin.address})
        findings = list((await diagnose(Plan(path, seconds=2.0))).findings)
    found = worst(findings, check)
    assert found.status == status, found
    assert finding in found.found


@pytest.mark.parametrize(
    ("lane", "of_envoy", "status", "finding"),
    [
        ("fast", "fast", "ok", "fast"),
        ("portable", "portable", "ok", "portable"),
        ("fast", "portable", "warn", "no scripts"),
        ("portable", "fast", "warn", "has the scripts"),
        ("names", "portable", "warn", "names among envoy.routers"),
    ],
)
async def test_router_and_envoy_must_mean_the_same_lane(
    tmp_path: Path, lane: str, of_envoy: str, status: str, finding: str
) -> None:
    _, other = settings_file(tmp_path, P, D, listen=LISTEN, envoy={"lane": of_envoy})
    answers = {path: (200, body) for path, body in _admin(to_dict(build(other))).items()}
    async with FakePrefill(Scripted(answers)) as admin:
        envoy = {"admin": admin.address, **({"routers": ["router:9090"]} if lane == "names" else {"lane": lane})}
        path, _ = settings_file(tmp_path, P, D, listen=LISTEN, envoy=envoy)
        found = worst(list((await diagnose(Plan(path, seconds=2.0))).findings), "envoy.lane")
    assert (found.status, finding in found.found) == (status, True), found


def test_a_loopback_side_channel_is_wrong_between_machines() -> None:
    known = Flags("10.0.0.1:8000", "prefill", "kvreturn", side_host="10.0.0.1")
    apart = [known, replace(known, source="10.0.0.2:8000", side="decode", side_host="localhost")]
    one = [replace(n, source=f"127.0.0.1:{8000 + i}") for i, n in enumerate(apart)]
    for nodes, status in ((apart, "fail"), (one, "ok")):
        assert worst(list(agree(nodes, None, "0.1.0")), "side_channel.host").status == status


GOOD = {"redis_version": "7.2.4", "maxmemory_policy": "noeviction"}


@pytest.mark.parametrize(
    ("info", "skew", "check", "status", "finding"),
    [
        ({**GOOD, "redis_version": "6.2.14"}, 0.0, "store.version", "fail", "Redis 6.2.14"),
        ({**GOOD, "valkey_version": "8.0.1"}, 0.0, "store.version", "ok", "Valkey 8.0.1"),
        ({}, 0.0, "store.version", "skipped", "does not tell"),
        ({}, 0.0, "store.eviction", "skipped", "does not tell"),
        ({**GOOD, "aof_enabled": 1}, 0.0, "store.persistence", "ok", "append-only file"),
        (GOOD, 1.5, "store.clock", "fail", "+1.5 s"),
        (GOOD, -0.2, "store.clock", "ok", "-200 ms"),
    ],
)
def test_what_a_store_says_of_itself(info: dict[str, Any], skew: float, check: str, status: str, finding: str) -> None:
    found = worst(list(judge(info, 0.001, 0.02, skew)), check)
    assert (found.status.value, finding in found.found) == (status, True), found


@pytest.mark.parametrize(("seconds", "status"), [(0.001, "ok"), (0.015, "warn"), (0.05, "fail")])
def test_a_stores_latency_is_held_against_the_deadline(seconds: float, status: str) -> None:
    assert worst(list(judge(GOOD, seconds, 0.02, 0.0)), "store.latency").status == status
