"""The fast lane, router side: answers in parts, answers by ext_proc, and the ends of which only Envoy's log tells."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvreturn.server import fast, fast_exchange
from kvreturn.server.part import Begun, Part
from kvreturn.server.record import TurnRecord
from support.calls import Answered, Log, Script, calling, left
from support.events import response_events
from support.extproc import Modes, Request, Response, headers_message
from support.harness import DECODE, Harness, harness, settings, until
from support.nodes import StubPrefill, carried_handle, chat, decode_body, decode_events, handle
from support.streams import LocalStream
from support.turns import compact

EVENTS = decode_events(params=handle())
TEXT = b"".join(EVENTS)
SSE = {"content-type": "text/event-stream"}
CHUNKED = {**SSE, "transfer-encoding": "chunked"}
JSON = {"content-type": "application/json"}
NODE = "10.0.0.4:8200"  # Envoy may take another one than the router has named
BEGUN = f"200,0,{DECODE}"


class Turn:
    """A turn of which a script tells.

    Attributes:
        router: that it tells.
        script: that tells.
        name: of the turn; empty until the router has given it one.
        meta: all that the router has told Envoy.
    """

    def __init__(self, router: Harness, script: Script) -> None:
        self.router = router
        self.script = script
        self.name = ""
        self.meta: dict[str, str] = {}

    async def begin(self, *contents: str, **members: Any) -> "Turn":  # noqa: ANN401 - JSON
        """Up to the request's way to D."""
        body = chat(*(contents or ("Hi",)), **{"stream": True, **members})
        told = await self.script.request(Request(pieces=[body]))
        assert told.status is None
        self.meta, self.name = told.meta, told.meta["turn"]
        return self

    async def tell(self, about: str, text: bytes = b"") -> int:
        return await self.script.part(self.name, about, text)


@contextlib.asynccontextmanager
async def turning(**changes: Any) -> AsyncIterator[Turn]:  # noqa: ANN401 - settings as YAML has them
    """A turn that is still to begin, and a router that counts nothing more when all is over."""
    router = harness(**changes)
    async with calling(router) as script:
        yield Turn(router, script)
    assert left(router) == []


async def _waiting(turn: Turn) -> Answered:
    """The router has the headers of a JSON answer by ext_proc, and waits for its body."""
    envoy = Answered(LocalStream(turn.router.service), turn.name)
    await envoy._give(headers_message("response", {":status": "200", **JSON}))
    assert await envoy._stream.receive()
    return envoy


async def test_a_turn_in_the_fast_lane_ends_as_in_the_other() -> None:
    seen = []
    for lane in ("portable", "fast"):
        router = Harness(settings(envoy={"lane": lane}))
        async with calling(router) as script:
            for contents in (("Hi",), ("Hi", "Good morning", "And?")):
                if lane == "portable":
                    await router.turn(*contents, stream=True)
                    continue
                turn = await Turn(router, script).begin(*contents)
                assert await turn.tell(f"1 0 {BEGUN}", TEXT[:-14]) == 200
                assert router.handles == 1  # before the client has the end
                assert await turn.tell("2 1", TEXT[-14:]) == 200
        assert left(router) == []
        pages = [line for line in router.world.metrics.expose().decode().splitlines() if _counts(line)]
        seen.append((router.outcomes(), router.handles, router.records, pages))
    assert seen[0] == seen[1]
    assert seen[0][0] == {"first_turn": 1, "hit": 1}


def _counts(line: str) -> bool:
    """Whether it is a line of what happened, not of how long it took, or when, or by which lane."""
    others = ("_created", "_sum", "_bucket", "python", "process", "lane=")
    return not line.startswith("#") and not any(w in line for w in others)


async def test_the_lane_of_a_turn_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with turning() as turn:
        await turn.begin()
        assert turn.router.metric("live_streams") == 1  # between its call and its first part, too
        await turn.tell(f"1 1 {BEGUN}", TEXT)
        assert " lane=fast " in caplog.text
        assert turn.router.metric("answers_streamed_total", lane="fast") == 1
        assert not turn.router.world.warnings


