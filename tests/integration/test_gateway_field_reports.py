"""Failures that others met and that need a real Envoy to show; the numbers are those of the field reports."""

import asyncio
import gzip
import json
import time
from typing import Any

import pytest
from aiohttp import web

from kvreturn.config import Settings
from kvreturn.envoy.bootstrap import build, to_dict
from kvreturn.envoy.lint import lint
from kvreturn.envoy.names import EXT_PROC_FILTER, ROUTER_CLUSTER
from support import cuts
from support.envoy import Json, Router, client_ext_proc, client_manager
from support.gateway import CHAT, SHIPPED, configuration, scripted
from support.nodes import Seen, chat, decode_body, decode_events, handle, replies, sent_params, streams

pytestmark = pytest.mark.parametrize("shipped", SHIPPED)

EVENTS = decode_events(params=handle())
SSE = b"".join(decode_events())
FULL_DUPLEX = {"response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND"}
GZIP = "type.googleapis.com/envoy.extensions.compression.gzip.decompressor.v3.Gzip"


def broken_rules(shipped: str, change: Any) -> set[str]:  # noqa: ANN401 - as `front` has it
    """The lint rules that the shipped configuration breaks after a change, by number."""
    plain = configuration(shipped, ["127.0.0.1:8100"], ["127.0.0.1:8200"])
    bootstrap = to_dict(build(Settings.model_validate(plain)))
    change(bootstrap)
    return {problem.rule.partition("-")[0] for problem in lint(bootstrap)}


def filters(bootstrap: Json) -> list[Json]:
    """Those of the client listener: the first is `readiness`, the last Envoy's router."""
    found: list[Json] = client_manager(bootstrap)["http_filters"]
    return found


def behind_ours(bootstrap: Json) -> int:
    """The place behind our ext_proc filter."""
    return [f["name"] for f in filters(bootstrap)].index(EXT_PROC_FILTER) + 1


async def test_007_content_length_is_lost_where_bodies_are_streamed_and_nothing_else(shipped: str) -> None:
    body = chat("Hi" * 1000)
    answer_body = decode_body(params=handle())
    async with scripted(shipped, replies(answer_body)) as (there, p, d):
        answer = await there.post(CHAT, body)
    assert (answer.headers["transfer-encoding"], "content-length" in answer.headers) == ("chunked", False)
    assert json.loads(answer.body) == json.loads(decode_body())
    seen = d.seen[0]
    assert json.loads(seen.body)["messages"] == json.loads(body)["messages"]
    assert len(seen.body) > len(body)
    framing = {h: seen.headers[h] for h in ("content-length", "transfer-encoding") if h in seen.headers}
    buffered = {"content-length": str(len(seen.body))}
    assert framing == ({"transfer-encoding": "chunked"} if shipped == "full-duplex" else buffered)
    assert p.seen[0].headers["content-length"] == str(len(p.seen[0].body))


def second_ext_proc(address: str, **mode: str) -> Any:  # noqa: ANN401 - as `front` has it
    """Adds another ext_proc server behind ours."""

    def change(bootstrap: Json) -> None:
        resources, chain = bootstrap["static_resources"], filters(bootstrap)
        ours = next(c for c in resources["clusters"] if c["name"] == ROUTER_CLUSTER)
        cluster = json.loads(json.dumps(ours).replace(ROUTER_CLUSTER, "other"))
        host, port = address.split(":")
        (endpoints,) = cluster["load_assignment"]["endpoints"]
        endpoints["lb_endpoints"][0]["endpoint"]["address"]["socket_address"] = {
            "address": host,
            "port_value": int(port),
        }
        resources["clusters"].append(cluster)
        config = {
            "@type": client_ext_proc(bootstrap)["@type"],
            "grpc_service": {"envoy_grpc": {"cluster_name": "other"}},
            "processing_mode": mode,
            "message_timeout": "10s",  # the default is too little for a busy machine
        }
        chain.insert(behind_ours(bootstrap), {"name": "other", "typed_config": config})

    return change


