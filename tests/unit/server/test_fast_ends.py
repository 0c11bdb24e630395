"""The fast lane, router side: exchanges of which Envoy's access log tells that they are over."""

import asyncio
from typing import Any

import pytest

from kvreturn._proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from kvreturn.server import fast
from support.harness import Harness, settings


async def test_a_stored_response_whose_answer_nobody_has_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its headers had come when the client left, and no stream for it had."""
    monkeypatch.setattr(fast, "_BEHIND", 0.01)
    router = Harness(settings(envoy={"lane": "fast"}))
    lane = router.service.fast
    exchange = lane.exchange()
    await exchange.request({":method": "GET", ":path": "/v1/responses/resp_1"}, None)
    exchange.close()
    assert lane.passing == 1
    told = StreamAccessLogsMessage()
    entry = told.http_logs.log_entry.add()
    entry.response.response_code.value = 200
    entry.common_properties.response_flags = b"\x78\x01"  # downstream_connection_termination
    entry.common_properties.metadata.filter_metadata["kvreturn"].update({"turn": exchange.name})

    async def messages() -> Any:  # noqa: ANN401 - an iterator
        yield told

    context: Any = None
    await lane.logs(messages(), context)
    async with asyncio.timeout(2):
        while lane.passing or lane.named:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    assert not router.metric("live_streams")
