"""Fuzz targets: the ext_proc adapter, between an Envoy that keeps its contract and one that does not."""

import asyncio
import sys
from collections.abc import Mapping
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from fuzz.strategies import SECRET, bounded, chunks, cuts, holding, objects, replies, requests, texts
from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from kvreturn.core.ports import Reply
from kvreturn.server import service
from kvreturn.server.exchange import Exchange
from support.cuts import at
from support.extproc import ALL_MODES, Kind, Modes, Request, Response, body_message, headers_message, trailers_message
from support.harness import Harness, harness
from support.messages import Mode
from support.turns import D1, compact

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/responses/resp_1",
    "/v1/models",
)
KINDS: tuple[Kind, ...] = ("request", "response")
LOOKED_AT = {("POST", path) for path in PATHS[:4]} | {("GET", PATHS[4]), ("POST", PATHS[4])}
PROOFS = st.sampled_from(["connector", "router", "trusted", "off"])
_LIMITS = {"request_bytes": 2000, "event_bytes": 300, "response_bytes": 600}
_HEADERS = ("authorization", "traceparent", "x-request-id", "x-kvreturn-node", "x-session-token", "accept")
_words = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=12)
request_headers = st.fixed_dictionaries(
    {"content-type": st.sampled_from(["application/json", "", "application/x+json; charset=utf-8", "text/plain"])},
    optional={
        "content-encoding": st.sampled_from(["", "identity", "gzip"]),
        **dict.fromkeys(
            ("authorization", "traceparent", "x-request-id", "x-kvreturn-node", "x-session-token", "accept"), _words
        ),
    },
)
kinds_of_answer = st.sampled_from(
    ["text/event-stream; charset=utf-8", "application/json", "TEXT/EVENT-STREAM", "text/html", ""]
)
response_headers = st.fixed_dictionaries(
    {"content-type": kinds_of_answer}, optional={"x-request-id": _words, "x-kvreturn-x": _words}
)
sent = st.one_of(requests.map(compact), texts(objects), st.binary(max_size=40))
methods = st.sampled_from(["POST", "POST", "GET"])
statuses = st.sampled_from([200, 200, 204, 400, 404, 422, 499, 500, 503, 529, 599])


@st.composite
def answer_texts(draw: st.DrawFn) -> bytes:
    """What D answers: events or a body, some of them with a handle."""
    parts = draw(st.lists(holding() | texts(chunks), max_size=4))
    if draw(st.booleans()):
        return parts[0] if parts else b""
    return b"".join(b"data: " + p.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n\n" for p in parts)


def router(proof: str, answers: list[Reply]) -> Harness:
    """A router whose prefill nodes give these answers, over and over."""
    endless = iter(lambda: 0, 1)
    return harness(lambda _: answers[next(endless) % len(answers)], proof=proof, limits=_LIMITS)


@bounded
@given(
    st.sampled_from(ALL_MODES),
    st.builds(
        Request,
        st.sampled_from(PATHS),
        st.just(()),
        st.sampled_from(["POST", "POST", "GET"]),
        request_headers,
        st.booleans(),
    ),
    sent,
    st.builds(Response, st.just(()), statuses, response_headers, st.booleans(), st.sampled_from([D1, None, "rubbish"])),
    answer_texts(),
    st.tuples(cuts, cuts),
    st.lists(replies(), min_size=1, max_size=3),
    PROOFS,
)
def test_an_exchange_keeps_to_envoys_contract_and_leaks_nothing(  # noqa: PLR0917 - drawn
    modes: Modes,
    request: Request,
    body: bytes,
    response: Response,
    answer: bytes,
    offsets: tuple[list[int], list[int]],
    answers: list[Reply],
    proof: str,
) -> None:
    """A breach of the contract, an exception and an end that does not come all fail the test."""
    asked = Request(request.path, at(offsets[0], body), request.method, request.headers, request.trailers)
    answered = Response(at(offsets[1], answer), response.status, response.headers, response.trailers, response.node)

    async def play() -> None:
        raised: list[BaseException | None] = []
        tell = mock.patch.object(service.log, "exception", side_effect=lambda _: raised.append(sys.exception()))
        with tell, mock.patch("kvreturn.server.answering.log"):
            envoy = await router(proof, answers).play(asked, answered, modes)
        assert not raised
        assert envoy.failed is None
        if (request.method, request.path) in LOOKED_AT and not envoy.client.bypassed:
            assert SECRET.encode() not in envoy.client.body
        assert not any(SECRET in value for value in (envoy.client.headers or {}).values())

    asyncio.run(play())


@st.composite
def messages(draw: st.DrawFn) -> pb.ProcessingRequest:
    """A message of Envoy's, of any kind."""
    kind = draw(st.sampled_from(KINDS))
    part = draw(st.sampled_from(["headers", "body", "body", "trailers"]))
    end = draw(st.booleans())
    if part == "trailers":
        return trailers_message(kind)
    if part == "body":
        return body_message(kind, draw(sent if kind == "request" else answer_texts()), end=end)
    headers: Mapping[str, str]
    if kind == "request":
        headers = {":method": draw(methods), ":path": draw(st.sampled_from(PATHS) | _words)}
        return headers_message(kind, {**headers, **draw(request_headers)}, end=end)
    headers = {":status": str(draw(statuses)), **draw(response_headers)}
    return headers_message(kind, headers, end=end, node=draw(st.sampled_from([D1, None])))


modes = st.builds(Modes, st.sampled_from(Mode.values()), st.sampled_from(Mode.values()), st.booleans())


@bounded
@given(st.lists(messages(), min_size=1, max_size=8), modes, st.lists(replies(), min_size=1, max_size=3), PROOFS)
def test_any_messages_in_any_order_are_answered(
    sequence: list[pb.ProcessingRequest], filter_modes: Modes, answers: list[Reply], proof: str
) -> None:
    sequence[0].protocol_config.CopyFrom(filter_modes.config())
    turn = _is_turn(sequence)

    async def play() -> None:
        exchange = Exchange(router(proof, answers).world)
        for message in sequence:
            answered = await exchange.handle(message)
            for text in answered if turn else ():
                assert SECRET.encode() not in (text if isinstance(text, bytes) else text.SerializeToString())
            if not filter_modes.duplex and not filter_modes.early:
                assert len(answered) == 1, "outside of full duplex, each message has exactly one answer"
            if exchange.over:
                break
        exchange.close()

    with mock.patch("kvreturn.server.answering.log"):
        asyncio.run(play())


def _is_turn(sequence: list[pb.ProcessingRequest]) -> bool:
    """Whether these are about one turn, so that D's handle can be in the response."""
    first, *rest = sequence
    headers = {h.key: h.raw_value.decode("latin-1") for h in first.request_headers.headers.headers}
    posted = headers.get(":method") == "POST" and headers.get(":path") in PATHS[:4]
    again = any(m.HasField("request_headers") for m in rest)
    return posted and not first.request_headers.end_of_stream and not again
