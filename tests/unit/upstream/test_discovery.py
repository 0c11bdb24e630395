"""Who is in a pool, by host names. Names are resolved by a resolver of the test's."""

import asyncio
import socket
import time

import pytest

from kvreturn.config import Settings
from kvreturn.telemetry.metrics import Metrics
from kvreturn.telemetry.nodes import NodeMetrics
from kvreturn.upstream.discovery import Discovery, NameWatch, resolve
from kvreturn.upstream.members import Members
from kvreturn.upstream.pool import Pool
from support.harness import until

NAME, OTHER, FIXED = "vllm.default.svc:8000", "vllm-9.example.org:8001", "10.0.0.9:8000"
ONE, TWO, THREE = "10.0.0.1:8000", "10.0.0.2:8000", "[fd00::3]:8000"


class Resolver:
    """Answers, or fails, as told."""

    def __init__(self, **answers: list[str] | Exception) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(f"{host}:{port}")
        answer = self.answers[host.partition(".")[0].replace("-", "_")]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Here:
    """A pool, and what is counted and told about it."""

    def __init__(self, *known: str) -> None:
        self.pool = Pool(known, time.monotonic, kind="decode")
        self.metrics = Metrics()
        self.members = Members(self.pool, NodeMetrics(self.metrics, {}))

    @property
    def nodes(self) -> list[str]:
        return list(self.pool.addresses())

    def errors(self, kind: str) -> float:
        return self.metrics.value("kvreturn_discovery_errors_total", pool="decode", kind=kind)


async def test_all_addresses_of_a_name_are_nodes() -> None:
    here, resolver = Here(), Resolver(vllm=[TWO, ONE, THREE])
    watch = NameWatch([NAME], 5.0, here.members, resolver)
    await watch.look()
    assert (here.nodes, resolver.asked) == ([ONE, TWO, THREE], [NAME])
    resolver.answers["vllm"] = [THREE]
    await watch.look()
    assert here.nodes == [THREE]


async def test_names_and_addresses_of_one_list_go_together() -> None:
    here, resolver = Here(), Resolver(vllm=[ONE], vllm_9=["10.0.0.9:8001"])
    await NameWatch([NAME, OTHER, FIXED], 5.0, here.members, resolver).look()
    assert here.nodes == [ONE, FIXED, "10.0.0.9:8001"]
    assert resolver.asked == [NAME, OTHER]


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (OSError("no route"), "failed"),
        (TimeoutError(), "failed"),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), "failed"),
        (socket.gaierror(socket.EAI_NONAME, "unknown name"), "empty"),
        ([], "empty"),
    ],
)
async def test_what_is_no_answer_leaves_the_pool_as_it_is_and_is_told_once(
    trouble: list[str] | Exception, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    here, resolver = Here(), Resolver(vllm=[ONE, TWO], vllm_9=[FIXED])
    watch = NameWatch([NAME, OTHER], 5.0, here.members, resolver)
    await watch.look()
    resolver.answers["vllm"] = trouble
    for _ in range(3):
        await watch.look()
    assert here.nodes == [ONE, TWO, FIXED]
    assert here.errors(kind) == 3
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{NAME} tells no decode nodes (")
    resolver.answers["vllm"] = [TWO]
    await watch.look()
    assert here.nodes == [TWO, FIXED]
    assert caplog.messages[1:] == [f"{NAME} tells decode nodes again"]


async def test_a_name_that_fails_after_a_reload_keeps_its_nodes() -> None:
    resolver = Resolver(vllm=[ONE], vllm_9=[TWO])
    pools = [Pool([], time.monotonic, kind="prefill"), Pool([FIXED], time.monotonic, kind="decode")]
    first = settings([NAME, OTHER], endpoints="router")
    discovery = Discovery(first, pools, NodeMetrics(Metrics(), {}), resolver)
    async with discovery:
        assert list(pools[0].addresses()) == [ONE, TWO]
        resolver.answers["vllm"] = socket.gaierror(socket.EAI_AGAIN, "try again")
        discovery.apply(settings([NAME, OTHER, THREE], endpoints="router"))
        await until(lambda: THREE in pools[0].addresses())
        assert list(pools[0].addresses()) == [ONE, TWO, THREE]
        discovery.apply(settings([OTHER, THREE], endpoints="router"))
        await until(lambda: ONE not in pools[0].addresses())
        assert list(pools[0].addresses()) == [TWO, THREE]


async def test_the_systems_resolver_tells_each_machine_once() -> None:
    assert await resolve("127.0.0.1", 8000) == ["127.0.0.1:8000"]
    assert await resolve("::1", 8000) == ["[::1]:8000"]
    assert await resolve("localhost", 8000) in (["127.0.0.1:8000"], ["[::1]:8000"])


def settings(prefill: object, **envoy: str) -> Settings:
    return Settings.model_validate({"pools": {"prefill": prefill, "decode": [FIXED]}, "envoy": envoy})


async def test_a_router_begins_with_what_is_found_and_follows_its_settings() -> None:
    resolver = Resolver(vllm=[ONE])
    first = settings({"dns": NAME, "interval": 0.01})
    pools = [Pool([], time.monotonic, kind="prefill"), Pool([FIXED], time.monotonic, kind="decode")]
    discovery = Discovery(first, pools, NodeMetrics(Metrics(), {}), resolver)
    async with discovery:
        assert list(pools[0].addresses()) == [ONE]
        resolver.answers["vllm"] = [ONE, TWO]
        await until(lambda: list(pools[0].addresses()) == [ONE, TWO])
        discovery.apply(settings([THREE]))
        assert list(pools[0].addresses()) == [THREE]
        resolver.asked.clear()
        discovery.apply(settings({"dns": NAME, "ranks": 2}))
        assert list(pools[0].addresses()) == [THREE]  # until there is an answer
        await until(lambda: pools[0].seats(ONE) == [f"{ONE}#0", f"{ONE}#1"])
        assert list(pools[1].addresses()) == [FIXED]
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


@pytest.mark.parametrize(
    ("pool", "endpoints", "expected"),
    [
        ([ONE], None, "bootstrap"),
        ([NAME], None, "bootstrap"),
        ({"static": [ONE]}, None, "bootstrap"),
        ({"dns": NAME}, None, "router"),
        ({"dns": NAME}, "bootstrap", "bootstrap"),
        ({"endpoint_slices": {"service": "vllm", "port": 8000}}, None, "router"),
        ([ONE], "router", "router"),
    ],
)
def test_who_tells_envoy_the_nodes(pool: object, endpoints: str | None, expected: str) -> None:
    envoy = {"endpoints": endpoints} if endpoints else {}
    assert settings(pool, **envoy).endpoints == expected
