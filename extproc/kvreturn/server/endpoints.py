"""The gRPC service `envoy.service.endpoint.v3.EndpointDiscoveryService`: tells Envoy which nodes there are.

State of the world: each answer holds all endpoints of the clusters that Envoy asks for on that stream. Envoy
acknowledges an answer by a request with its nonce, and keeps what it has if it loses the stream.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from itertools import count

import grpc

from kvreturn._proto.envoy.config.core.v3.address_pb2 import Address, SocketAddress
from kvreturn._proto.envoy.config.core.v3.health_check_pb2 import DRAINING, UNKNOWN
from kvreturn._proto.envoy.config.endpoint.v3.endpoint_components_pb2 import Endpoint, LbEndpoint, LocalityLbEndpoints
from kvreturn._proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from kvreturn._proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from kvreturn.core.address import split_address
from kvreturn.upstream.pool import Pool

log = logging.getLogger("kvreturn.endpoints")
_SERVICE = "envoy.service.endpoint.v3.EndpointDiscoveryService"
_PREFIX = "type.googleapis.com/"
_TYPE = _PREFIX + ClusterLoadAssignment.DESCRIPTOR.full_name


class EndpointService:
    """Serves the nodes of pools, each as the cluster that is called like its kind of nodes.

    An empty pool is not told: that nobody was found yet is no reason for Envoy to forget those that it knows.

    Args:
        pools: at most one of each kind.
    """

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._pools = {pool.kind: pool for pool in pools}
        self._versions = count(1)
        self._closed = False
        self._wakes: set[asyncio.Event] = set()
        for pool in self._pools.values():
            pool.changed.append(self._wake)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        method = grpc.stream_stream_rpc_method_handler(
            self.stream,
            request_deserializer=DiscoveryRequest.FromString,
            response_serializer=DiscoveryResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"StreamEndpoints": method}),))

    def close(self) -> None:
        """End all streams, which would not end by themselves: Envoy goes to another router, or comes again."""
        self._closed = True
        self._wake()

    async def stream(
        self,
        requests: AsyncIterator[DiscoveryRequest],
        context: "grpc.aio.ServicerContext[DiscoveryRequest, DiscoveryResponse]",
    ) -> None:
        """One stream of one Envoy."""
        wanted: set[str] = set()
        wake = asyncio.Event()
        self._wakes.add(wake)
        reader = asyncio.create_task(_read(requests, wanted, wake))
        sent: list[ClusterLoadAssignment] = []
        try:
            while not (self._closed or reader.done()):
                wake.clear()
                found = [_assignment(pool) for kind, pool in self._pools.items() if kind in wanted and pool.addresses()]
                if found != sent:
                    sent, version = found, str(next(self._versions))
                    answer = DiscoveryResponse(version_info=version, type_url=_TYPE, nonce=version)
                    for assignment in found:
                        answer.resources.add().Pack(assignment, _PREFIX)
                    await context.write(answer)
                await wake.wait()
        finally:
            self._wakes.discard(wake)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()


async def _read(requests: AsyncIterator[DiscoveryRequest], wanted: set[str], wake: asyncio.Event) -> None:
    """Note which clusters Envoy asks for, and what it has against an answer."""
    try:
        async for request in requests:
            if request.HasField("error_detail"):
                log.error("Envoy refuses the endpoints that it was told: %s", request.error_detail.message)
            names = set(request.resource_names)
            if names != wanted:
                wanted.clear()
                wanted.update(names)
                wake.set()
    finally:
        wake.set()


def _assignment(pool: Pool) -> ClusterLoadAssignment:
    endpoints = []
    for node, draining in sorted(pool.addresses().items()):
        host, port = split_address(node)
        address = Address(socket_address=SocketAddress(address=host, port_value=port))
        status = DRAINING if draining else UNKNOWN
        endpoints.append(LbEndpoint(endpoint=Endpoint(address=address), health_status=status))
    return ClusterLoadAssignment(cluster_name=pool.kind, endpoints=[LocalityLbEndpoints(lb_endpoints=endpoints)])
