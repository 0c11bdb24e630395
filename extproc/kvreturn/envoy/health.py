"""Asking a router whether it takes streams, as Envoy asks it."""

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

# A channel of its own for each look, with nothing shared: gRPC would back off after the first refusal.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


async def not_serving(target: str, seconds: float) -> str:
    """Ask for a router's health.

    Args:
        target: `host:port` or `unix:/path`.
        seconds: that the answer may take.

    Returns:
        Why it takes no streams; empty if it does.
    """
    async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer to a gRPC health check within {seconds:g} s"
            return f"no answer to a gRPC health check ({e.code().name})"
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "starts, or drains"
