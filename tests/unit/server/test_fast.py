"""The fast lane, router side: turns whose answers are told of in parts."""

import asyncio
from typing import Any, NoReturn

import grpc
import pytest
from kvreturn.server.own_cluster import own_cluster

from kvreturn._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from kvreturn.config import Settings
from kvreturn.envoy import names
from kvreturn.server import fast
from kvreturn.server.fast import FastLane
from kvreturn.server.part import Part
from support.extproc import ALL_MODES, Envoy, Mode, Modes, Request, Response, body_message, headers_message
from support.harness import DECODE, Harness, settings
from support.nodes import carried_handle, chat, decode_events, handle

EVENTS = decode_events(params=handle())
TEXT = b"".join(EVENTS)
BUFFERED = Modes(request=Mode.BUFFERED, response=Mode.STREAMED)
SSE = {":status": "200", "content-type": "text/event-stream"}


class Context:
    """Of a call of the script."""

    def __init__(self, name: str, about: str) -> None:
        self._metadata = (("x-kvreturn-turn", name), ("x-kvreturn-part", about))

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise grpc.aio.AbortError(code, details)


def harness(**changes: Any) -> Harness:  # noqa: ANN401 - settings as YAML has them
    return Harness(settings(envoy={"lane": "fast"}, **changes))


def raw(text: bytes) -> bytes:
    """Packed, as the script does it where there is nothing to pack."""
    return b"raw %d\n%b" % (len(text), text)


async def call(router: Harness, name: str, about: str, text: bytes) -> bytes:
    context: Any = Context(name, about)
    return await router.service.fast.part(raw(text), context)


class Turn:
    """A turn on its way to the fast lane."""

    def __init__(self, router: Harness, *contents: str, **members: Any) -> None:  # noqa: ANN401 - JSON
        self._router = router
        self.envoy = router.envoy(BUFFERED)
        self._request = chat(*contents, **{"stream": True, **members})
        self.name = ""

    @property
    def metadata(self) -> dict[str, str]:
        """What the router has told Envoy with the request."""
        told: dict[str, str] = {}
        for answer in self.envoy.answers:
            fields = answer.dynamic_metadata.fields["kvreturn"].struct_value.fields
            told |= {key: value.string_value for key, value in fields.items()}
        return told

    async def begin(self) -> "Turn":
        """Up to the request's way to D."""
        await self.envoy.request(Request(pieces=[self._request]))
        self.name = self.metadata.get("turn", "")
        return self

    @property
    def prefill_body(self) -> bytes:
        """What P was asked."""
        return self._router.asks[-1].body

    async def enter(self, lane: str | None = None) -> Any:  # noqa: ANN401 - a message
        """The answer's headers; what the router says to them."""
        message = headers_message("response", SSE, node=DECODE)
        message.metadata_context.filter_metadata["kvreturn"].update({"lane": self.name if lane is None else lane})
        stream = self.envoy._stream
        await stream.send(message)
        return await stream.receive()

    async def over(self) -> bool:
        """Whether the router ends the stream, with OK."""
        return await self.envoy._stream.receive() is None

    async def tell(self, about: str, text: bytes) -> bytes:
        return await call(self._router, self.name, about, text)


async def test_a_turn_in_the_fast_lane_ends_as_in_the_other() -> None:
    seen = []
    for lane in ("portable", "fast"):
        router = Harness(settings(envoy={"lane": lane}))
        for contents in (("Hi",), ("Hi", "Good morning", "And?")):
            if lane == "portable":
                await router.turn(*contents, stream=True, modes=BUFFERED)
                continue
            turn = await Turn(router, *contents).begin()
            await turn.enter()
            assert await turn.over()
            await turn.tell("1 0", TEXT[:-14])
            assert router.handles == 1  # before the client has the end
            await turn.tell("2 1", TEXT[-14:])
        pages = [line for line in router.world.metrics.expose().decode().splitlines() if _counts(line)]
        seen.append((router.outcomes(), router.handles, router.records, pages))
    assert seen[0] == seen[1]
    assert seen[0][0] == {"first_turn": 1, "hit": 1}


