"""The kit's Envoy fails on every breach of the contract: without that, the other tests would show little."""

import asyncio
from collections import deque
from collections.abc import Callable

import pytest
from google.protobuf.struct_pb2 import Struct

from kvreturn._proto.envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from kvreturn._proto.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from kvreturn._proto.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from support.extproc import ContractError, Envoy, Mode, Modes, Request, Response

BUFFERED = Modes()
STREAMED = Modes(Mode.STREAMED)
DUPLEX = Modes(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)
POST = Request(pieces=[b"{}"])
LONG = Request(pieces=[b"{}", b"{}"])
TRAILED = Request(pieces=[b"{}"], trailers=True)


class Scripted:
    """A server that answers whatever is in its script, and then ends the stream with OK."""

    def __init__(self, *answers: pb.ProcessingResponse) -> None:
        self._answers = deque(answers)

    async def send(self, message: pb.ProcessingRequest) -> None:
        del message

    async def receive(self) -> pb.ProcessingResponse | None:
        await asyncio.sleep(0)
        return self._answers.popleft() if self._answers else None

    async def half_close(self) -> None:
        return

    def cancel(self) -> None:
        return


def mutation(
    key: str = "x-a", value: bytes = b"1", *, append: bool = False, remove: str | None = None
) -> pb.HeaderMutation:
    actions = HeaderValueOption.HeaderAppendAction
    action = actions.APPEND_IF_EXISTS_OR_ADD if append else actions.OVERWRITE_IF_EXISTS_OR_ADD
    option = HeaderValueOption(header=HeaderValue(key=key, raw_value=value), append_action=action)
    return pb.HeaderMutation(set_headers=[] if remove else [option], remove_headers=[remove] if remove else [])


def headers(change: pb.HeaderMutation | None = None) -> pb.ProcessingResponse:
    common = pb.CommonResponse(header_mutation=change)
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))


def body(data: bytes | None = None, change: pb.HeaderMutation | None = None) -> pb.ProcessingResponse:
    common = pb.CommonResponse(header_mutation=change)
    if data is not None:
        common.body_mutation.body = data
    return pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))


def streamed(data: bytes = b"", *, end: bool = False) -> pb.ProcessingResponse:
    answer = pb.StreamedBodyResponse(body=data, end_of_stream=end)
    common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=answer))
    return pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))


def with_override(answer: pb.ProcessingResponse) -> pb.ProcessingResponse:
    answer.mode_override.CopyFrom(ProcessingMode())
    return answer


def with_metadata(answer: pb.ProcessingResponse, namespace: str) -> pb.ProcessingResponse:
    struct = Struct()
    struct.update({namespace: {"decode_node": "10.0.0.2:8200"}})
    answer.dynamic_metadata.CopyFrom(struct)
    return answer


def rerouted(answer: pb.ProcessingResponse) -> pb.ProcessingResponse:
    answer.request_body.response.clear_route_cache = True
    return answer


