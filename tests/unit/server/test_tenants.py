"""Whose conversations are whose: nobody gets another one's handle, whatever the messages are."""

import pytest

from support.extproc import Request, Response
from support.harness import DECODE, harness
from support.nodes import carried_handle, chat, decode_events, handle

END = Response(decode_events(params=handle()), node=DECODE)

# What the two turns of one conversation are sent with; the configured tenant header; whether they are one tenant's.
PAIRS = [
    ({}, {}, None, True),
    ({"authorization": "Bearer a"}, {"authorization": "Bearer a"}, None, True),
    ({"authorization": "Bearer a"}, {"authorization": "Bearer b"}, None, False),
    ({"authorization": "Bearer a"}, {}, None, False),
    ({"x-api-key": "a"}, {"x-api-key": "b"}, None, False),
    ({"api-key": "a"}, {"x-api-key": "a"}, None, False),
    ({"authorization": "a", "x-api-key": "b"}, {"authorization": "b", "x-api-key": "a"}, None, False),
    ({"x-tenant": "a"}, {"x-tenant": "b"}, None, True),  # no tenant header is configured
    ({"x-tenant": "a"}, {"x-tenant": "b"}, "X-Tenant", False),
    ({"x-tenant": "a", "authorization": "1"}, {"x-tenant": "a", "authorization": "2"}, "X-Tenant", True),
    ({"x-tenant": "a"}, {}, "x-tenant", False),
    ({"x-session-id": "s"}, {"x-session-id": "s", "authorization": "b"}, None, False),  # an id is no credential
]


@pytest.mark.parametrize(("first", "second", "tenant_header", "shared"), PAIRS)
async def test_a_handle_is_found_by_its_tenant_only(
    first: dict[str, str], second: dict[str, str], tenant_header: str | None, *, shared: bool
) -> None:
    router = harness(tenant_header=tenant_header)
    kind = {"content-type": "application/json"}
    await router.play(Request(pieces=[chat("Hi")], headers={**kind, **first}), END)
    await router.play(Request(pieces=[chat("Hi", "Good morning", "And?")], headers={**kind, **second}), END)
    assert carried_handle(router.asks[1].body) == (handle() if shared else None)
    assert router.handles == (1 if shared else 2)  # the other one's is still there