@pytest.mark.parametrize(("told", "kept"), [(NODE, NODE), ("", DECODE)], ids=["another one", "the named one"])
async def test_the_node_that_envoy_has_chosen_keeps_the_turn(told: str, kept: str) -> None:
    async with turning(pools={"prefill": ["10.0.0.1:8100"], "decode": [DECODE, NODE]}) as turn:
        await turn.begin()
        assert turn.meta["decode_node"] == DECODE
        await turn.tell(f"1 1 200,0,{told}", TEXT)
        again = await Turn(turn.router, turn.script).begin("Hi", "Good morning", "And?")
        assert again.meta["decode_node"] == kept
        turn.router.service.fast.leave(again.name)


async def test_parts_may_overtake_one_another() -> None:
    async with turning() as turn:
        await turn.begin()
        late = [asyncio.create_task(turn.tell("3 1", EVENTS[-1])), asyncio.create_task(turn.tell("2 0", EVENTS[-2]))]
        await until(lambda: len(turn.router.service.fast._working) == 2)
        assert turn.router.records == 0
        assert await turn.tell(f"1 0 {BEGUN}", b"".join(EVENTS[:-2])) == 200
        assert await asyncio.gather(*late) == [200, 200]
        assert (turn.router.handles, turn.router.outcomes()) == (1, {"first_turn": 1})


async def test_a_turn_of_which_a_part_is_lost_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_exchange, "OVERTAKEN", 0.01)
    async with turning() as turn:
        await turn.begin()
        await turn.tell(f"1 0 {BEGUN}", EVENTS[0])
        await turn.tell("3 1", EVENTS[-2] + EVENTS[-1])
        assert (turn.router.records, turn.router.outcomes()) == (0, {"first_turn": 1})
        assert turn.router.metric("turns_incomplete_total") == 1


@pytest.mark.parametrize("name", ["", "0" * 32], ids=["none", "unknown"])
async def test_who_does_not_know_the_name_can_tell_nothing(name: str) -> None:
    async with turning() as turn:
        await turn.begin()
        assert await turn.script.part(name, f"1 1 {BEGUN}", TEXT) == 404
        assert turn.router.records == 0
        turn.router.service.fast.leave(turn.name)


async def test_a_part_that_comes_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    plain = TurnRecord.body

    def body(self: TurnRecord, data: bytes) -> None:
        read.append(data)
        plain(self, data)

    monkeypatch.setattr(TurnRecord, "body", body)
    async with turning() as turn:
        await turn.begin()
        parts = [(f"1 0 {BEGUN}", EVENTS[0]), ("2 0", EVENTS[1]), ("3 1", b"".join(EVENTS[2:]))]
        for about, text in (parts[0], parts[0], parts[1], parts[1], parts[0], parts[2]):
            assert await turn.tell(about, text) == 200
        assert b"".join(read) == TEXT
        assert turn.router.handles == 1
        again = await Turn(turn.router, turn.script).begin("Hi", "Good morning", "And?")
        assert carried_handle(turn.router.asks[-1].body) == handle()
        turn.router.service.fast.leave(again.name)


async def test_a_turn_is_told_of_once() -> None:
    async with turning() as turn:
        await turn.begin()
        assert await turn.tell(f"1 1 {BEGUN}", TEXT) == 200
        assert await turn.tell("2 1", TEXT) == 404
        assert turn.router.handles == 1