TRAILERS = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
IMMEDIATE = pb.ProcessingResponse(immediate_response=pb.ImmediateResponse())
RESPONSE_HEADERS = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
BREACHES: dict[str, tuple[Modes, Request, list[pb.ProcessingResponse]]] = {
    "headers answered twice": (BUFFERED, POST, [headers(), headers()]),
    "a body answer before the headers": (DUPLEX, POST, [streamed(b"{}", end=True), headers()]),
    "two answers to one body message": (STREAMED, POST, [headers(), body(), body()]),
    "an answer to a body that was not sent": (STREAMED, Request(method="GET"), [headers(), body()]),
    "trailers that were not sent": (BUFFERED, POST, [headers(), body(), TRAILERS]),
    "trailers before the body": (DUPLEX, TRAILED, [TRAILERS, headers()]),
    "a plain body in full duplex": (DUPLEX, POST, [headers(), body(b"{}")]),
    "a streamed body outside of full duplex": (STREAMED, POST, [headers(), streamed(b"{}", end=True)]),
    "an end that was not received": (DUPLEX, TRAILED, [headers(), streamed(b"{}", end=True), TRAILERS]),
    "bytes behind the end": (DUPLEX, POST, [headers(), streamed(end=True), streamed(b"{}")]),
    "an answer over 64 KiB": (DUPLEX, POST, [headers(), streamed(b"x" * 65_537, end=True)]),
    "full duplex closed before its end": (DUPLEX, POST, [headers(), streamed(b"{}")]),
    "headers changed by a streamed body": (STREAMED, POST, [headers(), body(b"{}", mutation())]),
    "a route changed by a streamed body": (STREAMED, POST, [headers(), rerouted(body(b"{}"))]),
    "content-length when streamed": (STREAMED, POST, [headers(mutation("content-length", b"2")), body()]),
    "a wrong content-length": (BUFFERED, POST, [headers(), body(b"{ }", mutation("content-length", b"2"))]),
    "an override with full duplex": (DUPLEX, POST, [with_override(headers())]),
    "an override by a body": (BUFFERED, POST, [headers(), with_override(body())]),
    "a foreign metadata namespace": (BUFFERED, POST, [headers(), with_metadata(body(), "envoy.lb")]),
    "authority": (BUFFERED, POST, [headers(mutation(":authority"))]),
    "host": (BUFFERED, POST, [headers(mutation("host"))]),
    "x-envoy-": (BUFFERED, POST, [headers(mutation(remove="x-envoy-expected-rq-timeout-ms"))]),
    "a pseudo header removed": (BUFFERED, POST, [headers(mutation(remove=":path"))]),
    "an upper case name": (BUFFERED, POST, [headers(mutation("X-A"))]),
    "an empty value": (BUFFERED, POST, [headers(mutation(value=b""))]),
    "a value of two lines": (BUFFERED, POST, [headers(mutation(value=b"a\r\nb: c"))]),
    "a value over 16 KiB": (BUFFERED, POST, [headers(mutation(value=b"x" * 16_385))]),
    "a second value": (BUFFERED, POST, [headers(mutation(append=True))]),
    "an answer without content": (BUFFERED, POST, [pb.ProcessingResponse()]),
    "more after an immediate response": (BUFFERED, POST, [IMMEDIATE, headers()]),
    "a response before there is one": (BUFFERED, POST, [headers(), body(), RESPONSE_HEADERS]),
}


async def play(stream: Scripted, modes: Modes, request: Request) -> Envoy:
    envoy = Envoy(stream, modes)
    await envoy.request(request)
    await envoy.finish()
    return envoy


@pytest.mark.parametrize("breach", BREACHES)
async def test_breaches(breach: str) -> None:
    modes, request, answers = BREACHES[breach]
    with pytest.raises(ContractError):
        await play(Scripted(*answers), modes, request)


async def test_an_immediate_response_after_the_response_began() -> None:
    envoy = Envoy(Scripted(headers(), body(), RESPONSE_HEADERS, IMMEDIATE), BUFFERED)
    await envoy.request(POST)
    with pytest.raises(ContractError, match="after the response has begun"):
        await envoy.respond(Response([b"x"]))


async def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Envoy, "silence", 0.02)
    stream = Scripted()
    monkeypatch.setattr(stream, "receive", lambda: asyncio.sleep(1))
    with pytest.raises(ContractError, match="silence"):
        await Envoy(stream, BUFFERED).request(POST)


GOOD: dict[str, tuple[Modes, Request, list[pb.ProcessingResponse], Callable[[Envoy], bool]]] = {
    "buffered": (
        BUFFERED,
        POST,
        [headers(), with_metadata(body(b"{ }", mutation("content-length", b"3")), "kvreturn")],
        lambda e: (e.upstream.body, e.upstream.node, e.upstream.ended) == (b"{ }", "10.0.0.2:8200", True),
    ),
    "streamed": (STREAMED, LONG, [headers(), body(), body(b"!")], lambda e: e.upstream.pieces == [b"{}", b"!"]),
    "duplex": (
        DUPLEX,
        TRAILED,
        [headers(mutation(remove="content-type")), streamed(b"a"), streamed(b"b"), TRAILERS],
        lambda e: (
            (e.upstream.body, e.upstream.trailers) == (b"ab", True) and "content-type" not in str(e.upstream.headers)
        ),
    ),
    "a stream that is closed": (
        STREAMED,
        LONG,
        [headers()],
        lambda e: (e.upstream.body, e.upstream.bypassed) == (b"{}{}", True),
    ),
    "an immediate response": (BUFFERED, POST, [IMMEDIATE], lambda e: e.answered and e.upstream.headers is None),
}


@pytest.mark.parametrize("case", GOOD)
async def test_what_is_no_breach(case: str) -> None:
    modes, request, answers, holds = GOOD[case]
    assert holds(await play(Scripted(*answers), modes, request))
