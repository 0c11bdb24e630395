"""Endpoint discovery, over real gRPC with Envoy's own protocol."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from kvreturn._proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from kvreturn._proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from kvreturn.server.endpoints import EndpointService
from kvreturn.upstream.pool import Pool
from support.harness import Clock

TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
P, D = "10.0.0.1:8000", "[fd00::7]:8001"
Told = dict[str, list[tuple[str, int, int]]]


class Talk:
    """One stream, as Envoy has it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stream: Any = channel.stream_stream(
            "/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints",
            request_serializer=DiscoveryRequest.SerializeToString,
            response_deserializer=DiscoveryResponse.FromString,
        )
        self.call = stream()
        self.answer = DiscoveryResponse()

    async def ask(self, *names: str, refusal: str = "") -> None:
        """Ask for clusters, and acknowledge or refuse the answer before."""
        request = DiscoveryRequest(resource_names=names, type_url=TYPE, response_nonce=self.answer.nonce)
        request.version_info = "" if refusal else self.answer.version_info
        if refusal:
            request.error_detail.message = refusal
        await self.call.write(request)

    async def hear(self) -> Told:
        """What is told next: address, port and health status of each node."""
        async with asyncio.timeout(5):
            self.answer = await self.call.read()
        assert self.answer.type_url == TYPE
        told: Told = {}
        for resource in self.answer.resources:
            cluster = ClusterLoadAssignment()
            assert resource.Unpack(cluster)
            nodes = [e for locality in cluster.endpoints for e in locality.lb_endpoints]
            sockets = [(n.endpoint.address.socket_address, n.health_status) for n in nodes]
            told[cluster.cluster_name] = [(s.address, s.port_value, status) for s, status in sockets]
        return told

    async def is_silent(self) -> bool:
        """Whether nothing is told for a moment."""
        reading = asyncio.ensure_future(self.call.read())
        done, _ = await asyncio.wait([reading], timeout=0.1)
        return not done


@pytest.fixture
def pools() -> tuple[Pool, Pool]:
    return Pool([P], Clock(), kind="prefill"), Pool([D], Clock(), kind="decode")


@contextlib.asynccontextmanager
async def serving(*pools: Pool) -> AsyncIterator[tuple[EndpointService, Callable[[], Talk]]]:
    service, server = EndpointService(pools), grpc.aio.server()
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service, lambda: Talk(channel)
    await server.stop(0)


async def test_each_change_is_told_once(pools: tuple[Pool, Pool]) -> None:
    prefill, decode = pools
    async with serving(*pools) as (_, talk):
        envoy = talk()
        await envoy.ask("decode")
        assert await envoy.hear() == {"decode": [("fd00::7", 8001, 0)]}
        await envoy.ask("decode")
        decode.update([D, P])
        assert await envoy.hear() == {"decode": [("10.0.0.1", 8000, 0), ("fd00::7", 8001, 0)]}
        version = envoy.answer.version_info
        decode.drain(P)
        assert await envoy.hear() == {"decode": [("10.0.0.1", 8000, 3), ("fd00::7", 8001, 0)]}
        assert envoy.answer.version_info != version
        decode.update([P])
        assert await envoy.hear() == {"decode": [("10.0.0.1", 8000, 3)]}
        prefill.update([D])  # nobody asked for these
        decode.unreachable(P)  # that, Envoy finds out itself
        assert await envoy.is_silent()


async def test_clusters_that_are_asked_for_later_are_told_too(pools: tuple[Pool, Pool]) -> None:
    async with serving(*pools) as (_, talk):
        envoy = talk()
        await envoy.ask("decode", "of somebody else")
        assert (await envoy.hear()).keys() == {"decode"}
        await envoy.ask("decode", "prefill")
        assert (await envoy.hear()).keys() == {"decode", "prefill"}


async def test_an_empty_pool_is_not_told(pools: tuple[Pool, Pool]) -> None:
    prefill, _ = pools
    prefill.update([])
    async with serving(*pools) as (_, talk):
        envoy = talk()
        await envoy.ask("prefill")
        assert await envoy.is_silent()
    async with serving(*pools) as (_, talk):
        envoy = talk()
        await envoy.ask("prefill")
        prefill.update([P])
        assert await envoy.hear() == {"prefill": [("10.0.0.1", 8000, 0)]}


async def test_a_refusal_is_logged_and_not_answered(pools: tuple[Pool, Pool], caplog: pytest.LogCaptureFixture) -> None:
    async with serving(*pools) as (_, talk):
        envoy = talk()
        await envoy.ask("decode")
        await envoy.hear()
        await envoy.ask("decode", refusal="malformed IP address")
        assert await envoy.is_silent()
    assert caplog.messages == ["Envoy refuses the endpoints that it was told: malformed IP address"]


@pytest.mark.parametrize("end", ["router", "envoy"])
async def test_streams_end_with_either_side(pools: tuple[Pool, Pool], end: str) -> None:
    async with serving(*pools) as (service, talk):
        envoy = talk()
        await envoy.ask("decode")
        await envoy.hear()
        if end == "router":
            service.close()
        else:
            await envoy.call.done_writing()
        async with asyncio.timeout(5):
            assert not isinstance(await envoy.call.read(), DiscoveryResponse)
        assert not service._wakes