@pytest.mark.parametrize(
    ("about", "packed"),
    [
        (f"1 1 {BEGUN}", False),
        ("", True),
        ("1", True),
        ("1 1", True),
        ("1 1 200,0", True),
        ("1 1 ok,0,n:1", True),
        (f"x 1 {BEGUN}", True),
        (f"1 1 {BEGUN} 5", True),
    ],
)
async def test_parts_of_another_version_are_told_of_once_and_harm_nothing(
    about: str, *, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with turning() as turn:
        await turn.begin()
        for _ in range(2):
            assert await turn.script.part(turn.name, about, b"data: of an older script\n\n", packed=packed) == 400
        assert caplog.text.count("make the bootstrap again") == 1
        await turn.tell(f"1 1 {BEGUN}", TEXT)
        assert turn.router.handles == 1


async def test_a_turn_leaves_nothing_if_a_part_of_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    async with turning() as turn:
        await turn.begin()
        assert await turn.tell(f"1 0 {BEGUN}", EVENTS[0]) == 200
        with monkeypatch.context() as broken:
            broken.setattr(TurnRecord, "body", fails)
            named = {"x-kvreturn-turn": turn.name, "x-kvreturn-part": "2 0"}
            async with turn.script.http.post("/kvreturn/part", headers=named, data=b"") as said:
                assert (said.status, "x-kvreturn-reply" in said.headers) == (500, False)
        assert await turn.tell("3 1", b"".join(EVENTS[2:])) == 404
        assert (turn.router.records, turn.router.outcomes()) == (0, {"first_turn": 1})


async def test_what_is_begun_is_done_though_the_script_waits_no_longer() -> None:
    async with turning() as turn:
        await turn.begin()
        lane = turn.router.service.fast
        work = asyncio.create_task(lane.part(turn.name, Part.read(f"1 1 {BEGUN}", b"raw %d\n%b" % (len(TEXT), TEXT))))
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await until(lambda: turn.router.outcomes() == {"first_turn": 1})
        assert turn.router.handles == 1


async def test_the_first_event_of_an_answer_that_is_kept_is_enough_to_ask_for_it() -> None:
    events = response_events(params=handle())
    router = harness(pools={"prefill": ["10.0.0.1:8100"], "decode": [DECODE, NODE]})
    async with calling(router) as script:
        body = compact({"model": "m", "input": "Hi", "stream": True})
        meta = (await script.request(Request("/v1/responses", [body], headers=JSON))).meta
        assert "early" in meta
        await script.part(meta["turn"], f"1 0 200,0,{NODE}", events[0])
        stored = await script.request(Request("/v1/responses/resp_1", method="GET"))
        assert stored.meta["decode_node"] == NODE
        await script.part(meta["turn"], "2 1", b"".join(events[1:]))
        await script.by_ext_proc(stored.meta["turn"], Response([b"{}"], headers=JSON))
    assert left(router) == []


async def test_the_first_token_is_timed_by_when_it_came() -> None:
    async with turning() as turn:
        await turn.begin()
        clock: Any = turn.router.clock
        clock.now += 10  # since the request began
        role, token = len(EVENTS[0]), len(EVENTS[1])
        await turn.tell(f"1 1 200,8500,{DECODE} {role}:8000 {token}:7500 {len(EVENTS[2])}:100", TEXT)
        page = turn.router.world.metrics.expose().decode()
        (line,) = [x for x in page.splitlines() if "first_token_seconds_sum" in x]
        assert float(line.rsplit(" ", 1)[1]) == pytest.approx(2.5)


def test_parts_are_read_as_the_script_writes_them() -> None:
    part = Part.read("3 1 2:1500 1:20", b"raw 5\nabcde")
    assert (part.number, part.last, part.begun) == (3, True, None)
    assert list(part.pieces()) == [(b"ab", 1.5), (b"c", 0.02), (b"de", 0.0)]
    first = Part.read("1 0 200,250,10.0.0.4:8200 2:7", b"raw 5\nabcde")
    assert (first.last, first.begun) == (False, Begun(200, 0.25, NODE))
    assert list(first.pieces()) == [(b"ab", 0.007), (b"cde", 0.0)]
    assert Part.read("1 1 204,0,", b"").begun == Begun(204, 0.0, None)


class TestAnswersByExtProc:
    """What no script takes on: one JSON text, refusals, what is compressed, nodes that speak HTTP/2."""

    async def test_one_json_text(self) -> None:
        async with turning() as turn:
            await turn.begin(stream=False)
            assert "lane" not in turn.meta
            body = decode_body(params=handle())
            envoy = await turn.script.by_ext_proc(
                turn.name, Response([body[:90], body[90:]], headers=JSON, node=DECODE)
            )
            assert envoy.client.body == decode_body()
            assert (turn.router.handles, turn.router.outcomes()) == (1, {"first_turn": 1})
            assert await turn.tell(f"1 1 {BEGUN}", TEXT) == 404  # the name is of no use when the exchange is over

    async def test_a_stream_though_a_script_could(self) -> None:
        async with turning() as turn:
            await turn.begin()
            assert turn.meta["lane"] == "1"
            envoy = await turn.script.by_ext_proc(turn.name, Response(EVENTS, headers=SSE, node=DECODE, trailers=True))
            assert envoy.client.body == b"".join(decode_events())
            assert turn.router.handles == 1
            assert turn.router.metric("answers_streamed_total", lane="portable") == 1

    @pytest.mark.parametrize(("encoding", "status"), [("gzip", 200), ("br", 502)])
    async def test_a_compressed_one(self, encoding: str, status: int) -> None:
        async with turning() as turn:
            await turn.begin(stream=False)
            headers = {**JSON, "content-encoding": encoding}
            packed = gzip.compress(decode_body(params=handle()))
            envoy = await turn.script.by_ext_proc(turn.name, Response([packed], headers=headers, node=DECODE))
            assert envoy.client.status == status
            assert b"kv_transfer_params" not in envoy.client.body
            assert turn.router.handles == (status == 200)

    async def test_a_refusal_comes_without_what_it_says_of_the_handle(self) -> None:
        async with turning() as turn:
            await turn.begin()
            refusal = compact({"error": {"message": "kv_transfer_params: no", "type": "BadRequestError", "code": 400}})
            envoy = await turn.script.by_ext_proc(turn.name, Response([refusal], 400, JSON, node=DECODE))
            assert envoy.client.status == 400
            assert json.loads(envoy.client.body)["error"]["code"] == 400
            assert turn.router.metric("turn_errors_total", type="400") == 1

    async def test_the_client_gets_its_own_id_back_and_no_other_routers_headers(self) -> None:
        router = harness()
        async with calling(router) as script:
            request = Request(pieces=[chat("Hi")], headers={**JSON, "x-request-id": "mine"})
            turn = (await script.request(request)).meta["turn"]
            headers = {**JSON, "x-request-id": "ours", "x-prefiller-url": "inside"}
            envoy = await script.by_ext_proc(turn, Response([decode_body()], headers=headers))
        assert envoy.client.headers
        assert envoy.client.headers["x-request-id"] == "mine"
        assert "x-prefiller-url" not in envoy.client.headers

    @pytest.mark.parametrize("lane", ["fast", "portable"])
    async def test_nobody_elses(self, lane: str) -> None:
        """The router that had the turn is gone: what it would have taken out stays in, so nothing passes."""
        router = harness(envoy={"lane": lane})
        async with calling(router) as script:
            envoy = await script.by_ext_proc("0" * 32, Response([decode_body(params=handle())], headers=JSON))
        assert envoy.client.status == 502
        assert json.loads(envoy.client.body)["error"]["message"].startswith("kvreturn: ")
        assert left(router) == []

    async def test_only_one_stream_has_it(self) -> None:
        async with turning() as turn:
            await turn.begin(stream=False)
            first = await _waiting(turn)
            second = await turn.script.by_ext_proc(turn.name, Response([decode_body()], headers=JSON))
            assert second.client.status == 502
            assert await turn.tell(f"1 1 {BEGUN}", TEXT) == 404
            assert turn.router.metric("live_streams") == 1
            first._stream.cancel()
            await until(lambda: not left(turn.router))
            assert turn.router.outcomes() == {"first_turn": 1}
            assert turn.router.metric("turns_incomplete_total") == 1

    async def test_the_end_of_the_stream_is_the_end_of_the_exchange(self) -> None:
        async with turning() as turn:
            await turn.begin(stream=False)
            log = Log(turn.router)
            envoy = await _waiting(turn)
            log.over(turn.name, broken=False)  # of no account now
            await log.close()
            turn.router.service.fast.leave(turn.name)
            assert turn.router.world.admission.live == 1
            await envoy._stream.half_close()
            await until(lambda: not left(turn.router))

    async def test_a_failure_inside_is_an_error_of_the_api(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("planted")

        async with turning() as turn:
            await turn.begin(stream=False)
            monkeypatch.setattr(fast_exchange.FastExchange, "_response_begins", fails)
            envoy = await turn.script.by_ext_proc(turn.name, Response([decode_body()], headers=JSON))
            assert envoy.client.status == 500
            assert "internal error" in json.loads(envoy.client.body)["error"]["message"]

    async def test_what_is_no_turn_of_ours_passes(self) -> None:
        """Another filter's refusal, of a request that no script has seen."""
        router = harness()
        stream = LocalStream(router.service)
        await stream.send(headers_message("response", {":status": "401", **JSON}, modes=Modes()))
        answer = await stream.receive()
        assert answer
        assert not answer.response_headers.response.header_mutation.set_headers
        stream.cancel()
        await until(lambda: not left(router))
        assert not router.world.warnings


class TestTheEndThatNobodyElseTells:
    """Envoy's access log: a client has left, a node has died."""

    @pytest.mark.parametrize("parts", [0, 1])
    async def test_a_broken_answer_ends_its_turn(self, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast, "_BEHIND", 0.02)
        async with turning() as turn:
            await turn.begin()
            for _ in range(parts):
                await turn.tell(f"1 0 {BEGUN}", EVENTS[0])
            assert turn.router.metric("live_streams") == 1
            log = Log(turn.router)
            log.over("another", turn.name)
            await until(lambda: not left(turn.router))
            await log.close()
            assert turn.router.outcomes() == {"first_turn": 1}
            assert turn.router.metric("turns_incomplete_total") == 1
            assert turn.router.records == 0

    @pytest.mark.parametrize("status", [0, 503])
    async def test_a_request_that_no_node_has_answered(self, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast, "_BEHIND", 0.01)
        async with turning() as turn:
            await turn.begin()
            log = Log(turn.router)
            log.over(turn.name, status=status)
            await until(lambda: not left(turn.router))
            await log.close()
            errors = turn.router.metric("turn_errors_total", type="503")
            assert (turn.router.records, errors) == (0, float(status == 503))

    async def test_a_stored_response_that_cannot_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast, "_BEHIND", 0.01)
        router = harness()
        async with calling(router) as script:
            told = await script.request(Request("/v1/responses/resp_1", method="GET"))
            log = Log(router)
            log.over(told.meta["turn"], status=503)
            await until(lambda: not left(router))
            await log.close()

    async def test_a_good_end_waits_for_the_last_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast, "_BEHIND", 0.0)
        async with turning() as turn:
            await turn.begin()
            log = Log(turn.router)
            log.over(turn.name, broken=False)
            await asyncio.sleep(0.05)
            assert await turn.tell(f"1 1 {BEGUN}", TEXT) == 200
            await log.close()
            assert turn.router.handles == 1

    @pytest.mark.parametrize("parts", [0, 1])
    async def test_an_envoy_that_is_gone_takes_streams_with_it(
        self, parts: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """But no answer in one piece: nothing is heard of that until it is there, and all Envoys may be well."""
        monkeypatch.setattr(fast, "_SILENT", 0.01)
        async with turning() as turn:
            await turn.begin()
            for _ in range(parts):
                await turn.tell(f"1 0 {BEGUN}", EVENTS[0])
            slow = await Turn(turn.router, turn.script).begin(stream=False)
            await Log(turn.router).close()
            await until(lambda: turn.router.world.admission.live == 1)
            await asyncio.sleep(0.05)
            envoy = await turn.script.by_ext_proc(slow.name, Response([decode_body()], headers=JSON))
            assert envoy.client.status == 200

    async def test_an_answer_that_goes_on_is_not_ended_by_doubt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast, "_SILENT", 0.05)
        async with turning() as turn:
            await turn.begin()
            await turn.tell(f"1 0 {BEGUN}", b"".join(EVENTS[:-1]))
            await Log(turn.router).close()
            await turn.tell("2 0", EVENTS[-1][:5])
            await asyncio.sleep(0.1)
            assert await turn.tell("3 1", EVENTS[-1][5:]) == 200
            assert turn.router.handles == 1

    async def test_or_when_envoy_itself_would_have_ended_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", _at_once(asyncio.get_running_loop(), 360.0))
        async with turning(envoy={"stream_idle_timeout": 300.0}) as turn:
            await turn.begin()
            await until(lambda: not left(turn.router))


