"""Nodes' `/metrics`: what is read of them, how the nodes are asked, and what becomes of nodes that do not tell."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import pytest
from aiohttp import web

import kvreturn.upstream.pressure
from kvreturn.core.choice import Pressure
from kvreturn.upstream.pressure import MetricsError, PressureWatch, read_pressure
from support.nodes import FakePrefill, Handler, Seen, closed_port, dies, hangs, in_turn, replies

# As vLLM 0.32.0 writes it (v1/metrics/loggers.py): the gauges, with what comes near them in name.
METRICS = b"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 9671.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
# HELP vllm:num_requests_waiting_by_reason Sum of all reasons equals vllm:num_requests_waiting.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 3.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.8125
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="2000"} 1.0
# TYPE vllm:kvreturn_pinned_blocks gauge
vllm:kvreturn_pinned_blocks{engine="0",model_name="m"} 500.0
"""
TOLD = Pressure(kv_usage=0.8125, waiting=2, running=7, pinned=0.25)
TEXT = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
INTERVAL = 0.03125  # exact in binary


def edited(*changes: tuple[str, str]) -> bytes:
    text = METRICS.decode()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text.encode()


def second_engine() -> bytes:
    """Two engines (data parallel), in one family each; the second one has double of everything but size."""
    double = {"7.0": "14.0", "5.0": "10.0", "2.0": "4.0", "3.0": "6.0", "0.8125": "0.9", "500.0": "1000.0"}
    lines = []
    for line in METRICS.decode().splitlines():
        lines.append(line)
        if not line.startswith("#") and 'engine="0"' in line:
            name, value = line.replace('engine="0"', 'engine="1"').rsplit(" ", 1)
            lines.append(f"{name} {double.get(value, value)}")
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (METRICS, TOLD),
        (METRICS[METRICS.index(b"vllm:num_requests_running{") :], TOLD),
        (second_engine(), Pressure(0.9, 2 + 4, 7 + 14, 0.5)),
        (edited(("waiting_by_reason{", "elsewhere{")), Pressure(0.8125, 5, 7, 0.25)),  # before it was split
        (edited(("vllm:kvreturn_pinned_blocks{", "other{")), Pressure(0.8125, 2, 7, None)),  # stock
        (edited(('num_gpu_blocks="2000"', 'num_gpu_blocks="None"')), Pressure(0.8125, 2, 7, None)),
        (edited(('num_gpu_blocks="2000"', 'num_gpu_blocks="0"')), Pressure(0.8125, 2, 7, None)),
        (edited(('model_name="m"', 'model_name="a b} 9.0 \\\\"{"')), TOLD),  # label values may hold anything
        (edited(('{engine="0",model_name="m"} 7.0', " 7.0 1795963698000")), TOLD),  # no labels, but a time
        (edited(("500.0", "5e2"), ("0.8125", "8.125E-1")), TOLD),
    ],
)
def test_what_is_read(text: bytes, want: Pressure) -> None:
    assert read_pressure(text) == want


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>",
        b"\xff\xfe",
        b"python_info 1.0\n",  # --disable-log-stats
        edited(("vllm:kv_cache_usage_perc{", "vllm:gpu_cache_usage_perc{")),
        edited(("0.8125", "NaN")),
        edited(("} 7.0", "} +Inf")),
        edited(("} 5.0", "} five")),
        edited(("\nvllm:num_requests_running{", "\n#vllm:num_requests_running{")),
    ],
)
def test_text_without_the_gauges_is_an_error(text: bytes) -> None:
    with pytest.raises(MetricsError):
        read_pressure(text)


# --- asking ---


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watching(
    clock: Clock,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    *,
    through: str | None = None,
) -> PressureWatch:
    return PressureWatch(prefill, decode, through, clock=clock, interval=INTERVAL)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the watch has no events for tests
            await asyncio.sleep(0.005)


def metrics(text: bytes = METRICS, upstream: str = "") -> Handler:
    return replies(text, headers=TEXT | ({"x-kvreturn-upstream": upstream} if upstream else {}))


