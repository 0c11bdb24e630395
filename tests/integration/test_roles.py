"""Roles `prefill` and `decode`: vLLM's example proxies, unmodified, before Envoy, the router and simulated nodes."""

import pytest

from support.gateway import CHAT, COMPLETIONS, SHIPPED, client
from support.orchestrators import MULTITURN, TOY, orchestrated
from support.talk import Talk

TURNS = 4


@pytest.mark.parametrize("shipped", SHIPPED)
@pytest.mark.parametrize("name", [TOY, MULTITURN])
async def test_conversations_are_read_back_from_turn_2_on_and_their_clients_see_no_difference(
    name: str, shipped: str
) -> None:
    async with orchestrated(name, shipped) as (proxy, there), client(proxy.url) as sdk, client(there.oracle) as plain:
        for i, (api, stream) in enumerate([(CHAT, True), (CHAT, False), (COMPLETIONS, True), (COMPLETIONS, False)]):
            talk, expected = (Talk(f"Ada{i}", api, stream=stream) for _ in range(2))
            for _ in range(TURNS):
                assert await talk.turn(sdk) == await expected.turn(plain)
            counted = await there.front.outcomes((i + 1) * TURNS)
            assert counted == {"first_turn": i + 1, "hit": (i + 1) * (TURNS - 1)}
        read = sum(node.stats.read_tokens for node in there.p)
        assert read == there.front.metric("read_back_tokens_total") > 0