def _counts(line: str) -> bool:
    """Whether it is a line of what happened, not of how long it took, or when, or by which lane."""
    others = ("_created", "_sum", "_bucket", "python", "process", "lane=")
    return not line.startswith("#") and not any(w in line for w in others)


async def test_the_router_lets_go_of_the_answer_at_its_headers() -> None:
    turn = await Turn(harness(), "Hi").begin()
    answer = await turn.enter()
    assert answer.mode_override.response_body_mode == Mode.NONE
    assert "content-length" in answer.response_headers.response.header_mutation.remove_headers
    assert await turn.over()


async def test_names_are_secrets_of_their_own() -> None:
    router = harness()
    names = [(await Turn(router, "Hi").begin()).name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(len(name) == 32 for name in names)


@pytest.mark.parametrize("claim", ["", "1" * 32], ids=["none", "another turn's"])
async def test_without_the_scripts_word_the_answer_goes_through_the_router(claim: str) -> None:
    router = harness()
    turn = await Turn(router, "Hi").begin()
    answer = await turn.enter(claim)
    assert not answer.HasField("mode_override")
    await turn.envoy._stream.send(body_message("response", TEXT, end=True))
    passed = await turn.envoy._stream.receive()
    assert passed
    assert b"kv_transfer_params" not in passed.response_body.response.body_mutation.body
    assert router.handles == 1
    await turn.envoy.finish()
    with pytest.raises(grpc.aio.AbortError):  # the name is of no use when the exchange is over
        await turn.tell("1 1", TEXT)


@pytest.mark.parametrize(
    ("modes", "request_"),
    [
        *((m, {"stream": True}) for m in ALL_MODES if m.response == Mode.FULL_DUPLEX_STREAMED),
        (BUFFERED, {"stream": False}),
    ],
    ids=str,
)
async def test_other_turns_are_not_named(modes: Modes, request_: dict[str, bool]) -> None:
    router = harness()
    envoy: Envoy = router.envoy(modes)
    await envoy.request(Request(pieces=[chat("Hi", **request_)]))
    assert not any("turn" in a.dynamic_metadata.fields["kvreturn"].struct_value for a in envoy.answers)


async def test_parts_may_overtake_one_another_and_the_headers() -> None:
    router = harness()
    turn = await Turn(router, "Hi").begin()
    parts = [asyncio.create_task(turn.tell(f"{i} {int(i == 3)}", e)) for i, e in ((3, EVENTS[-1]), (2, EVENTS[-2]))]
    parts.append(asyncio.create_task(turn.tell("1 0", b"".join(EVENTS[:-2]))))
    await asyncio.sleep(0)
    assert router.records == 0
    await turn.enter()
    await asyncio.gather(*parts)
    assert (router.handles, router.outcomes()) == (1, {"first_turn": 1})


async def test_a_turn_of_which_a_part_is_lost_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_OVERTAKEN", 0.01)
    router = harness()
    turn = await Turn(router, "Hi").begin()
    await turn.enter()
    await turn.tell("2 1", EVENTS[-2] + EVENTS[-1])
    assert (router.records, router.outcomes()) == (0, {"first_turn": 1})
    assert router.world.admission.live == 0


@pytest.mark.parametrize("name", ["", "0" * 32], ids=["none", "unknown"])
async def test_who_does_not_know_the_name_can_tell_nothing(name: str) -> None:
    router = harness()
    await (await Turn(router, "Hi").begin()).enter()
    with pytest.raises(grpc.aio.AbortError) as refused:
        await call(router, name, "1 1", TEXT)
    assert refused.value.args[0] == grpc.StatusCode.NOT_FOUND
    assert router.records == 0


async def test_a_part_that_comes_twice_counts_once() -> None:
    router = harness()
    turn = await Turn(router, "Hi").begin()
    await turn.enter()
    half = len(TEXT) // 2
    for about, text in (("1 0", TEXT[:half]), ("1 0", TEXT[:half]), ("2 1", TEXT[half:])):
        await turn.tell(about, text)
    assert router.handles == 1
    assert carried_handle((await Turn(router, "Hi", "Good morning", "And?").begin()).prefill_body) == handle()


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, True),
        ({"content-type": "application/json"}, False),
        ({"content-encoding": "identity"}, False),
        ({"trailer": "x"}, False),
    ],
    ids=str,
)
async def test_an_envoy_without_scripts_is_told_of_once_and_its_streams_take_the_portable_lane(
    headers: dict[str, str],
    said: bool,  # noqa: FBT001
) -> None:
    router = harness()
    for _ in range(2):
        answer = {"content-type": "text/event-stream", "transfer-encoding": "chunked", **headers}
        await router.play(
            Request(pieces=[chat("Hi", stream=True)]), Response(decode_events(), headers=answer), BUFFERED
        )
    assert [w for w in router.world.warnings if "has no scripts" in w] == router.world.warnings[: int(said)]
    streamed = router.metric("answers_streamed_total", lane="portable")
    assert streamed == (0 if "application/json" in headers.values() else 2)


