"""bench/lanes: what the client notices, how figures come about, and when a target counts as met."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest

from kvreturn.demo.stack import free_addresses
from lanes.candidates import Skipped
from lanes.figures import Estimate, figures
from lanes.noise import Noise, words
from lanes.page import render
from lanes.plan import SHORT
from lanes.run import Run, Sample
from lanes.targets import Target, _below, targets
from lanes.tools import Load, build, request_body, run_client

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="node and client are built by cc")
HANDLE = b',"kv_transfer_params":{'
QUIET, LOUD = Noise(0.1, 1.0, 0.1), Noise(5.0, 0.5, 9.0)
Chunks = list[bytes]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextlib.asynccontextmanager
async def node() -> AsyncIterator[int]:
    port = port_of(free_addresses(1)[0])
    process = await asyncio.create_subprocess_exec(str(build("node")), str(port))
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                break
            await asyncio.sleep(0.02)
        yield port
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def relay(to: int, change: Callable[[Chunks], Chunks], end: bytes = b"0\r\n\r\n") -> AsyncIterator[int]:
    """Between client and node: gets the whole answer, and sends it with changed chunks."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        above, below = await asyncio.open_connection("127.0.0.1", to)
        below.write(head + await reader.readexactly(length))
        writer.write(await above.readuntil(b"\r\n\r\n"))
        chunks = []
        while size := int(await above.readline(), 16):
            chunks.append(await above.readexactly(size))
            await above.readline()
        for chunk in change(chunks):
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        writer.write(end)
        if end:
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until the client closes, which may be before it has read all
        for one in (below, writer):
            one.close()
            with contextlib.suppress(ConnectionError):
                await one.wait_closed()

    tasks: list[asyncio.Task[None]] = []

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(serve(reader, writer)))

    async with await asyncio.start_server(begin, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*tasks)


def stripped(chunks: Chunks) -> Chunks:
    head, _, _ = chunks[2].partition(HANDLE)
    return [*chunks[:2], head + b"}\n\n", chunks[3]]


@needs_cc
@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda c: c, {"finished": 1, "leaked": 1}),
        (stripped, {"finished": 1, "stripped": 1}),
        (lambda c: [b"".join(c)], {"finished": 1, "leaked": 1}),
        (lambda c: [bytes([byte]) for byte in b"".join(c)], {"finished": 1, "leaked": 1}),
        (lambda c: [c[0].replace(b"null", b"nulL"), *c[1:]], {"corrupt": 1, "failed": 1}),
        (lambda c: c[1:], {"corrupt": 1, "failed": 1}),
        (lambda c: [c[0], *c[2:]], {"corrupt": 1, "failed": 1}),
        (lambda c: [c[1], c[0], *c[2:]], {"corrupt": 1, "failed": 1}),
        (lambda c: [c[0], *c], {"corrupt": 1, "failed": 1}),
        (lambda c: c[:3], {"corrupt": 1, "failed": 1, "leaked": 1}),
        (lambda c: [*c[:2], c[2].replace(HANDLE, HANDLE + b'"x":1,'), c[3]], {"corrupt": 1, "failed": 1}),
    ],
    ids=[
        "as it is",
        "stripped",
        "one chunk",
        "byte by byte",
        "a byte",
        "first",
        "second",
        "order",
        "twice",
        "done",
        "handle",
    ],
)
async def test_the_client_notices_what_happens_to_a_stream(
    change: Callable[[Chunks], Chunks], seen: dict[str, int]
) -> None:
    async with node() as below, relay(below, change) as port:
        result = await run_client(port, Load(1, 0), [])
    kinds = ("finished", "failed", "corrupt", "leaked", "stripped", "unfinished")
    assert {kind: result[kind] for kind in kinds if result[kind]} == seen


@needs_cc
async def test_the_client_notices_that_a_stream_breaks_off() -> None:
    async with node() as below, relay(below, lambda c: c[:1], end=b"") as port:
        result = await run_client(port, Load(1, 0), [])
    assert (result["finished"], result["failed"]) == (0, 1)


@needs_cc
async def test_a_paced_stream_keeps_its_schedule() -> None:
    load = Load(5, 100, seconds=0.5, warm=0.2)
    async with node() as port:
        result = await run_client(port, load, [])
    assert result["finished"] == 5
    assert result["window_tokens"] == pytest.approx(5 * 100 * 0.5, rel=0.1)
    assert result["gap_us"]["p50"] == pytest.approx(10_000, rel=0.2)


def test_a_request_has_about_the_size_that_was_asked_for() -> None:
    assert [len(request_body(Load(1, 0, body=n))) for n in (10_000, 1_000_000)] == [
        pytest.approx(n, rel=0.05) for n in (10_000, 1_000_000)
    ]


@pytest.mark.parametrize(
    ("value", "unsure", "quiet", "verdict"),
    [
        (1.0, 0.5, True, "met"),
        (1.0, 0.5, False, "met"),
        (1.9, 0.5, True, "too noisy"),
        (2.1, 0.5, True, "too noisy"),
        (3.0, 0.5, True, "not met"),
        (3.0, 0.5, False, "too noisy"),
        (-40.0, 30.0, True, "too noisy"),
    ],
)
def test_a_target_is_met_or_not_beyond_all_doubt(value: float, unsure: float, *, quiet: bool, verdict: str) -> None:
    assert _below("x", Estimate(value, [value], unsure), 2.0, "ms", quiet=quiet).verdict == verdict


