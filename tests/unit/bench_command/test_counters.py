"""What nodes and routers counted, from their metrics."""

import aiohttp
import pytest

from kvreturn.bench.counters import CountersError, Meters
from support.bench import look
from support.envoy import unused_address
from support.nodes import FakePrefill, replies

P = """\
vllm:prompt_tokens_by_source_total{source="local_compute",engine="0"} 600
vllm:prompt_tokens_by_source_total{source="local_cache_hit",engine="0"} 100
vllm:prompt_tokens_by_source_total{source="external_kv_transfer",engine="0"} 300
vllm:nixl_bytes_transferred_sum{engine="0"} 4e9
vllm:nixl_xfer_time_seconds_sum{engine="0"} 2
vllm:nixl_num_failed_transfers_total{engine="0"} 1
vllm:cache_config_info{enable_prefix_caching="True",block_size="16"} 1
"""
ROUTER = """\
kvreturn_turns_total{outcome="hit",api="chat",model="m"} 3
kvreturn_turns_total{outcome="hit",api="chat",model="n"} 1
kvreturn_turns_total{outcome="first_turn",api="chat",model="other"} 9
kvreturn_turns_total{outcome="expired",api="chat",model="m"} 2
kvreturn_read_back_tokens_total 300
"""


async def test_several_nodes_and_routers_are_added_up() -> None:
    async with FakePrefill(replies(P.encode())) as p, FakePrefill(replies(ROUTER.encode())) as router:
        nodes, routers = ([f"http://{node.address}/metrics"] * 2 for node in (p, router))
        async with aiohttp.ClientSession() as session:
            seen = await Meters(nodes, routers, "m").look(session)
            rest = await Meters(routers=routers[:1], model="x").look(session)
    assert seen.turns == {"hit": 6, "expired": 4}
    assert rest.turns == {"first_turn": 9}  # a model without a label of its own
    assert (seen.local, seen.read, seen.computed) == (0.1, 0.3, 0.6)
    assert (seen.rate, seen.failed, seen.caching, seen.read_back) == (2e9, 2, True, 600)


def test_what_came_since_an_earlier_look_is_the_difference() -> None:
    before, after = look({"hit": 3, "expired": 1}, read=100), look({"hit": 8, "expired": 1, "slower": 1}, read=400)
    came = after.since(before)
    assert came.turns == {"hit": 5, "slower": 1}
    assert (came.prompt["external_kv_transfer"], came.read_back) == (300, 300)


async def test_without_meters_nothing_is_known() -> None:
    async with aiohttp.ClientSession() as session:
        seen = await Meters().look(session)
    assert (seen.caching, seen.routers, seen.local, seen.rate) == (None, False, None, None)


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("prefill", P.replace("vllm:", "kvreturn_"), "--prefill-metrics URL has no vllm:"),
        ("prefill", P.replace("cache_config_info", "x"), "has no vllm:cache_config_info"),
        ("routers", P, "--router-metrics URL has no kvreturn_"),
        ("routers", "<html>", "--router-metrics URL cannot be read"),
    ],
)
async def test_what_is_no_meter_is_told_with_its_option(kind: str, text: str, told: str) -> None:
    async with FakePrefill(replies(text.encode())) as node, aiohttp.ClientSession() as session:
        url = f"http://{node.address}/metrics"
        with pytest.raises(CountersError) as error:
            await (Meters([url]) if kind == "prefill" else Meters((), [url])).look(session)
    assert told in str(error.value).replace(url, "URL")


async def test_a_closed_port_is_told_with_its_option() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(CountersError, match=r"--router-metrics .* cannot be read: ClientConnectorError"):
            await Meters(routers=[f"http://{unused_address()}/metrics"]).look(session)