def _at_once(loop: asyncio.AbstractEventLoop, awaited: float) -> Any:  # noqa: ANN401 - as the loop has it
    """A loop's `call_later` with one delay left out."""
    plain = loop.call_later
    return lambda delay, *rest, **named: plain(0 if delay == awaited else delay, *rest, **named)


class TestDrain:
    async def test_waits_for_calls_and_for_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answer, asked = asyncio.Event(), asyncio.Event()
        plain = StubPrefill.ask

        async def ask(*arguments: Any) -> Any:  # noqa: ANN401 - as the stub has them
            asked.set()
            await answer.wait()
            return await plain(*arguments)

        monkeypatch.setattr(StubPrefill, "ask", ask)
        async with turning() as turn:
            begins = asyncio.create_task(turn.begin())
            await asked.wait()
            drain = asyncio.create_task(turn.router.service.fast.drained(5))
            await asyncio.sleep(0.02)
            assert not drain.done()
            answer.set()
            await begins
            await asyncio.sleep(0.02)
            assert not drain.done()
            await turn.tell(f"1 1 {BEGUN}", TEXT)
            await drain
            assert turn.router.handles == 1

    async def test_ends_what_does_not_end(self) -> None:
        async with turning() as turn:
            await turn.begin()
            log = Log(turn.router)
            await turn.router.service.fast.drained(0.01)
            await log.task  # Envoy's stream is no reason to wait, either
            assert turn.router.outcomes() == {"first_turn": 1}

    async def test_lets_answers_by_ext_proc_end_by_themselves(self) -> None:
        async with turning() as turn:
            await turn.begin(stream=False)
            envoy = await _waiting(turn)
            await turn.router.service.fast.drained(0.01)
            assert turn.router.world.admission.live == 1  # the gRPC server waits for its streams
            envoy._stream.cancel()
            await until(lambda: not left(turn.router))


@pytest.mark.parametrize(
    ("changes", "headers", "said"),
    [
        ({}, CHUNKED, "has no scripts"),
        ({}, {**CHUNKED, **JSON}, ""),  # not for a script anyway
        ({}, SSE, ""),
        ({"envoy": {"lane": "portable"}}, CHUNKED, ""),
        ({"envoy": {"routers": ["router:9090"]}}, CHUNKED, "has no effect: there are names among envoy.routers"),
    ],
)
async def test_an_envoy_without_scripts_is_told_of_once_and_its_turns_take_the_portable_lane(
    changes: dict[str, Any], headers: dict[str, str], said: str
) -> None:
    router = harness(**changes)
    for _ in range(2):
        await router.play(Request(pieces=[chat("Hi", stream=True)]), Response(EVENTS, headers=headers))
    warnings = [w for w in router.world.warnings if "lane" in w]
    assert len(warnings) == bool(said)
    assert all(said in w for w in warnings)
    assert router.metric("answers_streamed_total", lane="portable") == (2 if "event" in headers["content-type"] else 0)