@pytest.mark.parametrize(("looks", "told"), [([QUIET] * 9 + [LOUD], False), ([QUIET, LOUD], True)])
def test_it_says_when_the_machine_was_noisy(looks: list[Noise], *, told: bool) -> None:
    assert (words(looks) is not None) == told


def sample(candidate: str, number: int, delay: float, cpu: float, *, streams: int = 20) -> Sample:
    quantiles = {"n": 900, "p50": delay, "p90": delay, "p99": 2 * delay, "max": 3 * delay}
    processes = {f"{candidate}-1": {"cpu_s": cpu, "rss_before": 0, "rss": 30 << 20}}
    result = {
        **dict.fromkeys(("failed", "corrupt", "unfinished"), 0),
        **dict.fromkeys(("lag_us", "gap_us", "late_us"), quantiles),
        "window_tokens": 720,
        "window_seconds": 1.2,
        "processes": processes,
    }
    return Sample(candidate, number, SHORT.load(streams), result, QUIET)


def measured() -> Run:
    """Two rounds: the plain Envoy took 100 and 200 us, then 100 and 140 us; the lane 500 us, then 620 us."""
    found = Run(SHORT, labels={"envoy": "plain Envoy", "portable": "portable lane"})
    found.kinds = {"envoy": {"envoy-1": "envoy"}, "portable": {"portable-1": "python"}}
    found.idle = {name: {f"{name}-1": 10 << 20} for name in found.labels}
    found.loads = [
        *(sample("envoy", 0, 100, 0.009), sample("portable", 0, 500, 0.09), sample("envoy", 0, 200, 0.009)),
        *(sample("envoy", 1, 100, 0.018), sample("portable", 1, 620, 0.09), sample("envoy", 1, 140, 0.018)),
    ]
    return found


def test_what_is_added_is_the_difference_to_the_plain_envoy_of_the_same_round() -> None:
    lane = figures(measured()).of_load("portable", 20)
    assert lane
    assert lane.added_p50.rounds == pytest.approx([0.35, 0.5])
    assert lane.added_p50.value == pytest.approx(0.425)
    assert lane.added_p50.unsure == pytest.approx(
        0.0375
    )  # a quarter of 0.15; half of what the floor differs by is 0.035
    assert lane.survived == 1
    assert lane.came == pytest.approx(1.0)


def test_cpu_time_is_told_for_a_thousand_tokens_and_memory_for_a_stream() -> None:
    lane = figures(measured()).of_load("portable", 20)
    assert lane
    assert lane.cpu.value == pytest.approx(125.0)  # ms: 0.09 s for 720 tokens
    assert lane.python.value == pytest.approx(125.0)  # us for one token
    assert lane.cpu_ratio.rounds == pytest.approx([10.0, 5.0])
    assert lane.memory.value == pytest.approx(1024.0)  # KiB: 20 MiB for 20 streams


def test_what_a_process_uses_at_rest_is_no_tokens_cost() -> None:
    found = measured()
    found.rest = {"portable": {"portable-1": 0.015}}  # 0.018 s in a window of 1.2 s
    lane = figures(found).of_load("portable", 20)
    assert lane
    assert lane.cpu.value == pytest.approx(100.0)  # ms: 0.072 s for 720 tokens
    assert lane.python.value == pytest.approx(100.0)
    found.rest = {"portable": {"portable-1": 1.0}}
    lane = figures(found).of_load("portable", 20)
    assert lane
    assert lane.cpu.value == 0


@needs_cc
async def test_an_answer_without_a_pace_ends_apart_from_its_first_token() -> None:
    """Told by the quickest of many: who is late himself gets both at once."""
    apart = []
    async with node() as below, aiohttp.ClientSession() as session:
        for _ in range(20):
            async with session.post(
                f"http://127.0.0.1:{below}/v1/chat/completions", data=request_body(Load(1, 0))
            ) as answer:
                pieces = [(time.monotonic(), piece) async for piece in answer.content.iter_any()]
            if b"[DONE]" not in pieces[0][1]:
                apart.append(pieces[-1][0] - pieces[0][0])
    assert max(apart) > 0.003


def test_the_page_tells_targets_and_what_could_not_run() -> None:
    found = measured()
    found.skipped = [Skipped("proxy", "vLLM's <proxy>", "it is not there")]
    worked_out = figures(found)
    page = render(found, worked_out, targets(found, worked_out), {"loads": "", "first": "", "waterfall": ""})
    assert "vLLM&#x27;s &lt;proxy&gt;: it is not there" in page
    verdicts: dict[str, Target] = {t.figure: t for t in targets(found, worked_out)}
    assert verdicts["portable lane: token delay added at 20x30, p50"].verdict == "met"
    assert verdicts["fast lane: token delay added at 20x30, p50"].verdict == "not measured"
