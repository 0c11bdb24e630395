"""Envoy's access log of a turn, with the real router before scripted nodes."""

import re

from support.gateway import CHAT, scripted
from support.nodes import chat, decode_events, streams


async def test_both_legs_of_a_turn_are_there_with_the_ids_that_the_nodes_got() -> None:
    async with scripted("kvreturn", streams(*decode_events())) as (there, p, d):
        answer = await there.post(CHAT, chat("Hi", stream=True), x_request_id="the client's own")
        assert answer.status == 200
        await there.envoy.stop()
        found = [re.search(r"Z leg=(\w+) .* POST (\S+) .* request=(\S+)$", line) for line in there.log]
        lines = sorted(match.groups() for match in found if match)
    legs = [(leg, CHAT, node.seen[0].request.headers["x-request-id"]) for leg, node in (("client", d), ("prefill", p))]
    assert lines == legs
