"""A conversation as a collector sees it: real Envoy, the router, simulated nodes, and OTLP as it is on the wire."""

import itertools
from typing import Any

import pytest

from kvreturn.sim import SimNode
from support.gateway import client, product
from support.otlp import attributes, collector

CALLER = "0af7651916cd43dd8448eb211c80319c"
STEPS = ["chat sim", "decode", "prefill", "store", "take"]


def parents(node: SimNode) -> list[tuple[str, str]]:
    """Trace and parent that came with the node's requests of turns."""
    got = [r.headers.get("traceparent", "").split("-") for r in node.requests if r.path == "/v1/chat/completions"]
    return [(parts[1], parts[2]) for parts in got]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_five_turns_are_five_linked_traces(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[Any] = []
    async with collector(protocol) as receiver:
        for name, value in {**receiver.environ, "OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_SERVICE_NAME": "here"}.items():
            monkeypatch.setenv(name, value)
        async with product("kvreturn") as there, client(there.front.url) as sdk:
            for turn in range(5):
                messages.append({"role": "user", "content": f"What of line {turn}? " + "The quick brown fox. " * 20})
                headers = {"traceparent": f"00-{CALLER[:-1]}{turn}-b7ad6b7169203331-01"}
                chunks = await sdk.chat.completions.create(
                    model="sim", messages=messages, max_tokens=30, stream=True, extra_headers=headers
                )
                text = "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])
                messages.append({"role": "assistant", "content": text})
                await there.front.outcomes(turn + 1)
            seen = [parents(node) for node in (*there.p, *there.d)]
        roots = sorted((s for s in receiver.spans if s.name == "chat sim"), key=lambda s: s.start_time_unix_nano)
    traces = [[s for s in receiver.spans if s.trace_id == root.trace_id] for root in roots]
    assert [root.trace_id.hex() for root in roots] == [f"{CALLER[:-1]}{turn}" for turn in range(5)]
    assert [sorted(s.name for s in spans) for spans in traces] == [STEPS] * 5
    for spans, root in zip(traces, roots, strict=True):
        assert {s.parent_span_id for s in spans if s is not root} == {root.span_id}
        (decode,) = [s for s in spans if s.name == "decode"]
        assert [e.name for e in decode.events] == ["first_token", "terminal_event"]
    assert [len(root.links) for root in roots] == [0, 1, 1, 1, 1]
    assert all(b.links[0].span_id == a.span_id for a, b in itertools.pairwise(roots))
    for leg, got in zip(("prefill", "decode"), seen, strict=True):
        sent = [next(s for s in spans if s.name == leg) for spans in traces]
        assert got == [(s.trace_id.hex(), s.span_id.hex()) for s in sent]
    told = [attributes(root) for root in roots]
    assert [t["kvreturn.outcome"] for t in told] == ["first_turn", "hit", "hit", "hit", "hit"]
    assert {t["kvreturn.proof"] for t in told} == {"connector"}
    for t in told[1:]:
        parts = [t[f"kvreturn.tokens.{part}"] for part in ("read_back", "local", "computed")]
        assert sum(parts) == t["kvreturn.tokens.prompt"] == t["gen_ai.usage.input_tokens"]
        assert parts[0] > parts[2] > 0
        assert 0 < t["kvreturn.handle.age"] < 60
        assert 0 < t["gen_ai.response.time_to_first_chunk"] < 60
        assert (t["kvreturn.prefill.retries"], t["kvreturn.prefill.fallback"]) == (0, False)
        assert t["gen_ai.response.finish_reasons"] in (["length"], ["stop"])
    turns = {attributes(p)["outcome"]: p.as_double for p in receiver.metrics["kvreturn.turns"].sum.data_points}
    assert turns == {"first_turn": 1, "hit": 4}
    assert {r["service.name"] for r in receiver.resources} == {"here"}
    wire = b"".join(s.SerializeToString() for s in receiver.spans)
    assert not [w for w in (b"quick brown", b"127.0.0.1") if w in wire]
