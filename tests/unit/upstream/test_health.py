"""Active health checks over real HTTP."""

import time
from collections.abc import AsyncIterator

import pytest

from kvreturn.settings.nodes import Health
from kvreturn.upstream.health import HealthWatch
from kvreturn.upstream.pool import Pool
from support.envoy import Node, serving, unused_address
from support.harness import until

FAST = Health(interval=0.05, timeout=0.2)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node("n")
    async with serving(node):
        yield node


def pool_of(*nodes: str) -> Pool:
    return Pool(nodes, time.monotonic, kind="decode")


async def test_a_node_that_fails_its_checks_is_out_until_one_goes_well(node: Node) -> None:
    pool = pool_of(node.address)
    async with HealthWatch({pool: None}, FAST, time.monotonic):
        await until(lambda: pool.known(node.address))
        node.healthy = False
        await until(lambda: pool.states()[node.address] == "out")
        node.healthy = True
        # After its first second out, a check is made at once, not after an interval.
        await until(lambda: pool.states()[node.address] == "up")


async def test_a_node_that_no_check_reaches_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    address = unused_address()
    pool = pool_of(address)
    async with HealthWatch({pool: None}, FAST, time.monotonic):
        await until(lambda: caplog.messages)
    assert pool.states() == {address: "up"}
    assert len(caplog.messages) == 1
    assert f"no health check of decode node {address} has gone well yet (" in caplog.messages[0]


async def test_that_envoy_is_down_is_no_fault_of_nodes(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(node.address)
    pool.checked(node.address, well=True)
    watch = HealthWatch({pool: unused_address()}, FAST, time.monotonic)
    async with watch:
        for _ in range(3):
            await until(lambda: watch._running)
            await until(lambda: not watch._running)
    assert pool.states() == {node.address: "up"}
    assert caplog.messages == []


async def test_through_envoy_the_node_is_named(node: Node) -> None:
    pool = pool_of("10.9.9.9:8000")
    async with HealthWatch({pool: node.address}, FAST, time.monotonic):
        await until(lambda: pool.known("10.9.9.9:8000"))


async def test_nodes_that_come_are_checked_too(node: Node) -> None:
    pool = pool_of()
    async with HealthWatch({pool: None}, FAST, time.monotonic):
        pool.update([node.address])
        await until(lambda: pool.known(node.address))