async def test_010_another_ext_proc_in_the_chain_does_no_harm_unless_it_is_full_duplex_too(shipped: str) -> None:
    text = b"".join(decode_events("word " * 6_000, params=handle()))
    assert len(text) > 1 << 20
    expected = b"".join(decode_events("word " * 6_000))
    other = Router()
    async with other.serve():
        streamed = second_ext_proc(other.listen, response_body_mode="STREAMED")
        async with scripted(shipped, streams(*cuts.by(50_021, text)), None, streamed) as (there, _, _):
            assert (await there.post(CHAT, chat("Hi"))).body == expected
    (call,) = other.calls
    assert b"".join(message.response_body.body for message in call) == text
    assert broken_rules(shipped, streamed) == set()
    twice = {"10"} if shipped == "full-duplex" else set()
    assert broken_rules(shipped, second_ext_proc(other.listen, **FULL_DUPLEX)) == twice


async def test_013_a_prefill_may_take_longer_than_envoys_message_timeout(shipped: str) -> None:
    """Envoy's default is 0.2 s."""

    async def slow(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(1)
        return await replies()(seen)

    async with scripted(shipped, streams(*EVENTS), slow) as (there, _, _):
        begun = time.monotonic()
        answer = await there.post(CHAT, chat("Hi"))
    assert (answer.status, answer.body) == (200, SSE)
    assert time.monotonic() - begun > 1


async def test_023_a_node_that_compresses_although_nobody_asked_is_read_all_the_same(shipped: str) -> None:
    compressed = gzip.compress(b"".join(EVENTS))
    headers = {"content-type": "text/event-stream", "content-encoding": "gzip"}
    async with scripted(shipped, streams(*cuts.by(101, compressed), headers=headers)) as (there, p, d):
        answer = await there.post(CHAT, chat("Hi"), accept_encoding="gzip, br")
        assert (answer.body, "content-encoding" in answer.headers) == (SSE, False)
        assert there.metric("handles_captured_total") == 1
    assert "accept-encoding" not in d.seen[0].headers
    assert p.seen[0].headers.get("accept-encoding") != "gzip, br"


async def test_026_a_stream_may_be_longer_than_any_buffer(shipped: str) -> None:
    """Envoy keeps 1 MiB by default."""
    words = "word " * 42_000
    text = b"".join(decode_events(words, params=handle()))
    assert len(text) > 7 << 20
    async with scripted(shipped, streams(*cuts.by(300_007, text))) as (there, _, _):
        answer = await there.post(CHAT, chat("Hi"))
    assert answer.body == text.replace(
        b',"kv_transfer_params":' + json.dumps(handle(), separators=(",", ":")).encode(), b""
    )


async def test_027_a_node_that_is_busy_is_not_asked_again_by_envoy(shipped: str) -> None:
    async with scripted(shipped, replies(b"busy", 503)) as (there, p, d):
        body = chat("Hi")
        answer = await there.post(CHAT, body, x_envoy_retry_on="5xx", x_envoy_max_retries="3")
    assert (answer.status, answer.body) == (503, b"busy")
    assert (len(p.seen), len(d.seen)) == (1, 1)
    assert json.loads(d.seen[0].body) == {**json.loads(body), "kv_transfer_params": sent_params(d.seen[0].body)}

    def retrying(bootstrap: Json) -> None:
        for route in client_manager(bootstrap)["route_config"]["virtual_hosts"][0]["routes"]:
            route["route"]["retry_policy"] = {"retry_on": "5xx"}

    assert broken_rules(shipped, retrying) == {"27"}


async def test_032_a_decompressor_belongs_before_our_filter(shipped: str) -> None:
    """Behind it, compressed answers never end (envoy#21205, still so in 1.40)."""
    config = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.decompressor.v3.Decompressor",
        "decompressor_library": {"name": "gzip", "typed_config": {"@type": GZIP}},
    }
    headers = {"content-type": "text/event-stream", "content-encoding": "gzip"}
    compressed = streams(*cuts.by(101, gzip.compress(b"".join(EVENTS))), headers=headers)

    def before(bootstrap: Json) -> None:
        filters(bootstrap).insert(0, {"name": "decompressor", "typed_config": config})

    def behind(bootstrap: Json) -> None:
        filters(bootstrap).insert(behind_ours(bootstrap), {"name": "decompressor", "typed_config": config})

    async with scripted(shipped, compressed, None, before) as (there, p, _):
        answer = await there.post(CHAT, gzip.compress(chat("Hi")), content_encoding="gzip")
        assert (answer.status, answer.body, "content-encoding" in answer.headers) == (200, SSE, False)
        assert there.metric("handles_captured_total") == 1
    assert json.loads(p.seen[0].body)["messages"] == json.loads(chat("Hi"))["messages"]
    assert broken_rules(shipped, before) == set()
    assert broken_rules(shipped, behind) == {"32"}