async def test_the_lane_of_a_turn_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    router = harness()
    turn = await Turn(router, "Hi").begin()
    await turn.enter()
    await turn.tell("1 1", TEXT)
    assert " lane=fast " in caplog.text
    assert router.metric("answers_streamed_total", lane="fast") == 1
    assert not router.world.warnings


async def test_a_turn_is_told_of_once() -> None:
    router = harness()
    turn = await Turn(router, "Hi").begin()
    await turn.enter()
    await turn.tell("1 1", TEXT)
    with pytest.raises(grpc.aio.AbortError):
        await turn.tell("2 1", TEXT)
    assert router.handles == 1


@pytest.mark.parametrize(
    ("about", "text"), [("1 1", b"data: of an older script\n\n"), ("", b""), ("1", b""), ("x 1", b"")]
)
async def test_scripts_of_another_version_are_told_of_once_and_harm_nothing(
    about: str, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    router = harness()
    turn = await Turn(router, "Hi").begin()
    await turn.enter()
    for _ in range(2):
        context: Any = Context(turn.name, about)
        with pytest.raises(grpc.aio.AbortError):
            await router.service.fast.part(text, context)
    assert caplog.text.count("make the bootstrap again") == 1
    await turn.tell("1 1", TEXT)
    assert router.handles == 1


async def test_what_is_begun_is_done_though_the_script_waits_no_longer() -> None:
    router = harness()
    turn = await Turn(router, "Hi").begin()
    await turn.enter()
    work = asyncio.create_task(turn.tell("1 1", TEXT))
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    async with asyncio.timeout(5):
        while router.outcomes() != {"first_turn": 1}:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
    assert router.handles == 1


@pytest.mark.parametrize("overtakes", [False, True])
async def test_the_end_of_an_exchange_that_nobody_else_tells_comes_by_the_access_log(
    monkeypatch: pytest.MonkeyPatch, *, overtakes: bool
) -> None:
    """It may be here before the answer's headers are: that is another connection."""
    monkeypatch.setattr(fast, "_BEHIND", 0.05)
    router = harness()
    turn = await Turn(router, "Hi").begin()
    if not overtakes:
        await turn.enter()
    entries = StreamAccessLogsMessage()
    for name in ("another", turn.name):
        entry = entries.http_logs.log_entry.add()
        entry.common_properties.response_flags = b"\x78\x01"  # downstream_connection_termination
        entry.common_properties.metadata.filter_metadata["kvreturn"].update({"turn": name})

    async def messages() -> Any:  # noqa: ANN401 - an iterator
        yield entries

    context: Any = None
    logs = asyncio.create_task(router.service.fast.logs(messages(), context))
    if overtakes:
        await logs
        await turn.enter()
    await turn.tell("1 0", EVENTS[0])
    assert router.metric("live_streams") >= 1  # its own stream may be open still
    async with asyncio.timeout(5):
        while router.world.admission.live:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    await logs
    assert router.metric("live_streams") == 0
    assert router.outcomes() == {"first_turn": 1}
    assert router.metric("turns_incomplete_total") == 1
    assert (router.records, router.world.admission.live) == (0, 0)


async def test_the_first_token_is_timed_by_when_it_came() -> None:
    router = harness()
    turn = await Turn(router, "Hi").begin()
    await turn.enter()
    clock: Any = router.clock
    clock.now += 10  # since the request began
    text = b"".join(EVENTS)
    role, token = len(EVENTS[0]), len(EVENTS[1])
    await turn.tell(f"1 1 {role}:8000 {token}:7500 {len(EVENTS[2])}:100", text)
    (line,) = [x for x in router.world.metrics.expose().decode().splitlines() if "first_token_seconds_sum" in x]
    assert float(line.rsplit(" ", 1)[1]) == pytest.approx(2.5)


async def test_a_drain_waits_for_turns_in_the_fast_lane() -> None:
    router = harness()
    turn = await Turn(router, "Hi").begin()
    await turn.enter()
    drain = asyncio.create_task(router.service.fast.drained(5))
    await asyncio.sleep(0.01)
    assert not drain.done()
    await turn.tell("1 1", TEXT)
    await drain
    assert router.handles == 1


async def test_a_drain_ends_what_does_not_end() -> None:
    router = harness()
    await (await Turn(router, "Hi").begin()).enter()
    await router.service.fast.drained(0.01)
    assert router.outcomes() == {"first_turn": 1}


def test_workers_are_called_by_the_names_that_the_bootstrap_has() -> None:
    own = settings(envoy={"lane": "fast"}, workers=3, store={"url": "redis://127.0.0.1:1"}, listen="unix:/r.sock")
    workers = [own_cluster(own.worker(i)) for i in range(3)]
    assert workers == [f"kvreturn_router@unix:/r.sock{end}" for end in ("", ".1", ".2")]
    assert workers == [names.one_router(listen) for listen in own.router_listens()]


def test_parts_are_read_as_the_script_writes_them() -> None:
    part = Part.read("3 1 2:1500 1:20", raw(b"abcde"))
    assert (part.number, part.last) == (3, True)
    assert list(part.pieces()) == [(b"ab", 1.5), (b"c", 0.02), (b"de", 0.0)]


@pytest.mark.parametrize(
    ("listen", "routers", "cluster"),
    [
        ("127.0.0.1:9090", [], "kvreturn_router@127.0.0.1:9090"),
        ("0.0.0.0:9090", ["10.0.0.1:9090"], "kvreturn_router@10.0.0.1:9090"),
        ("10.0.0.2:9090", ["10.0.0.1:9090", "10.0.0.2:9090"], "kvreturn_router@10.0.0.2:9090"),
        ("0.0.0.0:9090", ["10.0.0.1:9090", "10.0.0.2:9090"], ""),
        ("0.0.0.0:9090", ["192.0.2.1:9090", "127.0.0.2:9091", "127.0.0.2:9090"], "kvreturn_router@127.0.0.2:9090"),
        ("0.0.0.0:9090", ["127.0.0.1:9090", "127.0.0.2:9090"], ""),  # both may be it
        ("0.0.0.0:9090", ["router:9090"], ""),  # a name may stand for several
        ("router-1:9090", ["router-1:9090", "router-2:9090"], "kvreturn_router@router-1:9090"),
        ("unix:/r.sock", ["10.0.0.1:9090", "10.0.0.2:9090"], ""),
    ],
)
def test_envoy_calls_the_router_that_has_the_turn(listen: str, routers: list[str], cluster: str) -> None:
    own: Settings = settings(listen=listen, envoy={"lane": "fast", "routers": routers})
    assert FastLane(Harness(own).world).cluster == cluster