async def test_each_node_is_asked_directly_again_and_again(clock: Clock) -> None:
    busy, idle = FakePrefill(metrics()), FakePrefill(metrics(edited(("0.8125", "0.5"))))
    async with busy, idle, watching(clock, [busy.address], [idle.address]) as watch:
        assert watch.of(busy.address) is None
        await until(lambda: watch.of(busy.address) and watch.of(idle.address))
        assert watch.of(busy.address) == TOLD
        assert watch.of(idle.address) == Pressure(0.5, 2, 7, 0.25)
        assert watch.of("10.9.9.9:1") is watch.of(None) is None
        busy.handler = metrics(edited(("0.8125", "0.125")))
        await until(lambda: watch.of(busy.address) == Pressure(0.125, 2, 7, 0.25))
    assert {seen.path for seen in busy.seen} == {"/metrics"}
    assert busy.seen[0].headers["accept-encoding"] == "identity"
    asked = len(busy.seen)
    await asyncio.sleep(3 * INTERVAL)
    assert len(busy.seen) == asked  # nobody asks on


async def test_prefill_nodes_are_asked_through_envoy_and_known_by_who_answered(clock: Clock) -> None:
    async def envoy(seen: Seen) -> web.StreamResponse:
        asked = seen.headers["x-kvreturn-node"]
        answered = {"10.0.0.1:8100": "10.0.0.1:8100", "prefill:8100": "10.0.0.7:8100"}[asked]
        return await metrics(upstream=answered)(seen)

    listener, decode = FakePrefill(envoy), FakePrefill(metrics())
    prefill = ["10.0.0.1:8100", "prefill:8100"]
    async with listener, decode, watching(clock, prefill, [decode.address], through=listener.address) as watch:
        await until(lambda: watch.of("10.0.0.1:8100") and watch.of("10.0.0.7:8100") and watch.of(decode.address))
        assert watch.of("prefill:8100") is None  # which of the nodes behind that name was it?
    assert "x-kvreturn-node" not in decode.seen[0].headers


async def test_a_node_with_a_name_is_known_by_its_addresses_too(clock: Clock) -> None:
    async with FakePrefill(metrics()) as node:
        name = node.address.replace("127.0.0.1", "localhost")
        async with watching(clock, [], [name]) as watch:
            await until(lambda: watch.of(name))
            assert watch.of(name) == watch.of(node.address) == TOLD


async def test_what_a_node_told_is_stale_after_three_intervals(clock: Clock) -> None:
    node = FakePrefill(in_turn(metrics(), hangs))
    async with node, watching(clock, [node.address]) as watch:
        await until(lambda: watch.of(node.address))
        clock.now += 3 * INTERVAL
        assert watch.of(node.address) == TOLD
        clock.now += 0.001
        assert watch.of(node.address) is None


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "kvreturn"):
        yield lambda: [record.message for record in caplog.records]


async def test_endless_metrics_are_not_read_to_the_end(clock: Clock) -> None:
    async def endless(seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers=TEXT)
        await response.prepare(seen.request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"# x\n" * (1 << 18))
        return response

    async with FakePrefill(endless) as node, watching(clock) as watch:
        with pytest.raises(MetricsError, match="longer than 4 MiB"):
            await watch._look(node.address, None)


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (replies(b"", 404), "/metrics answers 404"),
        (replies(b"", 307, {"location": "/elsewhere"}), "/metrics answers 307"),
        (metrics(b"python_info 1.0\n"), "--disable-log-stats"),
        (hangs, "TimeoutError"),
        (dies, "Server disconnected"),
    ],
)
async def test_a_node_that_does_not_tell_is_said_once_and_asked_on(
    clock: Clock, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, handler: Handler, says: str
) -> None:
    if handler is hangs:
        monkeypatch.setattr(kvreturn.upstream.pressure, "_TIMEOUT", 0.05)
    node = FakePrefill(handler)
    async with node, watching(clock, [node.address]) as watch:
        await until(warnings)
        asked = len(node.seen)
        assert asked >= 3  # a node may start later than the router
        await until(lambda: len(node.seen) > asked + 2)
        assert watch.of(node.address) is None
        (said,) = warnings()
        assert says in said
        assert node.address in said
        node.handler = metrics()
        await until(lambda: watch.of(node.address))
        assert watch.of(node.address) == TOLD


async def test_an_address_that_refuses_does_not_keep_others_waiting(
    clock: Clock, warnings: Callable[[], list[str]]
) -> None:
    with closed_port() as refused:
        async with FakePrefill(metrics()) as node, watching(clock, [refused], [node.address, "no.such.invalid:1"]) as w:
            await until(lambda: len(warnings()) == 2)
            assert w.of(node.address) == TOLD
    assert sorted(refused in said for said in warnings()) == [False, True]
